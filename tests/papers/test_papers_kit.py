"""What every paper is made of: rules in closed form and in words, verdicts, the page over all papers, and claims that stand in one file."""

from __future__ import annotations

import ast
import csv
import dataclasses
import inspect
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from numpy.testing import assert_allclose
from scipy import stats

import position_papers
from position_papers.catalogue import named
from position_papers.kit.build import Build, Durations, with_experiments
from position_papers.kit.cache import Cache
from position_papers.kit.claims import (
    BLIND,
    BY_CHANCE,
    FAILS,
    HOLDS,
    SEEN,
    UNDEFINED,
    UNMEASURED,
    Claim,
    Evidence,
    Verdict,
    judge,
    judge_together,
    verdict_rows,
)
from position_papers.kit.differences import (
    Difference,
    holm,
    level,
    paired_difference,
    quantile,
    seed_difference,
    share_difference,
    wilson,
)
from position_papers.kit.experiment import Drawing, Experiment, Needs, Paper, run, without_checkpoints
from position_papers.kit.gallery import NOT_YET, claim_rows, number_rows, page_above, tally, write_gallery
from position_papers.kit.outcomes import AS_WORDED, HEADINGS, IN_PART, Told, in_one_paragraph, primary_rows, standing
from position_papers.kit.own_subjects import OwnSubject, in_words
from position_papers.kit.rules import (
    Above,
    All,
    AtLeast,
    AtMost,
    Below,
    BeyondNull,
    Custom,
    NotBelow,
    Observed,
    Rule,
    Significant,
    Where,
    chance,
    in_errors,
)
from position_papers.kit.scale import Scale
from position_papers.kit.subjects import Given, Subject
from position_papers.position_generalization.shapes import SHAPES
from position_papers.repo.haystack import ABOVE_AT_LONGER
from position_papers.repo.needles import NOPE
from repo_interp.errors import InputError

ROOT = Path(position_papers.__file__).parent


# ---- differences ----------------------------------------------------------------------------------------------------


def test_a_difference_over_seeds_is_welchs_and_beside_a_single_run_students():
    seeds = seed_difference(np.array([0.9, 0.8, 1.0]), np.array([0.2, 0.3]))
    assert_allclose((seeds.margin, seeds.standard_error), (0.65, np.sqrt(0.01 / 3 + 0.005 / 2)))
    assert seeds.exceeds() and not seeds.exceeds(0.7)
    welch = stats.ttest_ind([0.9, 0.8, 1.0], [0.2, 0.3], equal_var=False, alternative="greater")
    assert_allclose((seeds.p_value(), seeds.degrees), (welch.pvalue, welch.df))
    single = seed_difference(np.array([0.75]), np.array([0.25, 0.2, 0.3]))
    student = stats.ttest_ind([0.75], [0.25, 0.2, 0.3], equal_var=True, alternative="greater")
    assert_allclose((single.margin, single.p_value(), single.degrees), (0.5, student.pvalue, student.df))
    assert_allclose(seed_difference(np.array([0.25, 0.2, 0.3]), np.array([0.75])).margin, -0.5)
    with pytest.raises(ValueError, match="neither"):
        seed_difference(np.ones(1), np.zeros(1))


def test_a_difference_prompt_by_prompt_is_the_paired_test():
    prompts = np.array([1.0, 1, 1, 0]), np.array([0.0, 0, 1, 0])
    assert_allclose(paired_difference(*prompts).p_value(), stats.ttest_rel(*prompts, alternative="greater").pvalue)
    assert not paired_difference(*prompts).exceeds()
    assert not paired_difference(np.ones(8), np.ones(8)).exceeds()
    assert paired_difference(np.ones(8), np.zeros(8)).exceeds()
    assert paired_difference(np.zeros(8), np.ones(8)).falls_short()
    assert not paired_difference(np.ones(1), np.zeros(1)).exceeds(), "one prompt has no error"


def test_few_seeds_ask_for_more_standard_errors_at_the_same_level():
    assert_allclose(quantile(2.0, 2), stats.t.isf(stats.norm.sf(2.0), 2))
    assert Difference(3.0, 1.0, "prompts").exceeds()
    assert not Difference(3.0, 1.0, "2 and 2 seeds", 2).exceeds()


def test_shares_have_the_limits_of_wilson_and_newcombe():
    assert_allclose(wilson(0.3, 50, 1.959964), stats.binomtest(15, 50).proportion_ci(0.95, "wilson"), rtol=1e-6)
    assert wilson(0.0, 50)[0] == 0 and wilson(0.0, 50)[1] > 0
    published = share_difference(56 / 70, 48 / 80, (70, 80))  # Newcombe 1998, table II, example (a), method 10
    assert_allclose(published.limits(1.959964), (0.0524, 0.3339), atol=5e-5)
    assert published.exceeds() and not share_difference(0.0, 0.0, (9, 9)).exceeds()
    assert_allclose(published.limits(stats.norm.isf(published.p_value()))[0], 0, atol=1e-9)
    assert share_difference(0.5, 0.5, (9, 9)).p_value() == 0.5


def test_several_rows_of_a_claim_are_corrected_together():
    assert_allclose(holm(np.array([0.01, 0.04, 0.03])), (0.03, 0.06, 0.06))
    claim = Claim("X1", "it is more", "here", "1", Above("x", ("a",)))

    def row(margin: float) -> Evidence:
        return Evidence(claim, "c", "x", {"x": {"a": Difference(margin, 0.1, "prompts")}}, margin)

    alone, together = judge_together([row(0.21)]), judge_together([row(0.21), row(0.21), row(0.5)])
    assert [each.verdict for each in alone] == [HOLDS]
    assert [each.verdict for each in together] == [FAILS, FAILS, HOLDS]
    assert "Holm's correction over the 3 rows" in together[0].note


# ---- rules ----------------------------------------------------------------------------------------------------------

CLEAR, UNCLEAR, REVERSED = (Difference(margin, 0.1, "prompts") for margin in (0.3, 0.1, -0.3))
UNKNOWN = Difference(np.nan, np.inf, "a single value of one")


@pytest.mark.parametrize(
    ("rule", "holds", "fails"),
    [
        (AtLeast("x", 0.5), [{"x": 0.5}, {"x": 2}], [{"x": 0.4}, {"x": np.nan}]),
        (AtMost("x", 0.5), [{"x": 0.5}, {"x": -2}], [{"x": 0.6}, {"x": np.nan}]),
        (AtLeast("x", 0.5, of="y"), [{"x": 1, "y": 2}], [{"x": 1, "y": 2.1}, {"x": 1, "y": np.nan}]),
        (AtMost("x", 0.5, of="y"), [{"x": 1, "y": 2}, {"x": 0, "y": 0}], [{"x": 1, "y": 1.9}]),
        (Below("x", 0.5), [{"x": 0.4}], [{"x": 0.5}, {"x": np.nan}]),
        (Significant("x"), [{"x": CLEAR}], [{"x": UNCLEAR}, {"x": REVERSED}]),
        (
            Above("x", ("a",)),
            [{"x": {"a": CLEAR}}],
            [{"x": {"a": UNCLEAR}}, {"x": {"b": CLEAR}}, {"x": {"a": CLEAR, "b": UNCLEAR}}],
        ),
        (Above("x", ("a",), more=0.25), [{"x": {"a": CLEAR}}], [{"x": {"a": Difference(0.25, 0.1, "")}}]),
        (Above("x", ("a", "b"), required=("a",)), [{"x": {"a": CLEAR}}], [{"x": {"b": CLEAR}}, {"x": {}}]),
        (
            NotBelow("x", ("a",)),
            [{"x": {"a": CLEAR}}, {"x": {"a": UNCLEAR}}],
            [{"x": {"a": REVERSED}}, {"x": {}}, {"x": {"a": UNKNOWN}}],
        ),
        (BeyondNull("x"), [{"x": Observed(2, [1, 1.5])}], [{"x": Observed(1.5, [1, 1.5])}]),
        (BeyondNull("x", 0.95), [{"x": Observed(9.1, range(10))}], [{"x": Observed(8.9, range(10))}]),
        (BeyondNull("x", 0.95, relation="below"), [{"x": Observed(0.5, [1, 1.5])}], [{"x": Observed(1.2, [1, 1.5])}]),
        (BeyondNull("x", 0.5), [{"x": Observed(1.4, [1, 1.2, 1.5])}], [{"x": Observed(1.2, [1, 1.2, 1.5])}]),
        (Custom(lambda values: values["x"] > values["y"], "x is above y"), [{"x": 2, "y": 1}], [{"x": 1, "y": 1}]),
        (All(AtLeast("x", 0), AtMost("x", 1)), [{"x": 0.5}], [{"x": 2}, {"x": -1}]),
        (Where(Below("y", 1), AtLeast("x", 0)), [{"x": 1, "y": 0}], [{"x": -1, "y": 0}]),
    ],
    ids=lambda value: value.words if hasattr(value, "words") else "",
)
def test_rules_decide_at_their_thresholds(rule: Rule, holds, fails):
    assert all(rule.holds(values) is True for values in holds)
    assert all(rule.holds(values) is False for values in fails)
    if not isinstance(rule, Custom):
        with pytest.raises(KeyError):
            rule.holds({})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (AtLeast("the share", 0.5), "the share is at least 0.5"),
        (AtMost("the rise", 2, " %"), "the rise is at most 2 %"),
        (AtMost("the fall", 0.02, of="the score"), "the fall is at most 0.02 of the score"),
        (Below("the score", 0.99), "the score is below 0.99"),
        (Above("the score", ("a",)), f"the score is above that of a by more than {in_errors(2)} of the difference"),
        (
            Above("the error", ("a", "b", "c"), more=0.5, errors=3, relation="below", required=()),
            "the error is below that of each of a, b and c, as far as they were given, by more than "
            "3 standard errors (p < 0.0013 by Student's t) of the difference "
            "and 0.5",
        ),
        (NotBelow("the score", ("a", "b")), f"the score is not below that of each of a and b by more than {in_errors(2)}"),
        (BeyondNull("r", 0.95, "shuffles"), "r is above that of 95 % of the shuffles"),
        (All(AtLeast("x", 1), Custom(bool, "y holds")), "x is at least 1; y holds"),
        (Where(Below("y", 1), AtLeast("x", 0)), "x is at least 0; not measurable unless y is below 1"),
    ],
)
def test_the_words_of_a_rule_are_made_from_what_decides(rule, words):
    assert rule.words == words
    if dataclasses.is_dataclass(rule) and hasattr(rule, "bound"):
        assert dataclasses.replace(rule, bound=0.125).words == words.replace(f"{rule.bound:.3g}", "0.125")


def test_nothing_is_judged_where_a_condition_does_not_hold():
    with pytest.raises(ValueError, match="unless y is below 1"):
        Where(Below("y", 1), AtLeast("x", 0)).holds({"x": 1, "y": 1})


# ---- verdicts -------------------------------------------------------------------------------------------------------

SHARE = AtLeast("the share", 0.5)
BOTH = Claim("X1", "a statement", "here", "0.7", SHARE), Claim("X1", "a part", "there", "figure", SHARE, "part", SEEN)


def test_evidence_becomes_a_verdict_by_the_rule_of_its_claim():
    first, part = BOTH
    assert (first.label, part.label, first.written) == ("X1", "X1 (part)", BLIND)
    known = judge(Evidence(first, "a", "share", {"the share": 0.6}, 0.6, 0.1, "seeds", 3, "random 0.2", "a note"))
    assert known == Verdict(first, "a", HOLDS, "share", 0.6, 0.1, "seeds", 3, "random 0.2", "a note", seeds=1)
    assert judge(Evidence(first, "a", "share", {"the share": 0.4}, 0.4)).verdict == FAILS
    missing = judge(Evidence(part, "a", "share", {}, 0.4, n=3, note="a note", unmeasurable="no seeds"))
    assert missing == Verdict(part, "a", UNMEASURED, "share", note="no seeds")
    with pytest.raises(ValueError, match="stands on a number"):
        judge(Evidence(first, "a", "share", {"the share": 0.4}))
    with pytest.raises(KeyError):
        judge(Evidence(first, "a", "share", {"another": 0.4}, 0.4))
    (row,) = verdict_rows([known])
    assert (row["claim"], row["written"], row["ours"], row["rule"]) == ("X1", BLIND, "0.6", "the share is at least 0.5")


def paper(*shares: float, claims: tuple[Claim, ...] = BOTH, name: str = "mine") -> Paper:
    """A paper of one experiment that measures the first claim on as many checkpoints."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        seed: int = 0
        device: str = "cpu"

    def measured(subjects, options, cache):
        return xr.Dataset({"share": ("checkpoint", list(shares))})

    def judged(data):
        for place, share in enumerate(data["share"].values.tolist()):
            yield Evidence(claims[0], "abc"[place], "share", {"the share": share}, share)

    def drawn(data):
        yield Drawing("shares", Figure(), "Shares.", data)

    experiment = Experiment("shares", claims, Needs(without_checkpoints, "needs more"), measured, judged, drawn)
    return Paper(name, "Mine", (experiment,), Options)


def test_a_claim_without_evidence_says_why():
    (experiment,) = paper(0.6).experiments
    told: list[str] = []
    first, rest = run(experiment, [], None, Cache(), told.append)
    assert told == ["shares"]
    assert [drawing.name for drawing in first.drawings] == ["shares"]
    assert [(verdict.claim.label, verdict.verdict) for verdict in first.verdicts] == [("X1", HOLDS)]
    assert [(verdict.claim.label, verdict.note) for verdict in rest.verdicts] == [("X1 (part)", "needs more")]
    needs = dataclasses.replace(experiment.needs, otherwise_of={"X1 (part)": "needs another"})
    _, rest = run(dataclasses.replace(experiment, needs=needs), [], None, Cache(), told.append)
    assert [verdict.note for verdict in rest.verdicts] == ["needs another"]


def test_figures_of_one_name_from_several_groups_are_called_by_their_checkpoints_too():
    (experiment,) = paper(0.6).experiments
    subjects = [Subject(name, name, ("rope",), 8, name, None, None) for name in ("one/rope", "two/rope")]

    def drawn(*chosen):
        needs = dataclasses.replace(experiment.needs, groups=lambda subjects: [[subject] for subject in subjects])
        results = run(dataclasses.replace(experiment, needs=needs), list(chosen), None, Cache(), lambda text: None)
        return [drawing.name for result in results for drawing in result.drawings]

    assert drawn(*subjects) == ["shares_one/rope", "shares_two/rope"]
    assert drawn(subjects[0]) == ["shares"]


def test_claims_of_ours_are_not_counted_as_a_papers_and_every_test_takes_part_in_holm():
    papers = named(())
    for claim in (claim for each in papers.values() for claim in each.claims):
        assert claim.paper_number == "none" or not claim.paper_number.startswith("none"), claim.label
    (longer,) = (claim for claim in papers["repo"].claims if claim.label == "R9 (longer)")
    values = {NOPE: 0.1, ABOVE_AT_LONGER.quantity: {"RoPE": CLEAR}}
    assert longer.rule.holds(values) and chance(longer.rule, values) == pytest.approx(CLEAR.p_value() / level(2))


# ---- the page over all papers ---------------------------------------------------------------------------------------


def rows_of(*verdicts: Verdict) -> list[dict[str, str]]:
    return [row | {"scale": "small", "command": "make", "paper_name": "mine"} for row in verdict_rows(verdicts)]


def test_every_part_of_a_claim_is_a_row_of_its_own():
    claims = tuple(Claim(id, f"statement of {id}", "here", "1", SHARE, part) for id, part in PARTS)
    first, part, second, third, fourth, _ = claims
    verdicts = rows_of(
        Verdict(first, "a", HOLDS, "x", 0.5, 0.1, "seeds", 3),
        Verdict(first, "b", FAILS, "x", 0.25),
        Verdict(part, "a", FAILS, "x", 1.0),
        Verdict(second, "a", HOLDS, "x", 1.0),
        Verdict(second, "b", HOLDS, "x", 2.0),
        Verdict(third, "a", UNMEASURED, "", note="needs steps"),
        Verdict(fourth, "a", HOLDS, "x", 3.0),
        Verdict(fourth, "b", UNMEASURED, "", note="needs steps"),
    )
    mine = paper(claims=claims)
    rows = claim_rows(verdicts, [mine])
    assert [row["claim"] for row in rows] == [
        *(f"[{claim.label}](mine/README.md)" for claim in claims[:-1]),
        claims[-1].label,
    ]
    assert [row["verdict"] for row in rows] == [
        *("holds in 1 of 2", FAILS, "**holds** (2 of 2)", "not measurable here: needs steps", "**holds**", NOT_YET)
    ]
    assert rows[0]["ours"] == "a: 0.5 ± 0.1 (seeds)<br>b: 0.25"
    assert rows[1]["statement"] == "statement of X1 (here)"
    assert rows[-1]["command"] == "`repo-interp figures mine`"
    assert tally(rows) == (
        "Of 6 claims of the papers, parts counted apart and each on its primary checkpoint, 3 hold, 1 does not hold, "
        "1 is not measurable here, 1 is not measured yet."
    )
    numbers = number_rows(verdicts, [mine])
    assert [row["claim"] for row in numbers] == ["X1", "X1", "X1 (part)", "X2", "X2", "X3", "X4", "X4", "X5"]
    assert numbers[0]["spread"] == "± 0.1 (seeds)"


PARTS = (("X1", ""), ("X1", "part"), ("X2", ""), ("X3", ""), ("X4", ""), ("X5", ""))


def test_a_new_claim_is_on_every_page_by_its_experiment_alone(tmp_path):
    """Claim, measurement, judgement and drawing of `paper` stand in this file: nothing else knows them."""
    new = Claim("X9", "a new claim", "nowhere", "0.9", SHARE, written=SEEN, scale=Scale(1))
    mine = paper(0.6, 0.4, claims=(*BOTH, new))
    build = Build(mine, Given(), mine.options(), "make figures", tmp_path / "mine")
    _, files = build.make(tmp_path / "cache", lambda text: None, Durations(tmp_path / "cache"))
    assert {"shares.png", "shares.svg", "shares.pdf", "shares.nc", "verdicts.csv", "README.md"} <= {file.name for file in files}
    with (tmp_path / "mine" / "verdicts.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["claim"], row["verdict"], row["written"]) for row in rows] == [
        ("X1", HOLDS, BLIND),
        ("X1", FAILS, BLIND),
        ("X1 (part)", UNMEASURED, SEEN),
        ("X9", UNMEASURED, SEEN),
    ]
    page = (tmp_path / "mine" / "README.md").read_text()
    assert "- **X9** (nowhere): a new claim. Holds when: the share is at least 0.5." in page
    gallery = write_gallery(tmp_path, [mine]).read_text()
    assert "Of 3 claims of the papers, parts counted apart and each on its primary checkpoint, 1 holds, 2 are not m" in gallery
    assert "- **X9** a new claim. " in gallery and "(paper: 0.9)" in gallery
    assert "| [X9](mine/README.md) | a new claim (nowhere) | 0.9 |" in (tmp_path / "claims.md").read_text()


def test_a_claim_stands_where_it_holds_on_all_that_it_speaks_of_and_beyond_its_null():
    claim = Claim("X1", "a statement", "nowhere", "0.9", SHARE, "wording", also=("wording, beyond twins",))
    null = Claim("X1", "more than twins", "nowhere", "none", SHARE, "wording, beyond twins")
    several = Claim("X2", "on both", "nowhere", "0.9", SHARE, about=(("a", "older"), ("c", "b")))
    mine = paper(claims=(claim, null, several))

    def stands(about: Claim, *verdicts: Verdict):
        rows = rows_of(*verdicts)
        found = standing(lambda each: primary_rows(rows, mine, each), mine, about)
        return found.outcome, found.why

    above, beside = Verdict(claim, "a", HOLDS, "x", 1.0), Verdict(null, "a", HOLDS, "x", 1.0)
    assert stands(claim, above, beside) == (HOLDS, "")
    assert stands(claim, above) == (HOLDS, "cannot be told: beyond twins")
    assert stands(claim, above, dataclasses.replace(beside, verdict=UNMEASURED)) == (HOLDS, "cannot be told: beyond twins")
    assert stands(claim, above, dataclasses.replace(beside, verdict=FAILS)) == (AS_WORDED, "not beyond twins")
    # Of two rows on the checkpoint that decides both count; rows on another one do not.
    assert stands(claim, above, Verdict(claim, "a", FAILS, "x", 0.1)) == (IN_PART, "in 1 of 2")
    short = dataclasses.replace(beside, verdict=FAILS)
    assert stands(claim, above, Verdict(claim, "a", FAILS, "x", 0.1), short) == (IN_PART, "in 1 of 2, not beyond twins")
    assert stands(claim, above, beside, Verdict(claim, "b", FAILS, "x", 0.1)) == (HOLDS, "")
    assert stands(several, *(Verdict(several, name, HOLDS, "x", 1.0) for name in "ab")) == (HOLDS, "")
    assert stands(several, Verdict(several, "a", HOLDS, "x", 1.0), Verdict(several, "b", FAILS, "x", 0.1))[0] == IN_PART
    # Of the checkpoints for one thing the first that is judged decides.
    newer_fails = (Verdict(several, "a", FAILS, "x", 0.1), Verdict(several, "older", HOLDS, "x", 1.0))
    assert stands(several, *newer_fails) == (FAILS, "") and stands(several, newer_fails[1]) == (HOLDS, "")
    assert stands(several, Verdict(several, "elsewhere", HOLDS, "x", 1.0)) == (HOLDS, "")
    assert stands(claim, Verdict(claim, "a", FAILS, "x", 0.1, note=f"p; {BY_CHANCE}")) == (FAILS, BY_CHANCE)
    # Found: a row that fails beside other rows of its claim alone was told as if its number were none that is claimed.
    clear = Claim("X1", "a statement", "nowhere", "0.9", Above("x", ("b",)), "wording")
    one = Evidence(clear, "a", "x", {"x": {"b": Difference(0.21, 0.1, "prompts")}}, 0.21)
    assert stands(claim, *judge_together([one, one])) == (FAILS, BY_CHANCE)
    assert stands(claim, Verdict(claim, "a", UNMEASURED, "", note="too short")) == (UNMEASURED, "too short")
    assert stands(several) == (NOT_YET, "")


def test_what_became_of_all_claims_is_one_paragraph():
    one, other, third = (
        Claim(f"X{k}", says, "nowhere", "0.9", SHARE) for k, says in enumerate(("it grows", "it is even", "it is fast"))
    )
    part = Claim("X2", "it is fast on text", "nowhere", "0.9", SHARE, part="text")
    told = [
        Told(one, HEADINGS[HOLDS], where=", though nothing breaks without it"),
        Told(other, HEADINGS[HOLDS]),
        Told(third, HEADINGS[AS_WORDED], "not beyond twins"),
        Told(part, HEADINGS[UNMEASURED], "needs text"),
    ]
    assert in_one_paragraph(told) == (
        "The papers make 3 claims: 2 stand, 1 holds as its paper puts it and no further. "
        "2 stand: it grows (X0, though nothing breaks without it); it is even (X1). "
        "1 holds as its paper puts it and no further (not beyond twins): it is fast (X2). "
        "With their parts they are 4: 2 stand, 1 holds as its paper puts it and no further, 1 cannot be told here."
    )
    assert "With their parts" not in in_one_paragraph(told[:2]) and in_one_paragraph([]) == ""


def test_a_claim_that_fails_for_its_errors_alone_says_so():
    claim = Claim("X", "x", "", "1", Above("x", ("a",), more=0.05))

    def note(margin: float) -> str:
        return judge(Evidence(claim, "c", "x", {"x": {"a": Difference(margin, 0.1, "seeds")}}, margin, note="noted")).note

    assert note(0.1) == f"noted; {BY_CHANCE}"
    assert note(0.04) == "noted" == note(0.5)


@pytest.mark.parametrize(("first", "second", "said"), [(0.1, 0.05, True), (0.1, 0.0, True), (0.1, -0.05, False)])
def test_what_lies_the_other_way_round_is_not_as_claimed(first: float, second: float, said: bool):
    """Found: H7 has AB2 above RoPE, here it was 5 points below, and the row said "as claimed", since so few seeds cannot tell."""
    claim = Claim("X", "x > y > z", "", "1", All(Above("x", ("y",)), NotBelow("y", ("z",))))
    values = {"x": {"y": Difference(first, 0.1, "seeds")}, "y": {"z": Difference(second, 0.1, "seeds")}}
    verdict = judge(Evidence(claim, "c", "x", values, 0.0))
    assert verdict.verdict == FAILS and (BY_CHANCE in verdict.note) is said


def test_a_number_that_is_none_decides_nothing():
    """Found: a mean over no prompts was NaN, and "does not hold" stood beside it."""
    row = Evidence(BOTH[0], "a", "share", {"the share": np.nan}, np.nan, note="of 0 prompts")
    assert judge(row) == Verdict(BOTH[0], "a", UNMEASURED, "share", note=f"{UNDEFINED}; of 0 prompts")
    claim = Claim("X1", "it is more", "here", "1", Above("x", ("a",)))
    one = Evidence(claim, "c", "x", {"x": {"a": Difference(0.21, 0.1, "prompts")}}, 0.21)
    none = Evidence(claim, "c", "x", {"x": {"a": Difference(np.nan, np.inf, "0 prompts")}}, np.nan)
    assert [each.verdict for each in judge_together([one, none])] == [HOLDS, UNMEASURED], "it is no row to correct for"


def test_where_there_are_no_twins_nothing_is_decided():
    with pytest.raises(ValueError, match="unmeasurable"):
        BeyondNull("x").holds({"x": Observed(2, [])})


def test_some_experiments_of_the_papers_are_chosen_by_name():
    one, other = paper(0.6), dataclasses.replace(paper(0.4), name="other", experiments=())
    papers = {"mine": one, "other": other}
    assert with_experiments(papers, []) == {"mine": one}
    (name,) = (each.name for each in one.experiments)
    assert with_experiments(papers, [name]) == {"mine": one}
    with pytest.raises(InputError, match=f"those of mine, other are {name}"):
        with_experiments(papers, ["nothing"])


def test_a_checkpoint_beside_the_zoo_has_a_section_of_its_own(tmp_path):
    mine = paper(0.6, 0.4)
    for data, share in (("code", 0.6), ("prose", 0.4)):
        of_data = paper(share)
        build = Build(of_data, Given(), of_data.options(), f"make {data}", tmp_path / "real" / data / "mine")
        build.make(tmp_path / "cache", lambda text: None, Durations(tmp_path / "cache"))
    page = write_gallery(tmp_path, [mine]).read_text()
    own = page.partition("## real")[2].partition("## Claims")[0]
    assert "- *Depends on what it reads*: " in own and "(X1, code: holds, prose: does not hold)" in own
    assert "| claim | what the paper says | paper's number | code | prose | zoo's primary |" in own
    assert "| **holds**: 0.6 | " in own
    assert "make code" in own and "real/prose/mine/shares.png" in own
    assert page_above(tmp_path / "real" / "code") == tmp_path
    assert page_above(tmp_path / "real" / "code" / "deeper") is None


def test_what_one_page_of_a_checkpoint_could_not_measure_another_may_tell():
    """Windows that are too short on one page are no dependence on the text; a page that was not asked is none either."""
    mine = paper(0.6)
    rows = {
        verdict: {"claim": "X1", "checkpoint": "real", "verdict": verdict, "ours": "", "note": "too short"}
        for verdict in (HOLDS, FAILS, UNMEASURED)
    }

    def told(**verdicts):
        pages = {data: {"mine": [rows[verdict]] if verdict else []} for data, verdict in verdicts.items()}
        return "".join(in_words(OwnSubject("real", pages), [mine]))

    assert "- *Stands*: a statement (X1, on long alone)." in told(short=UNMEASURED, long=HOLDS)
    assert "- *Stands*: a statement (X1)." in told(short=UNMEASURED, code=HOLDS, prose=HOLDS)
    assert "- *Depends on what it reads*: a statement (X1, code: holds, prose: does not hold)." in told(code=HOLDS, prose=FAILS)
    assert "- *Cannot be told here* (too short): a statement (X1)." in told(short=UNMEASURED, shorter=UNMEASURED)
    assert "- *Stands*: a statement (X1, on code alone)." in told(code=HOLDS, other="")


def test_a_claim_of_ours_stands_in_the_file_of_its_experiment_alone():
    """Labels are unique over all papers, and no other file of the package names a claim."""
    labels = [claim.label for each in named(()).values() for claim in each.claims]
    assert len(set(labels)) == len(labels)
    homes: dict[str, set[Path]] = {}
    for each in named(()).values():
        for experiment in each.experiments:
            for claim in experiment.claims:
                homes.setdefault(claim.id, set()).add(Path(inspect.getfile(experiment.judge)))
    for file in ROOT.rglob("*.py"):
        texts = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        for id in texts & (set(homes) | set(labels)):
            assert file in homes.get(id, ()), f"{file} names {id}"


def test_every_claim_of_ours_says_all_that_a_row_shows():
    for each in named(()).values():
        options = each.options(**each.fast)
        assert (options.seed, options.device) == (0, "cpu")
        assert not each.fast or options != each.options()
        for claim in each.claims:
            assert claim.statement and claim.source and claim.paper_number and claim.rule.words, claim.label
            assert claim.written in (BLIND, SEEN)
            assert not claim.rule.words.endswith("."), claim.label
            parts = {other.part for other in each.claims if other.id == claim.id}
            assert {*claim.also, *filter(None, (claim.cause,))} <= parts, claim.label
        for experiment in each.experiments:
            assert experiment.needs.otherwise
            assert set(experiment.needs.otherwise_of) <= {claim.label for claim in experiment.claims}


@pytest.mark.parametrize(
    ("paper_name", "label", "checkpoints"),
    [
        ("repo", "R1 (trained lengths)", ("reversal/repo", "reversal/rope", "reversal/nope")),
        ("position-generalization", "P3 (excess over chance at 1,024 tokens)", tuple(map(str, SHAPES))),
    ],
)
def test_a_claim_about_all_of_several_stands_on_all_of_them(paper_name: str, label: str, checkpoints: tuple[str, ...]):
    """Found: "all schemes near perfect" and "whatever the model's shape" were decided by the first scheme, and shape, alone."""
    of = named(())[paper_name]
    (claim,) = (each for each in of.claims if each.label == label)
    verdicts = [Verdict(claim, name, HOLDS if name == checkpoints[0] else FAILS, "x", 1.0) for name in checkpoints]
    assert standing(partial(primary_rows, rows_of(*verdicts), of), of, claim).outcome == IN_PART
