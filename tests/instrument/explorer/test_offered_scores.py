"""Scores on the map of heads from measures that declare them: ours, and another package's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from families import repositioned
from packages import install

import repo_interp as ri
from repo_interp.explorer import Edit, Session
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import message
from repo_interp.measures.measure_catalogue import measures_offering

TOKENS = [3 + (7 * place) % 50 for place in range(24)]
PACKAGE = {
    "pyproject.toml": """
[project]
name = "offered-extras"
version = "1.0"
[project.entry-points."repo_interp.measures"]
lengths = "offered_extras:Lengths"
answered = "offered_extras:Answered"
other_schemes = "offered_extras:OtherSchemes"
silent = "offered_extras:Silent"
absent = "offered_extras:Absent"
""",
    "offered_extras.py": """
from dataclasses import dataclass
from typing import ClassVar

from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import HeadScore, Measure, Needs, Statistics


@dataclass(frozen=True)
class Lengths(Measure, needs=Needs(by_pair=True, documents=True)):
    name: str = "lengths"
    offers: ClassVar[str] = "head_scores"

    def observe(self, inputs, spans):
        length = inputs.queries.double().norm(dim=-1).mean(-1)
        return Statistics(per_prompt=arrays(inputs, {"length": ("prompt layer head", length)}))

    def conclude(self, statistics):
        return described_group(statistics.per_prompt, {"length": "length of queries"})

    def head_scores(self, group):
        return {f"length of {self.name}": HeadScore(group["length"], "mean over the tokens")}


@dataclass(frozen=True)
class Answered(Lengths, needs=Needs(spans=("generated",), by_pair=True, documents=True)):
    name: str = "answered"


@dataclass(frozen=True)
class OtherSchemes(Lengths, needs=Needs(schemes=("cope",), by_pair=True, documents=True)):
    name: str = "other_schemes"


@dataclass(frozen=True)
class Silent(Lengths, needs=Needs(by_pair=True, documents=True)):
    name: str = "silent"
    offers: ClassVar[str] = ""
""",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    install(tmp_path, PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("offered_extras", None)


def test_measures_that_offer_something_are_found_by_what_they_declare():
    assert measures_offering("head_positions") == ("positions",)
    assert measures_offering("head_positions", "head_scores") == ("positions", "attention_mass")
    assert measures_offering("prompt_tokens") == ("positions", "attention_rows")
    assert measures_offering("nothing") == ()


def test_another_package_gives_the_map_a_score(installed):
    assert measures_offering("head_scores") == (
        *("positions", "attention_mass"),
        *("answered", "lengths", "other_schemes"),
    ), "the broken one is left out, and the silent one"
    bridge = ri.bridge(repositioned("repo"))
    session = Session(bridge, TOKENS, [Edit(kind="zero_ablated", layer=0)])
    run = ri.analyze(bridge, [TOKENS], ("lengths",))
    clean, edited = session.heads(), session.heads(edited=True)
    names = clean["score"].values.tolist()
    assert "length of lengths" in names and names == edited["score"].values.tolist()
    # No answer in the prompt, and no layer of that scheme
    assert not {"length of answered", "length of other_schemes"} & set(names)
    score = clean["head_score"].sel(score="length of lengths")
    measured = run["lengths"]["length"].isel(prompt=0).transpose("layer", "head")
    np.testing.assert_array_equal(score, measured)
    changed = edited["head_score"].sel(score="length of lengths")
    np.testing.assert_array_equal(changed[0], score[0])
    assert np.abs(changed[1] - score[1]).max() > 1e-4
    answer = Explored(bridge, [TOKENS]).answer(message({"ask": "prompt"}))
    drawn = answer["heads"]["scores"]["length of lengths"]
    assert drawn["values"] == score.values.tolist() and drawn["meaning"] == "mean over the tokens"


def test_a_score_that_needs_an_answer_is_there_with_one(installed):
    bridge = ri.bridge(repositioned("repo"))
    names = Session(bridge, ri.tasks.Prompt(tuple(TOKENS), {}, generated=(20, 21))).heads()["score"]
    assert {"length of answered", "attention to generated"} <= set(names.values.tolist())
