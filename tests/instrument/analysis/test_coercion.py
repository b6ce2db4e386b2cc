"""Prompts of tokens with named spans."""

import numpy as np
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
    for given in (torch.arange(3, 40), np.arange(3, 40)):
        same = ri.prompt(given, bridge, query=pairs, answers="c1")
        assert same.tokens == made.tokens and same.spans == {"query": (10, 11, 14)}
        assert same.answers == ("c1",)


def test_spans_that_no_prompt_of_tokens_has():
    bridge = ri.load("niah/repo")
    wrong = {"needle": ("x", (3, 99), (5, 5), 4, [(1, 2), 7]), "generated": (3, -37, "x")}
    for name, values in wrong.items():
        for value in values:
            with refused(name):
                ri.prompt(list(range(3, 40)), bridge, **{name: value})
