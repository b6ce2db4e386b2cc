"""Verdicts from tables of evidence: the stored ones as they were, and tests and intervals beside
scipy's.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numpy.testing import assert_allclose
from places import ROOT
from scipy import stats
from verdicts import judged

from position_papers import PAPERS, named
from position_papers.kit.judge.claims import FAILS, HOLDS, UNDECIDED, Claim, evidence, together
from position_papers.kit.judge.differences import (
    Sample,
    between,
    holm,
    paired_difference,
    wilson,
)
from position_papers.kit.judge.rules import Above, AtLeast, BeyondNull, Observed
from position_papers.kit.judge.table import EVIDENCE, judge, read_evidence
from position_papers.kit.paper_directory import read_page, training_rows, write_verdicts
from position_papers.kit.subjects import given as given_checkpoints

FIGURES = ROOT / "figures"
SHIPPED = [file.parent for file in sorted(FIGURES.rglob(EVIDENCE))]


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda place: str(place.relative_to(FIGURES)))
def test_every_page_that_ships_is_what_the_units_in_its_table_come_to(shipped, tmp_path):
    """Every verdict with its reasons and numbers; no table of evidence states an outcome."""
    assert "outcome" not in read_evidence(shipped / EVIDENCE)["part"].values
    shutil.copy(shipped / EVIDENCE, tmp_path)
    write_verdicts(tmp_path, named(())[shipped.name], read_page(shipped))
    for name in ("verdicts.csv", "README.md", "page.json"):
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes(), name


values = some.floats(-100, 100).map(lambda value: round(value, 3))
samples = some.lists(values, min_size=3, max_size=9).filter(lambda own: np.ptp(own) > 0.1)
RIVAL = Claim("X1", "it is more", "here", "1", Above("x", ("a",)))


@given(samples, samples)
def test_a_verdict_rests_on_the_test_of_scipy_that_its_units_allow(one, other):
    """Other seeds: Welch's; equal ones: pairs. Both after a round trip through a file."""
    first, second = (np.array(own) for own in (one, other))
    numbers = tuple(range(len(one))), tuple(range(100, 100 + len(other)))
    apart = [
        Sample(own, np.empty(0), 0, False, of)
        for own, of in zip((first, second), numbers, strict=True)
    ]
    welch = stats.ttest_ind(first, second, equal_var=False, alternative="greater")
    found = _told({"a": between(*apart)})
    assert_allclose(found.estimate.values["x"]["a"].p_value(), welch.pvalue, rtol=1e-6, atol=1e-12)
    size = min(len(one), len(other))
    pairs = [
        Sample(own[:size], np.empty(0), 0, False, numbers[0][:size]) for own in (first, second)
    ]
    if np.ptp(first[:size] - second[:size]) > 0.1:
        paired = stats.ttest_rel(first[:size], second[:size], alternative="greater")
        of_seeds = _told({"a": between(*pairs)}).estimate.values["x"]["a"]
        of_prompts = _told({"a": paired_difference(first[:size], second[:size])})
        assert_allclose(of_seeds.p_value(), paired.pvalue, rtol=1e-6, atol=1e-12)
        assert of_prompts.estimate.values["x"]["a"].p_value() == pytest.approx(of_seeds.p_value())
    assert (found.outcome == HOLDS) == (welch.pvalue < stats.norm.sf(2))


def _told(rivals):
    (found,) = judged([evidence(RIVAL, "c", "x", {"x": rivals}, 1.0)])
    return found


@given(some.integers(0, 40), some.integers(1, 40), some.floats(0.2, 3))
def test_limits_of_a_share_are_wilsons(right, more, errors):
    count = right + more
    known = stats.binomtest(right, count).proportion_ci(2 * stats.norm.cdf(errors) - 1, "wilson")
    assert_allclose(wilson(right / count, count, errors), known, atol=1e-9)


@given(some.lists(some.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_steps_down_from_the_smallest(p_values):
    """As he wrote it: while the smallest p-value left is at most the level over how many are."""
    adjusted = holm(np.array(p_values))
    for level in (0.01, 0.05, 0.3):
        left = sorted(p_values)
        while left and left[0] * len(left) <= level:
            left.pop(0)
        assert (adjusted <= level).sum() == len(p_values) - len(left)


@given(samples, some.lists(values, min_size=1, max_size=12))
def test_evidence_is_read_back_as_it_was_written(scores, null):
    claim = Claim("X2", "it is above", "here", "1", BeyondNull("x"))
    number = float(np.mean(scores))
    observed = Observed(number, np.array(null))
    own = evidence(
        claim, "c", "x | y", {"x": observed}, number, 0.1, "texts", 3, 'a "control"', ("a", "b, c")
    )
    (found,) = judged([own])
    assert found.outcome == (HOLDS if number > max(null) else FAILS)
    assert (found.estimate.value, found.interval, found.notes) == (number, own.interval, own.notes)
    read = found.estimate.values["x"]
    assert read.value == number and read.null == null


def test_one_changed_unit_changes_the_verdict():
    """R1 of the stored table: a seed of RePo that reverses nothing."""
    table = read_evidence(FIGURES / "repo" / EVIDENCE)
    claim = next(each for each in named(())["repo"].claims if each.label == "R1")
    own = table[(table["claim"] == "R1") & (table["checkpoint"] == "reversal/repo")]
    assert judge(claim, own).outcome == HOLDS
    changed = own.copy()
    of_seeds = changed["part"].eq("own") & changed["unit"].isin(["seed 0", "seed 1", "seed 2"])
    changed.loc[of_seeds, "value"] = 0.0
    assert judge(claim, changed).outcome == UNDECIDED
    with pytest.raises(KeyError):
        judge(claim, own[own["quantity"] == ""])


def test_seeds_of_one_claim_are_one_verdict():
    claim = Claim("X3", "it is much", "here", "1", AtLeast("x", 0.5))
    told = [
        replace(evidence(claim, "c", "x", {"x": value}, value), seed=seed)
        for seed, value in ((0, 0.6), (3, 0.8))
    ]
    (found,) = judged(told)
    assert (found.outcome, found.estimate.seeds) == (HOLDS, 2)
    assert len(judged(told[::-1])) == 2, "two rows"
    for seeds, outcome in (
        ((HOLDS, UNDECIDED), UNDECIDED),
        ((UNDECIDED, FAILS), FAILS),
        ((HOLDS, FAILS), FAILS),
    ):
        by_seed = {seed: replace(found, outcome=own) for seed, own in enumerate(seeds)}
        assert together(by_seed).outcome == outcome


@pytest.mark.parametrize("name", PAPERS)
def test_the_losses_on_a_page_are_those_in_the_records_of_the_zoo(name):
    paths = given_checkpoints(named([name])[name].zoo, {}).paths
    assert training_rows(paths) == read_page(FIGURES / name)["trained"]
