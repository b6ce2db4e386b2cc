"""A claim of a paper, and the verdict on it: outcome, number, interval and reasons.

    Evidence(claim, checkpoint, estimate, interval, notes) -> rule of the claim -> Verdict(..., outcome, reasons)

Outcomes and reasons are data; the templates of the pages (`pages/`) turn them into words, and no
code parses these words. If parts of a claim can have different outcomes, they are several claims
with one id: "R1" and "R1 (trained lengths)" have a row each. This module knows nothing about single
papers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import SupportsFloat

import numpy as np

from position_papers.kit.judge.differences import holm
from position_papers.kit.judge.rules import All, Rule, Values, chance, leans, may_hold, tests
from position_papers.kit.scale import Scale


class Outcome(StrEnum):
    """The outcome of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    """There are too few samples to decide whether it holds."""
    UNMEASURABLE = "not measurable"


HOLDS, FAILS, UNDECIDED, UNMEASURABLE = Outcome


class Kind(StrEnum):
    """The kind of a reason. `count` and `of` are numbers of rows or of training seeds."""

    WHY = "why"
    """The claim cannot be judged: `text`."""
    UNDEFINED = "undefined"
    """The number is NaN: a mean of nothing, a share of 0."""
    CHANCE = "chance"
    """The number is as claimed, but with too few samples to distinguish it from chance; `count`
    seeds would suffice (0: unknown).
    """
    NEITHER = "neither"
    """The number is not as claimed, but with too few samples to exclude chance; `count` as above.
    """
    HOLM = "holm"
    """The row holds alone, but not after Holm's correction over the `of` rows that decide the
    claim.
    """
    SEEDS = "seeds"
    """The rule holds in `count` of `of` training seeds."""
    PART = "part"
    """`count` of the `of` deciding rows hold."""
    LACKS = "lacks"
    """Another required part of the claim, `text`, does not hold."""
    UNTOLD = "untold"
    """Another required part of the claim, `text`, is undecided or not measured."""
    ABOUT = "about"
    """The claim is about several things, and only some could be judged: `text`."""
    SAYS = "says"
    """The numbers in words: `text` (`Claim.says`)."""
    NOTE = "note"
    """A remark of the experiment: `text`."""


@dataclass(frozen=True)
class Reason:
    """One reason of a verdict."""

    kind: Kind
    text: str = ""
    count: int = 0
    of: int = 0


@dataclass(frozen=True, eq=False)
class Claim:
    """A statement of a paper, and the rule that judges it here."""

    id: str
    """Letter and number: "R1"."""
    statement: str
    source: str
    paper_number: str
    """The paper's number; "figure" if the paper only draws; "none" for our questions."""
    rule: Rule
    part: str = ""
    """Name of the part; empty for the claim itself."""
    scale: Scale | None = None
    """The model of the claim, if it differs from the model of its experiment."""
    also: tuple[str, ...] = ()
    """Parts with the same id that must hold too: beyond a null, or against the paper's rival.
    """
    shows_control: bool = False
    """Whether the table of all claims shows the control next to the number."""
    about: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """If the claim is about several things (schemes, tasks): by name of the thing, the checkpoints
    of the zoo that can decide, of which the first that is judged does.

    Empty: the claim is about one thing, and the first checkpoint of its experiment decides.
    """
    says: Callable[[Values], str] | None = None
    """Function from the values of the rule to a text, if the bare outcome would be imprecise.
    """
    apart: tuple[str, ...] = ()
    """Parts with the same id that are shown next to it: its halves, or another interpretation."""

    @property
    def label(self) -> str:
        """Name of the claim in tables: "R1", "R1 (trained lengths)"."""
        return f"{self.id} ({self.part})" if self.part else self.id

    def beyond(self, statement: str, *rules: Rule) -> Claim:
        """Make a part for `also`: the rule of this claim, and `rules` that untrained models fail."""
        return Claim(self.id, statement, self.source, "none", All(self.rule, *rules), self.also[0])


@dataclass(frozen=True)
class Estimate:
    """A number, its meaning, and the other values for the rule of its claim."""

    value: float | None
    """None if the claim cannot be judged."""
    measured: str = ""
    """The measured quantity in words, with its unit."""
    n: int = 0
    """Number of sequences, prompts or seeds behind the number."""
    seeds: int = 0
    """Number of training seeds behind it; 0 without training."""
    control: str = ""
    """The same number without learning."""
    values: Values = field(default_factory=dict, compare=False, repr=False)
    """The quantities for the rule, by name."""


@dataclass(frozen=True)
class Interval:
    """The spread of a number to both sides."""

    spread: float
    over: str
    """The units of the spread: "3 seeds", "texts"."""


@dataclass(frozen=True)
class Evidence:
    """The measurement for a claim on one checkpoint, before any rule: rows of the table that
    `judge` reads.
    """

    claim: Claim
    checkpoint: str
    estimate: Estimate
    interval: Interval | None = None
    notes: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    """Reasons why the claim cannot be judged; empty if it can."""
    seed: int | None = None
    """The training seed; None if the evidence is not for one of several seeds."""

    def on(self, claim: Claim, values: Values, *note: str, control: str | None = None) -> Evidence:
        """Return evidence on another claim about the same number, with `values` added."""
        known = self.estimate
        estimate = replace(
            known,
            values={**known.values, **values},
            control=known.control if control is None else control,
        )
        return replace(self, claim=claim, estimate=estimate, notes=_texts(note))

    def without_a_number(self, *why: str) -> Evidence:
        """Return the evidence as not measurable for these reasons, unless it is so already."""
        return self if self.why else replace(self, why=_texts(why))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim on one checkpoint, or on several that are compared."""

    claim: Claim
    checkpoint: str
    outcome: Outcome
    estimate: Estimate = Estimate(None)
    interval: Interval | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks of the experiment among its reasons."""
        return tuple(reason.text for reason in self.reasons if reason.kind in (Kind.WHY, Kind.NOTE))


def evidence(
    claim: Claim,
    checkpoint: str,
    measured: str,
    values: Values,
    ours: SupportsFloat,
    spread: SupportsFloat | None = None,
    spread_over: str = "",
    n: int = 0,
    control: str = "",
    note: str | Iterable[str] = (),
    unmeasurable: str | Iterable[str] = (),
    seeds: int = 1,
) -> Evidence:
    """Make evidence for `claim` with the shown number, `ours`.

    With reasons in `unmeasurable` the claim is not measurable.
    """
    return Evidence(
        claim,
        checkpoint,
        Estimate(float(ours), measured, n, seeds, control, values),
        None if spread is None else Interval(float(spread), spread_over),
        _texts(note),
        _texts(unmeasurable),
    )


def unmeasured(
    claim: Claim, checkpoint: str, why: str | Iterable[str], measured: str = "", control: str = ""
) -> Evidence:
    """Make evidence that a claim cannot be measured, with reasons."""
    return Evidence(
        claim, checkpoint, Estimate(None, measured, control=control), why=_texts(why) or ("",)
    )


def decide(given: Sequence[Evidence]) -> Verdict:
    """Return the verdict of a claim's rule on the evidence of one checkpoint, or of its seeds.

    Raises KeyError if a quantity of the rule is missing.
    """
    if len(given) == 1:
        return _judged(given[0])
    return together({own.seed or 0: _judged(own) for own in given})


def _judged(given: Evidence) -> Verdict:
    number, values, rule = given.estimate.value, given.estimate.values, given.claim.rule
    notes = tuple(Reason(Kind.NOTE, note) for note in given.notes)
    silent = Verdict(
        given.claim,
        given.checkpoint,
        UNMEASURABLE,
        Estimate(None, given.estimate.measured, control=given.estimate.control),
        reasons=tuple(Reason(Kind.WHY, why) for why in given.why if why),
    )
    if given.why:
        return silent
    if number is None or np.isnan(number):
        return replace(silent, reasons=(Reason(Kind.UNDEFINED), *notes))
    outcome = HOLDS if rule.holds(values) else UNDECIDED if may_hold(rule, values) else FAILS
    untold = (_open(rule, values),) if outcome == UNDECIDED else ()
    says = "" if given.claim.says is None else given.claim.says(values)
    return Verdict(
        given.claim,
        given.checkpoint,
        outcome,
        given.estimate,
        given.interval,
        (*untold, *(Reason(Kind.SAYS, text) for text in (says,) if text), *notes),
    )


def together(by_seed: Mapping[int, Verdict]) -> Verdict:
    """Join the verdicts of single seeds on one claim."""
    judged = {seed: own for seed, own in by_seed.items() if own.outcome != UNMEASURABLE}
    seed, first = next(iter((judged or by_seed).items()))
    if len(by_seed) == 1 or not judged:
        return first
    outcomes = [own.outcome for own in judged.values()]
    decisive = next(
        own
        for outcome in (FAILS, UNDECIDED, HOLDS)
        for own in judged.values()
        if own.outcome == outcome
    )
    listed: dict[str, list[str]] = {}
    for number, own in by_seed.items():
        shown = (
            ", ".join(own.notes[:1]) if own.estimate.value is None else f"{own.estimate.value:.3g}"
        )
        listed.setdefault(own.outcome.value, []).append(f"{number} ({shown})")
    notes = [f"{outcome}: {', '.join(seeds)}" for outcome, seeds in listed.items()]
    notes += [f"seed {seed}: {each}" for each in first.notes]
    reasons = (
        *(each for each in decisive.reasons if each.kind not in (Kind.NOTE, Kind.SAYS)),
        Reason(Kind.SEEDS, count=outcomes.count(HOLDS), of=len(judged)),
        *(
            replace(each, text=f"seed {seed}: {each.text}")
            for each in first.reasons
            if each.kind == Kind.SAYS
        ),
        *(Reason(Kind.NOTE, each) for each in notes),
    )
    estimate, interval = first.estimate, first.interval
    if len(judged) > 1:
        numbers = [own.estimate.value for own in judged.values() if own.estimate.value is not None]
        control = f"seed {seed}: {estimate.control}" if estimate.control else ""
        estimate = replace(
            estimate,
            value=float(np.mean(numbers)),
            n=len(judged),
            seeds=len(judged),
            control=control,
        )
        interval = Interval(float(np.std(numbers, ddof=1)), f"{len(judged)} seeds")
    return replace(
        first, outcome=decisive.outcome, estimate=estimate, interval=interval, reasons=reasons
    )


def _open(rule: Rule, values: Values) -> Reason:
    """Return why a claim is undecided: the side of its differences, and the number of seeds that
    would decide if means and spreads stay. If differences are against the claim, this is the number
    for the first of these to decide; else the number for all differences to decide.
    """
    untold = [
        each for each in tests(rule, values) if not each.difference.exceeds(each.bound, each.errors)
    ]
    against = [each for each in untold if each.difference.margin <= each.bound]
    counts = [
        each.difference.seeds_to_decide(each.bound, each.errors) for each in against or untold
    ]
    known = (
        min(filter(None, counts), default=0) if against else max(counts, default=0) * all(counts)
    )
    return Reason(Kind.CHANCE if leans(rule, values) else Kind.NEITHER, count=known)


def primaries(claim: Claim, judged: Iterable[str], named: Iterable[str]) -> list[str]:
    """Return the checkpoints that decide `claim` among those that could be `judged`: the first of
    those that its experiment has `named`, else the first of all; for a claim `about` several
    things, the first of each.
    """
    judged = list(judged)
    things = [
        name
        for group in claim.about.values()
        for name in [each for each in group if each in judged][:1]
    ]
    return things or [name for name in (*named, *judged) if name in judged][:1]


def corrected_together(verdicts: Sequence[Verdict], named: Iterable[str] = ()) -> list[Verdict]:
    """Correct verdicts: if several rows decide one claim (`primaries`) and hold by tests, they must
    also hold after Holm's correction.

    Rows on other checkpoints are not tests of the claim, and keep their verdicts.
    """
    corrected, named = list(verdicts), tuple(named)
    for claim in dict.fromkeys(each.claim for each in verdicts):
        judged = [
            place
            for place, each in enumerate(verdicts)
            if each.claim is claim and each.outcome != UNMEASURABLE
        ]
        deciding = primaries(claim, (verdicts[place].checkpoint for place in judged), named)
        rows = [place for place in judged if verdicts[place].checkpoint in deciding]
        tested = {
            place: own
            for place in rows
            if (values := verdicts[place].estimate.values)
            and (own := chance(claim.rule, values)) is not None
        }
        for place, probable in zip(tested, holm(np.array(list(tested.values()))), strict=True):
            own = verdicts[place]
            if own.outcome == HOLDS and probable > 1:
                reasons = (Reason(Kind.HOLM, of=len(tested)), *own.reasons)
                corrected[place] = replace(own, outcome=UNDECIDED, reasons=reasons)
    return corrected


def reasons_of(text: str) -> tuple[Reason, ...]:
    """Read reasons from the JSON in a column of a table of verdicts."""
    return tuple(Reason(Kind(each.pop("kind")), **each) for each in json.loads(text))


def _texts(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return all texts that are not empty."""
    return tuple(text for text in ((texts,) if isinstance(texts, str) else texts) if text)
