"""Scores of single prompts: what a record has of them, read back."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from position_papers.card.records import records_of
from position_papers.training import prompt_scores
from position_papers.zoo_directory import DIRECTORY

SCORES = st.one_of(
    st.lists(st.sampled_from((0.0, 1.0)), min_size=3, max_size=3),
    st.lists(st.floats(0, 9), min_size=3, max_size=3),
)


@given(st.dictionaries(st.sampled_from("abc"), SCORES))
def test_what_is_stated_is_read_back_with_four_decimals(scores):
    scores = {name: np.array(values) for name, values in scores.items()}
    means = {name: float(values.mean()) for name, values in scores.items()}
    record = {"prompts": 3, "test_sets": means | {"longer": None}}
    record["by_prompt"] = prompt_scores.stated(scores)
    found = prompt_scores.read(json.loads(json.dumps(record)))
    assert found.keys() == scores.keys()
    for name, values in scores.items():
        np.testing.assert_allclose(found[name], values, atol=0.5001e-4)


def test_right_and_wrong_are_digits_and_what_the_mean_says_is_left_out():
    scores = {"1": np.ones(4), "2": np.array([0.0, 1, 1, 0]), "3": np.array([0.25, 0.5, 1, 1])}
    assert prompt_scores.stated(scores) == {"2": "0110", "3": [0.25, 0.5, 1.0, 1.0]}


def test_records_of_means_alone_have_no_prompts():
    run, *_ = records_of(DIRECTORY, "reversal")["rope"]
    assert run.recorded.means["22"] == 0 and run.prompts(("22",)) is None
    assert prompt_scores.read({"prompts": 2, "test_sets": {"2": 1.0}}) == {}
