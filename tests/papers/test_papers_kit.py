"""What every paper is made of: rules in closed form and in words, verdicts, the page over all
papers, and claims that stand in one file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from places import ROOT as CHECKOUT
from scipy import stats
from verdicts import judged as judged_rows
from verdicts import results_of, unmeasured, verdict, verdicts_of

from position_papers import PAPERS, named
from position_papers.items import Item, files_of
from position_papers.kit.build import Build, with_experiments, with_items
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import (
    Drawing,
    Experiment,
    Needs,
    Paper,
    _is_drawn,
    run,
    without_checkpoints,
)
from position_papers.kit.gallery import page_above, write_gallery
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNMEASURABLE,
    Claim,
    Estimate,
    Interval,
    Kind,
    Outcome,
    Reason,
    Verdict,
    corrected_together,
    evidence,
)
from position_papers.kit.judge.differences import (
    Difference,
    Sample,
    between,
    paired_difference,
    seed_difference,
    share_difference,
)
from position_papers.kit.judge.outcomes import (
    primary_rows,
    read_table,
    records,
    standing,
    verdict_table,
)
from position_papers.kit.judge.rules import (
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
)
from position_papers.kit.paper_directory import LARGEST, NUMBERS, numbers, write_numbers
from position_papers.kit.scale import Scale
from position_papers.kit.score_figures import score_by_length
from position_papers.kit.subjects import Given, Subject
from repo_interp.errors import InputError
from repo_interp.tasks import make_task

FIGURES = CHECKOUT / "figures"


# ---- differences ---------------------------------------------------------------------------------


def test_a_difference_beside_a_single_run_is_students():
    several = np.array([0.25, 0.2, 0.3])
    single = seed_difference(np.array([0.75]), several)
    student = stats.ttest_ind([0.75], several, equal_var=True, alternative="greater")
    found = single.margin, single.p_value(), single.degrees
    assert_allclose(found, (0.5, student.pvalue, student.df))
    assert_allclose(seed_difference(several, np.array([0.75])).margin, -0.5)
    with pytest.raises(ValueError, match="neither"):
        seed_difference(np.ones(1), np.zeros(1))


def test_seeds_that_both_have_count_as_pairs():
    """Derrick et al. (2017), T_new2: the paired test where all are shared, Welch's where none
    is.
    """

    def sample(**of):
        numbers = tuple(int(name[1:]) for name in of)
        return Sample(np.array(list(of.values())), np.empty(0), 9, False, numbers)

    one = sample(s0=0.2, s1=0.5, s3=0.9, s4=1.6, s6=0.7)
    other = sample(s4=1.1, s3=0.7, s0=0.3, s7=0.4)
    found, welch = between(one, other), stats.ttest_ind(one.seeds, other.seeds, equal_var=False)
    correlation = np.corrcoef([0.2, 0.9, 1.6], [0.3, 0.7, 1.1])[0, 1]
    first, second = (each.seeds.std(ddof=1) for each in (one, other))
    error = first**2 / 5 + second**2 / 4 - 2 * correlation * first * second * 3 / (5 * 4)
    wanted = 0.78 - 0.625, error, 2 + (welch.df - 2) / 9 * 3
    assert_allclose((found.margin, found.standard_error**2, found.degrees), wanted)
    assert found.over == "5 and 4 seeds, 3 of them shared"
    # a correlation of two is 1 or -1
    assert between(one, sample(s0=0.3, s1=0.1, s5=0.4)).over == "5 and 3 seeds"
    assert between(one, sample(s0=0.3, s1=0.3, s3=0.3)).standard_error > 0


def test_a_difference_prompt_by_prompt_is_told_where_all_prompts_agree():
    assert not paired_difference(np.ones(8), np.ones(8)).exceeds()
    assert paired_difference(np.ones(8), np.zeros(8)).exceeds()
    assert paired_difference(np.zeros(8), np.ones(8)).falls_short()
    assert not paired_difference(np.ones(1), np.zeros(1)).exceeds(), "one prompt has no error"


def test_differences_of_shares_have_the_limits_of_newcombe():
    # Newcombe 1998, table II, example (a), method 10
    published = share_difference(56 / 70, 48 / 80, (70, 80))
    assert_allclose(published.limits(1.959964), (0.0524, 0.3339), atol=5e-5)
    assert published.exceeds() and not share_difference(0.0, 0.0, (9, 9)).exceeds()
    assert_allclose(published.limits(stats.norm.isf(published.p_value()))[0], 0, atol=1e-9)
    assert share_difference(0.5, 0.5, (9, 9)).p_value() == 0.5


RIVALLED = Claim("X1", "it is more", "here", "1", Above("x", ("a",)))


def beside_rival(margin: float, error: float = 0.1, claim: Claim = RIVALLED) -> Verdict:
    """The verdict on a number that is above its only rival's by `margin`."""
    return verdict(claim, "c", "x", {"x": {"a": Difference(margin, error, "seeds")}}, margin)


def test_several_rows_of_a_claim_are_corrected_together():
    """A number that is none is no row to correct for."""
    margins = {
        (0.21, 0.21, 0.5): [UNDECIDED, UNDECIDED, HOLDS],
        (0.21, np.nan): [HOLDS, UNMEASURABLE],
    }
    for given, outcomes in margins.items():
        together = corrected_together([beside_rival(margin) for margin in given])
        assert [each.outcome for each in together] == outcomes
        if UNDECIDED in outcomes:
            assert together[0].reasons == (Reason(Kind.HOLM, of=3),)


# ---- rules ---------------------------------------------------------------------------------------

CLEAR, UNCLEAR, REVERSED = (Difference(margin, 0.1, "prompts") for margin in (0.3, 0.1, -0.3))
UNKNOWN = Difference(np.nan, np.inf, "a single value of one")


@pytest.mark.parametrize(
    ("rule", "holds", "fails"),
    [
        (AtLeast("x", 0.5), [{"x": 0.5}], [{"x": 0.4}, {"x": np.nan}]),
        (AtMost("x", 0.5), [{"x": 0.5}], [{"x": 0.6}, {"x": np.nan}]),
        (AtLeast("x", 0.5, of="y"), [{"x": 1, "y": 2}], [{"x": 1, "y": 2.1}]),
        (Below("x", 0.5), [{"x": 0.4}], [{"x": 0.5}, {"x": np.nan}]),
        (Significant("x"), [{"x": CLEAR}], [{"x": UNCLEAR}, {"x": REVERSED}]),
        (
            Above("x", ("a",)),
            [{"x": {"a": CLEAR}}],
            [{"x": {"a": UNCLEAR}}, {"x": {"b": CLEAR}}, {"x": {"a": CLEAR, "b": UNCLEAR}}],
        ),
        (
            Above("x", ("a", "b"), more=0.25, required=("a",)),
            [{"x": {"a": CLEAR}}],
            [{"x": {"a": Difference(0.25, 0.1, "")}}, {"x": {"b": CLEAR}}],
        ),
        (
            NotBelow("x", ("a",)),
            [{"x": {"a": CLEAR}}, {"x": {"a": UNCLEAR}}],
            [{"x": {"a": REVERSED}}, {"x": {}}, {"x": {"a": UNKNOWN}}],
        ),
        (BeyondNull("x"), [{"x": Observed(2, [1, 1.5])}], [{"x": Observed(1.5, [1, 1.5])}]),
        (
            BeyondNull("x", 0.5),
            [{"x": Observed(1.4, [1, 1.2, 1.5])}],
            [{"x": Observed(1.2, [1, 1.2, 1.5])}],
        ),
        (
            BeyondNull("x", 0.95, relation="below"),
            [{"x": Observed(0.5, [1, 1.5])}],
            [{"x": Observed(1.2, [1, 1.5])}],
        ),
        (All(AtLeast("x", 0), AtMost("x", 1)), [{"x": 0.5}], [{"x": 2}, {"x": -1}]),
        (Where(Below("y", 1), AtLeast("x", 0)), [{"x": 1, "y": 0}], [{"x": -1, "y": 0}]),
    ],
    ids=lambda value: value.words if hasattr(value, "words") else "",
)
def test_rules_decide_at_their_thresholds(rule: Rule, holds, fails):
    assert [rule.holds(values) for values in holds + fails] == [True] * len(holds) + [False] * len(
        fails
    )
    with pytest.raises(KeyError):
        rule.holds({})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (AtLeast("the share", 0.125), "the share is at least 0.125"),
        (
            Above("the error", ("a", "b", "c"), more=0.5, errors=3, relation="below", required=()),
            "the error is below that of each of a, b and c, as far as they were given, by more "
            "than 3 standard errors of the difference and 0.5",
        ),
        (
            Where(Below("y", 1), All(AtLeast("x", 1), Custom(bool, "y holds"))),
            "x is at least 1; y holds; not measurable unless y is below 1",
        ),
    ],
)
def test_the_words_of_a_rule_are_made_from_what_decides(rule, words):
    assert rule.words == words


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Where(Below("y", 1), AtLeast("x", 0)), {"x": 1, "y": 1}),
        (BeyondNull("x"), {"x": Observed(2, [])}),
    ],
)
def test_nothing_is_judged_without_a_condition_or_twins(rule, values):
    with pytest.raises(ValueError, match="unmeasurable"):
        rule.holds(values)


# ---- verdicts ------------------------------------------------------------------------------------

SHARE = AtLeast("the share", 0.5)
BOTH = (
    Claim("X1", "a statement", "here", "0.7", SHARE),
    Claim("X1", "a part", "there", "figure", SHARE, "part"),
)


def test_a_verdict_is_what_the_rule_of_its_claim_says():
    first, part = BOTH
    assert (first.label, part.label) == ("X1", "X1 (part)")
    of = (first, "a", "share", {"the share": 0.6}, 0.6)
    estimate = Estimate(0.6, "share", 3, 1, "random 0.2")
    assert verdict(*of, 0.1, "seeds", 3, "random 0.2", ("a note", "")) == Verdict(
        first, "a", HOLDS, estimate, Interval(0.1, "seeds"), (Reason(Kind.NOTE, "a note"),)
    )
    missing = verdict(part, "a", "share", {}, 0.4, n=3, note="a note", unmeasurable="no seeds")
    assert missing == unmeasured(part, "a", "no seeds", "share")
    own = evidence(*of, control="random 0.2")
    silent = own.on(part, {}, control="").without_a_number("no seeds")
    assert judged_rows([silent]) == [missing]
    assert silent.without_a_number("another") is silent and not own.without_a_number("").why


SCORES = xr.Dataset(
    {"score": (("checkpoint", "test_set", "seed"), [[[0.5]]])},
    {"checkpoint": ["a"], "test_set": ["all"], "layout": ("checkpoint", ["rope"])},
)


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
            yield evidence(claims[0], "abc"[place], "share", {"the share": share}, share)

    def drawn(data):
        yield Drawing("shares", partial(score_by_length, SCORES), "Shares.", data)

    experiment = Experiment(
        "shares", claims, Needs(without_checkpoints, "needs more"), measured, judged, drawn
    )
    return Paper(name, "Mine", (experiment,), Options)


def test_a_claim_without_evidence_says_why():
    (experiment,) = paper(0.6).experiments
    told: list[str] = []
    first, rest = run(experiment, [], None, Cache(), told.append)
    assert told == ["shares"]
    assert [drawing.name for drawing in first.drawings] == ["shares"]
    (own,), (missing,) = verdicts_of(first), verdicts_of(rest)
    assert (own.claim, own.outcome) == (BOTH[0], HOLDS)
    assert (missing.claim, missing.notes) == (BOTH[1], ("needs more",))
    needs = replace(experiment.needs, otherwise_of={"X1 (part)": "needs another"})
    _, rest = results_of(replace(experiment, needs=needs), [])
    assert [verdict.notes for verdict in verdicts_of(rest)] == [("needs another",)]


def test_figures_of_one_name_from_several_groups_are_called_by_their_checkpoints_too():
    (experiment,) = paper(0.6).experiments
    subjects = [
        Subject(name, name, ("rope",), 8, name, None, None) for name in ("one/rope", "two/rope")
    ]

    def drawn(*chosen):
        needs = replace(
            experiment.needs, groups=lambda subjects: [[subject] for subject in subjects]
        )
        results = results_of(replace(experiment, needs=needs), chosen)
        return [drawing.name for result in results for drawing in result.drawings]

    assert drawn(*subjects) == ["shares_one/rope", "shares_two/rope"]
    assert drawn(subjects[0]) == ["shares"]


# ---- the page over all papers --------------------------------------------------------------------


def judged(
    claim: Claim, checkpoint: str, outcome: Outcome, value: float | None = 1.0, *reasons: Reason
) -> Verdict:
    return Verdict(claim, checkpoint, outcome, Estimate(value, "x"), reasons=reasons)


PARTS = tuple(
    Claim(id, f"statement of {id}", "here", "1", SHARE, part)
    for id, part in (("X1", ""), ("X1", "part"), ("X2", ""), ("X3", ""), ("X4", ""), ("X5", ""))
)


def test_a_real_model_decides_where_it_can_and_the_page_has_one_row_per_claim(tmp_path):
    mine, real = paper(0.6, claims=PARTS), "smollm2-135m"
    found = {
        "mine": [
            judged(PARTS[0], "a", HOLDS, 0.5),
            judged(PARTS[2], "a", HOLDS, 0.7),
            unmeasured(PARTS[3], "a", "needs steps"),
            judged(PARTS[4], "a", UNDECIDED, 3.0, Reason(Kind.CHANCE)),
        ],
        f"{real}/code/mine": [
            judged(PARTS[0], real, FAILS, 0.1),
            judged(PARTS[3], real, HOLDS, 0.8),
        ],
        f"{real}/prose/mine": [judged(PARTS[0], real, FAILS, 0.2)],
        f"{real}-repo/prose/mine": [judged(PARTS[3], f"{real}-repo", FAILS, 0.3)],
    }
    for place, verdicts in found.items():
        (tmp_path / place).mkdir(parents=True)
        verdict_table(verdicts).to_csv(tmp_path / place / "verdicts.csv", index=False)
        facts = {"provenance": {"command": "make"}, "figures": []}
        (tmp_path / place / "page.json").write_text(json.dumps(facts))
    page = write_gallery(tmp_path, [mine]).read_text()
    assert [line.partition(" | 1 | ")[2] for line in page.splitlines() if "| [X" in line][:3] == [
        "0.5 (a): holds | 0.1 (code), 0.2 (prose): fails | - | - | fails |",
        "0.7 (a): holds | - | - | - | **holds** |",
        "not measurable | 0.8 (code): holds | - | 0.3 (prose): fails | fails, holds in 1 of 2 |",
    ]
    assert "Of 5 claims, 1 holds, 2 fail (1 of them in part), 1 is undecided, 1 is not" in page
    assert page_above(tmp_path / real / "code") == tmp_path
    assert page_above(tmp_path / real / "code" / "deeper") is None


def test_halves_are_told_apart_and_what_holds_in_words(tmp_path):
    """Beside a claim its other parts, from the models that decide on it; of several real models
    what each says, once where all say the same.
    """
    whole, half = (
        replace(claim, part=part, apart=("half",) if not part else ())
        for claim, part in ((BOTH[0], ""), (BOTH[0], "half"))
    )
    mine, real = paper(0.6, claims=(whole, half)), "smollm2-135m"
    few, says = Reason(Kind.CHANCE, count=7), partial(Reason, Kind.SAYS)
    own = judged(half, "a", UNDECIDED, 0.3, few, Reason(Kind.NOTE, "0.3 above b (error); more"))

    def row(**real_says: str) -> str:
        of_toy = [judged(whole, "a", FAILS, 0.1, says("as the toy says")), own]
        found = {"mine": of_toy} | {
            f"{name.replace('_', '-')}/code/mine": [
                judged(whole, name.replace("_", "-"), HOLDS, 0.9, says(text))
            ]
            for name, text in real_says.items()
        }
        for place in tmp_path.glob("*/code/mine/verdicts.csv"):
            place.unlink()
        for place, verdicts in found.items():
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            verdict_table(verdicts).to_csv(tmp_path / place / "verdicts.csv", index=False)
            facts = {"provenance": {"command": "make"}, "figures": []}
            (tmp_path / place / "page.json").write_text(json.dumps(facts))
        page = write_gallery(tmp_path, [mine]).read_text()
        (line,) = [line for line in page.splitlines() if "| [X" in line]
        return line.rpartition(" | ")[2].removesuffix(" |")

    apart = "; half: undecided, right direction so far: 0.3 above b (error); 7 seeds of each model would tell"
    assert row() == f"fails{apart}: as the toy says"
    assert row(smollm2_135m="r is 1") == f"**holds**{apart}: r is 1"
    assert real in (tmp_path / "claims.md").read_text()
    both = {"smollm2_135m": "r is 1", "gemma3_270m": "r is 2"}
    said = "SmolLM2-135M, r is 1; Gemma 3 270M, r is 2"
    assert row(**both) == f"**holds**{apart}: {said}"
    assert row(**dict.fromkeys(both, "as well")) == f"**holds**{apart}: as well"


def test_the_pages_of_claims_are_what_the_stored_verdicts_come_to(tmp_path):
    """Short, and with a row for each of the 30 claims."""
    for file in [*FIGURES.rglob("verdicts.csv"), *FIGURES.rglob("page.json")]:
        kept = tmp_path / file.relative_to(FIGURES)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(file.read_bytes())
    write_gallery(tmp_path, list(named(()).values()))
    page, tables = (FIGURES / name for name in ("README.md", "claims.md"))
    for written in (page, tables):
        assert (tmp_path / written.name).read_bytes() == written.read_bytes()
    assert len(page.read_bytes()) <= 13 * 2**10
    assert page.read_text(encoding="utf-8").partition("| claim |")[2].count("\n| [") == 30


def test_a_new_claim_is_on_every_page_by_its_experiment_alone(tmp_path):
    """Claim, measurement, judgement and drawing of `paper` stand in this file: nothing else knows
    them.
    """
    new = Claim("X9", "a new claim", "nowhere", "0.9", SHARE, scale=Scale(1))
    mine = replace(
        paper(0.6, 0.4, claims=(*BOTH, new)),
        items=(
            Item("figure 9", "all | shares", "", "", "needs a GPU"),
            Item("table 2", "shares", "shares", "shares", "of two texts"),
            Item("table 3", "others", "others", "others", ""),
        ),
    )
    formats, out = ("png", "svg", "pdf", "nc"), tmp_path / "mine"
    build = Build(mine, Given(), mine.options(), "make figures", out, formats)
    made = build.make(tmp_path / "cache", lambda text: None)
    kinds = {f"shares.{kind}" for kind in formats}
    assert {file.name for file in made.pictures} == kinds
    files = {file.name for file in out.iterdir()}
    assert kinds | {"verdicts.csv", "numbers.csv.gz", "README.md"} <= files
    rows = read_table(out / "verdicts.csv")
    assert rows["claim"].tolist() == ["X1", "X1", "X1 (part)", "X9"]
    assert rows["outcome"].tolist() == [HOLDS, FAILS, UNMEASURABLE, UNMEASURABLE]
    page = (out / "README.md").read_text()
    for line in (
        "**X9** (nowhere; paper: 0.9): a new claim. Holds when: the share is at least 0.5. ",
        "| figure 9 | all \\| shares | not made: needs a GPU |",
        "| table 2 | shares | [shares](shares.png); of two texts |",
        "| table 3 | others | not on this page (`--experiment others` draws it) |",
        f"2 were tested. 1 holds: {BOTH[0].statement} (X1). 1 is not measurable: a new claim (X9).",
    ):
        assert line in page
    assert "| [X9][X] | a new claim |" in write_gallery(tmp_path, [mine]).read_text()
    numbers = (tmp_path / "claims.md").read_text()
    assert "| [X9](mine/README.md) | a new claim (nowhere) | 0.9 |" in numbers
    assert "| X9 | none | not measurable |" in numbers


def test_of_variants_of_a_model_the_first_and_the_named_one_are_drawn():
    """All are judged."""

    def subject(name: str, *schemes: str) -> Subject:
        return Subject(name, name, schemes, 64, "digest", make_task("language"))

    named_first = replace(
        paper(0.6).experiments[0], needs=Needs(lambda subjects: [], "none", ("language/third",))
    )
    groups = {
        (subject("language/first", "rope", "repo"),): True,
        (subject("language/second", "repo", "repo"),): False,
        (subject("language/rope", "rope"),): True,
        (subject("language/third", "repo"),): True,
        (subject("a", "repo"), subject("b", "repo")): True,
    }
    seen: set[tuple[str, ...]] = set()
    are_drawn = [_is_drawn(named_first, group, seen) for group in groups]
    assert are_drawn == [*groups.values()]


def test_the_numbers_behind_all_figures_are_one_table(tmp_path):
    data = xr.Dataset(
        {
            "share": (("head", "prompt"), np.arange(4.0).reshape(2, 2), {"units": "1"}),
            "known": ((), True),
            "many": (("head", "prompt2"), np.zeros((2, LARGEST))),
        },
        {"head": ["a", "b"], "scheme": ("head", ["rope", "repo"])},
    )
    long = xr.Dataset(
        {"share": (("length", "prompt"), np.arange(2.0 * LARGEST).reshape(2, LARGEST))},
        {"length": [64.0, 128.0]},
    )
    (first, none), (second, many) = numbers(data), numbers(long)
    assert (none, many) == (["many"], [])
    both = pd.concat([first.assign(figure="first"), second.assign(figure="long")])
    write_numbers(both, tmp_path / NUMBERS)
    rows = pd.read_csv(tmp_path / NUMBERS).set_index(["figure", "variable"])
    shares = rows.loc["first", "share"][["head", "prompt", "value", "units"]]
    assert shares.to_numpy().tolist() == [
        ["a", 0, 0, 1],
        ["a", 1, 1, 1],
        ["b", 0, 2, 1],
        ["b", 1, 3, 1],
    ]
    assert rows.loc["first", "scheme"]["text"].tolist() == ["rope", "repo"]
    means = rows.loc["long", "share"]
    assert_allclose(means["value"], long["share"].mean("prompt"), rtol=1e-5)
    assert means["length"].tolist() == [64, 128]


def test_a_claim_stands_where_it_holds_on_all_that_it_speaks_of_and_beyond_its_null():
    claim = Claim(
        "X1", "a statement", "nowhere", "0.9", SHARE, "wording", also=("wording, beyond twins",)
    )
    null = Claim("X1", "more than twins", "nowhere", "none", SHARE, "wording, beyond twins")
    several = Claim(
        "X2", "on both", "nowhere", "0.9", SHARE, about={"one": ("a", "older"), "other": ("c", "b")}
    )
    mine = paper(claims=(claim, null, several))

    def reason(kind: Kind, text: str = "beyond twins") -> tuple[Reason, ...]:
        return (Reason(kind, text),)

    above, below = judged(claim, "a", HOLDS), judged(claim, "a", FAILS, 0.1)
    beside, against = judged(null, "a", HOLDS), judged(null, "a", FAILS)
    in_part = Reason(Kind.PART, count=1, of=2)
    newer, older = judged(several, "a", FAILS), judged(several, "older", HOLDS)
    short = unmeasured(claim, "a", ("too short", "by 3"))
    for about, verdicts, outcome, reasons in (
        (claim, [above, beside], HOLDS, ()),
        (claim, [above], HOLDS, reason(Kind.UNTOLD)),
        (claim, [above, unmeasured(null, "a", "few")], HOLDS, reason(Kind.UNTOLD)),
        (claim, [above, against], HOLDS, reason(Kind.LACKS)),
        # Of two rows on the checkpoint that decides both count; rows on another one do not.
        (claim, [above, below, against], FAILS, (in_part, *reason(Kind.LACKS))),
        (claim, [above, beside, judged(claim, "b", FAILS, 0.1)], HOLDS, ()),
        (several, [judged(several, "a", HOLDS), judged(several, "b", FAILS)], FAILS, (in_part,)),
        # Of the checkpoints for one thing the first that is judged decides.
        (several, [newer, older], FAILS, ()),
        (several, [older], HOLDS, reason(Kind.ABOUT, "for one; not measurable: other")),
        (several, [judged(several, "elsewhere", HOLDS)], HOLDS, ()),
        (claim, [judged(claim, "a", UNDECIDED)], UNDECIDED, (Reason(Kind.CHANCE),)),
        # Found: it was told as if its number were none that is claimed.
        (
            RIVALLED,
            corrected_together([beside_rival(0.21)] * 2),
            UNDECIDED,
            (Reason(Kind.HOLM, of=2),),
        ),
        (claim, [short], UNMEASURABLE, reason(Kind.WHY, "too short")),
    ):
        rows = partial(primary_rows, records(verdict_table(verdicts)), mine)
        found = standing(rows, mine, about)
        assert (found.outcome, found.reasons) == (outcome, reasons)


def test_a_claim_that_fails_for_its_errors_alone_is_undecided():
    claim = Claim("X", "x", "", "1", Above("x", ("a",), more=0.05))
    of_margins = {
        0.1: (UNDECIDED, [Kind.CHANCE]),
        0.04: (UNDECIDED, [Kind.NEITHER]),
        -0.14: (UNDECIDED, [Kind.NEITHER]),
        -0.16: (FAILS, []),
        0.5: (HOLDS, []),
    }
    for margin, expected in of_margins.items():
        found = beside_rival(margin, claim=claim)
        assert (found.outcome, [each.kind for each in found.reasons]) == expected


def test_an_undecided_claim_says_how_many_seeds_would_decide():
    """Seed by seed, where seeds are shared: what all schemes of a seed have in common is no error
    of their difference.
    """
    numbers, seeds = (0, 1, 3), np.array([0.9, 0.5, 0.1])
    theirs = Sample(seeds, np.empty(0), 200, True, numbers)
    ours = replace(theirs, seeds=seeds + np.array([0.05, 0.04, 0.12]))
    difference = between(ours, theirs)
    found = verdict(RIVALLED, "c", "x", {"x": {"a": difference}}, 0.07)
    (needed,) = (reason.count for reason in found.reasons)
    assert (found.outcome, found.reasons[0].kind) == (UNDECIDED, Kind.CHANCE) and needed > 3

    def decides(count: int) -> bool:
        error = difference.standard_error * np.sqrt(3 / count)
        return replace(difference, standard_error=error, degrees=count - 1).exceeds()

    assert decides(needed) and not decides(needed - 1)
    assert replace(difference, standard_error=0.0).seeds_to_decide() == 0


@pytest.mark.parametrize(
    ("second", "kind"), [(0.05, Kind.CHANCE), (0.0, Kind.CHANCE), (-0.05, Kind.NEITHER)]
)
def test_what_lies_the_other_way_round_is_not_as_claimed(second: float, kind: Kind):
    """Found: H7 has AB2 above RoPE, here it was 5 points below, and the row said "as claimed",
    since so few seeds cannot tell.
    """
    claim = Claim("X", "x > y > z", "", "1", All(Above("x", ("y",)), NotBelow("y", ("z",))))
    values = {
        "x": {"y": Difference(0.1, 0.1, "seeds")},
        "y": {"z": Difference(second, 0.1, "seeds")},
    }
    found = verdict(claim, "c", "x", values, 0.0)
    assert (found.outcome, found.reasons[0].kind) == (UNDECIDED, kind)


def test_a_number_that_is_none_decides_nothing():
    """Found: a mean over no prompts was NaN, and "does not hold" stood beside it."""
    row = verdict(BOTH[0], "a", "share", {"the share": np.nan}, np.nan, note="of 0 prompts")
    reasons = (Reason(Kind.UNDEFINED), Reason(Kind.NOTE, "of 0 prompts"))
    assert row == Verdict(BOTH[0], "a", UNMEASURABLE, Estimate(None, "share"), reasons=reasons)


def test_some_experiments_of_the_papers_are_chosen_by_name():
    papers = {"mine": paper(0.6), "other": replace(paper(0.4), name="other", experiments=())}
    assert with_experiments(papers, ["shares"]) == {"mine": papers["mine"]}
    with pytest.raises(InputError, match="those of mine, other are shares"):
        with_experiments(papers, ["nothing"])


@pytest.mark.parametrize("name", PAPERS)
def test_every_figure_and_table_of_a_paper_is_made_by_an_experiment_or_says_why_not(name):
    each = named([name])[name]
    items, experiments = each.items, {own.name for own in each.experiments}
    stored = [
        figure["figure"]
        for page in FIGURES.rglob(f"{name}/page.json")
        for figure in json.loads(page.read_text(encoding="utf-8"))["figures"]
    ]
    assert len({item.item for item in items}) == len(items) > 10
    for item in items:
        assert bool(item.experiment) == bool(item.figure) and (item.experiment or item.note)
        assert item.experiment in experiments | {""}, item
        assert not item.figure or files_of(item, items, stored), item
        if shown := re.match(r"as ((figure|table) \w+)", item.note):
            assert any(other.item == shown[1] and other.note for other in items), item
    for source in {claim.source for claim in each.claims if not claim.part}:
        for kind, number in re.findall(r"(fig|table)\.? (\d+)", source):
            asked = f"{kind.replace('fig', 'figure')} {number}"
            assert any(item.is_named(asked) and item.experiment for item in items), source


def test_one_figure_of_a_paper_is_chosen_by_its_number():
    papers = named(["hope", "repo"])
    both = with_items(papers, ["3"])
    chosen = [own.name for own in both["hope"].experiments]
    assert chosen == ["over_training", "beyond", "components"]
    assert [item.item for item in both["repo"].drawn] == ["figure 3"]
    assert list(with_items(papers, ["Table 6"])) == ["repo"], "of hope it is not made"
    for number, refused in (
        ("10", r"figure 10 of hope is not made here: as figure 1; "),
        ("11", r"no '11' in the papers; there are figure 1 of repo, figure 2 of repo"),
    ):
        with pytest.raises(InputError, match=refused):
            with_items(papers, [number])


def test_every_claim_of_ours_says_all_that_a_row_shows():
    """By a label of its own."""
    labels = [claim.label for each in named(()).values() for claim in each.claims]
    assert len(set(labels)) == len(labels)
    for each in named(()).values():
        options = each.options(**each.fast)
        assert (options.seed, options.device) == (0, "cpu") and options != each.options()
        for claim in each.claims:
            assert claim.statement and claim.source and claim.paper_number, claim.label
            assert claim.paper_number == "none" or not claim.paper_number.startswith("none")
            assert claim.rule.words and not claim.rule.words.endswith("."), claim.label
            parts = {other.part for other in each.claims if other.id == claim.id}
            assert set(claim.also) <= parts, claim.label
        for experiment in each.experiments:
            known = {claim.label for claim in experiment.claims}
            assert experiment.needs.otherwise and set(experiment.needs.otherwise_of) <= known
