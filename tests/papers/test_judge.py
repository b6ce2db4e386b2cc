"""Verdicts from tables of evidence: the stored ones as they were, and tests and intervals beside
scipy's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from position_papers.cope import gates
from position_papers.hope import beyond
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claim,
    Kind,
    evidence,
    together,
)
from position_papers.kit.judge.differences import (
    NORMAL_95,
    Sample,
    between,
    holm,
    in_words,
    paired_difference,
    share_difference,
    wilson,
)
from position_papers.kit.judge.rules import Above, AtLeast, BeyondNull, Observed, Values
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


@given(some.integers(0, 40), some.integers(1, 40))
def test_every_interval_is_of_95_per_cent(right, more):
    """Found: half of Wilson's interval at one standard error, which is of 68 %."""
    count = right + more
    low, high = stats.binomtest(right, count).proportion_ci(0.95, "wilson")
    assert_allclose(wilson(right / count, count), (low, high), atol=1e-9)
    of_share = Sample.of_share(right / count, count)
    assert of_share.spread == pytest.approx((high - low) / 2, abs=1e-9)
    assert of_share.over == "prompts, half of Wilson's 95 % interval"
    # Newcombe's of two equal shares: as far to both sides as both limits are apart
    both = share_difference(right / count, right / count, (count, count))
    reach = np.hypot(right / count - low, high - right / count)
    assert_allclose(both.limits(NORMAL_95), (-reach, reach), atol=1e-9)
    told = in_words({"a": both}, "below", " points", 100)
    assert f"95 % interval {-100 * reach:.3g} to {100 * reach:.3g} over {count} and" in told


@given(samples)
def test_the_interval_over_prompts_is_students(scores):
    own = Sample.of_prompts(np.array(scores))
    low, high = stats.t.interval(0.95, len(scores) - 1, np.mean(scores), stats.sem(scores))
    assert own.spread == pytest.approx((high - low) / 2)
    assert own.over == "prompts, half of the 95 % interval"
    assert own.standard_error == pytest.approx(stats.sem(scores))


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda place: str(place.relative_to(FIGURES)))
def test_intervals_that_ship_say_their_level(shipped):
    table = read_evidence(shipped / EVIDENCE)
    texts = table["text"][table["part"].isin(["over", "note"])]
    assert not [text for text in texts if "interval" in text and "95 %" not in text]
    # what z = 1 gave: two counts of prompts beside one error
    assert not texts.str.contains(r"standard error \S+ over \d+ and \d+ prompts").any()


def values_of(place: str, label: str) -> Iterator[tuple[str, Values]]:
    """Checkpoint and values of every row of a claim on a shipped page that was judged."""
    paper = named(())[place.rpartition("/")[2]]
    claim = next(each for each in paper.claims if each.label == label)
    table = read_evidence(FIGURES / place / EVIDENCE)
    for (_, seed), own in table[table["claim"] == label].groupby(["row", "seed"], sort=False):
        found = judge(claim, own.assign(seed=""))
        if found.estimate.value is not None:
            yield f"{found.checkpoint} {seed}", found.estimate.values


@pytest.mark.parametrize("label", ["C6", "C6 (separators)"])
def test_what_is_judged_of_gates_is_stored(label):
    """The place is that of the largest margin, and the numbers are means of what is stored."""
    rows = dict(values_of("cope", label))
    assert len(rows) >= 3
    for name, values in rows.items():
        texts = {
            number: [text[number] for text in values[gates.BY_TEXT]] for number in gates.NUMBERS
        }
        judged_by = gates.KEPT if label == "C6" else gates.REACHED
        assert values[judged_by] == pytest.approx(np.mean(texts["chance"])), name
        assert values[gates.WITHIN] == pytest.approx(np.mean(texts["observed"])), name
        (margins,) = values[gates.BY_PLACE]
        assert len(margins) >= 8 and max(margins.values()) > np.median(list(margins.values()))


@pytest.mark.parametrize("place", ["hope", "smollm2-135m/random-tokens/hope"])
@pytest.mark.parametrize("label", ["H4", "H4 (wording)"])
def test_what_is_judged_beyond_the_training_length_is_stored(place, label):
    """The curves give the numbers of the rule again."""
    for _, values in values_of(place, label):
        again = beyond.shares_of_points(values)
        assert {name: values[name] for name in again} == pytest.approx(again)


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


def test_what_the_numbers_say_is_a_reason_made_from_the_values_of_the_rule():
    def says(values):
        return f"x is {values['x']:g}" if values["x"] else ""

    claim = Claim("X3", "it is much", "here", "1", AtLeast("x", 0.5), says=says)
    for value, texts in ((0.6, ["x is 0.6"]), (0.1, ["x is 0.1"]), (0.0, [])):
        (found,) = judged([evidence(claim, "c", "x", {"x": value}, value, note="a note")])
        assert [each.text for each in found.reasons if each.kind == Kind.SAYS] == texts
        assert found.notes == ("a note",)
    (silent,) = judged([evidence(claim, "c", "x", {}, 0.6, unmeasurable="why")])
    assert [each.kind for each in silent.reasons] == [Kind.WHY]
    told = [
        replace(evidence(claim, "c", "x", {"x": value}, value), seed=seed)
        for seed, value in ((1, 0.6), (3, 0.8))
    ]
    (found,) = judged(told)
    assert [each.text for each in found.reasons if each.kind == Kind.SAYS] == ["seed 1: x is 0.6"]


@pytest.mark.parametrize("name", PAPERS)
def test_the_losses_on_a_page_are_those_in_the_records_of_the_zoo(name):
    paths = given_checkpoints(named([name])[name].zoo, {}).paths
    assert training_rows(paths) == read_page(FIGURES / name)["trained"]
