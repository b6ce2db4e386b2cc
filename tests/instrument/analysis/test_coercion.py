"""Prompts of tokens with named spans."""

import numpy as np
import pytest
import torch
from refusals import refused

import repo_interp as ri


def test_a_prompt_of_tokens_has_spans_of_tokens():
    bridge = ri.load("niah/repo")
    numbers = list(range(3, 40))
    made = ri.prompt(numbers, bridge, needle=(3, 6), query=[(10, 12), (14, 15)], generated=-2)
    assert made.tokens == tuple(numbers) and made.generated == (35, 36)
    assert made.spans == {"needle": (3, 4, 5), "query": (10, 11, 14)}
    assert made.token_text is not None and len(made.token_text) == 37
    pairs = (10, np.int64(12)), (14, 15)
    assert ri.prompt(numbers, bridge, query=pairs).spans["query"] == (10, 11, 14)
    tensor = ri.prompt(torch.arange(3, 40), bridge, needle=(3, 6), generated=-2, answers="c1")
    assert tensor.spans == {"needle": (3, 4, 5)} and tensor.answers == ("c1",)
    assert ri.prompt(np.arange(3, 9), bridge).tokens == tuple(range(3, 9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"needle": "x"},
        {"needle": (3, 99)},
        {"needle": (5, 5)},
        {"needle": 4},
        {"needle": [(1, 2), 7]},
        {"generated": 3},
        {"generated": -37},
        {"generated": "x"},
    ],
)
def test_spans_that_no_prompt_of_tokens_has(wrong):
    with refused(next(iter(wrong))):
        ri.prompt(list(range(3, 40)), ri.load("niah/repo"), **wrong)
