"""A claim of a paper, and the verdict on it: what came out, from which number, within which
interval, and for what reasons.

    Evidence(claim, checkpoint, estimate, interval, notes) -> rule of the claim -> Verdict(..., outcome, reasons)

Outcomes and reasons are data: the templates of the pages (`pages/`) put them into words, and no
code reads those words back. A claim that can come out differently in its parts is several claims
with one id: "R1" and "R1 (trained lengths)" each have a row. Knows nothing about any paper.
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
    """So few samples tell neither that it holds nor that it does not."""
    UNMEASURABLE = "not measurable"


HOLDS, FAILS, UNDECIDED, UNMEASURABLE = Outcome


class Kind(StrEnum):
    """The kind of a reason. `count` and `of` are numbers of rows or of training seeds."""

    WHY = "why"
    """Why nothing can be said: `text`."""
    UNDEFINED = "undefined"
    """The number is NaN: a mean of nothing, a share of 0."""
    CHANCE = "chance"
    """The number is as claimed, with too few samples to tell it from chance; `count` seeds would, 0
    where that is not known.
    """
    NEITHER = "neither"
    """The number is not as claimed, with too few samples to tell that it is not chance; `count` as
    above.
    """
    HOLM = "holm"
    """It holds by itself, but not after Holm's correction over the `of` rows that decide on its
    claim.
    """
    SEEDS = "seeds"
    """The rule holds in `count` of `of` training seeds."""
    PART = "part"
    """Of the `of` rows that decide `count` hold."""
    LACKS = "lacks"
    """Another part of the claim, `text`, has to hold too and does not."""
    UNTOLD = "untold"
    """Another part of the claim, `text`, has to hold too and is undecided or not measured."""
    ABOUT = "about"
    """Of the several things that the claim is about only some could be judged: `text`."""
    SAYS = "says"
    """What the numbers say, in words: `text` (`Claim.says`)."""
    NOTE = "note"
    """A remark of the experiment: `text`."""


@dataclass(frozen=True)
class Reason:
    """One record of why a verdict is what it is."""

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
    """The paper's number; "figure" where it only draws; "none" for a question of ours."""
    rule: Rule
    part: str = ""
    """Which part of the claim; empty for the claim itself."""
    scale: Scale | None = None
    """The model that the claim is about, where it is another than its experiment's."""
    also: tuple[str, ...] = ()
    """Parts of the same id that have to hold too for it to stand: beyond a null, against the rival
    that the paper has.
    """
    shows_control: bool = False
    """Whether its control stands beside its number in the table of all claims."""
    about: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where it speaks of several things - schemes, tasks -, by what they are called: the zoo's
    checkpoints that can decide; the first that is judged does.

    Empty: it speaks of one, and the first of its experiment's checkpoints decides.
    """
    says: Callable[[Values], str] | None = None
    """What holds, in words, from the values that its rule is given: what a bare outcome would say
    too much or too little of.
    """
    apart: tuple[str, ...] = ()
    """Parts of the same id that are told beside it: its halves, another reading of its words."""

    @property
    def label(self) -> str:
        """What the claim is called in tables: "R1", "R1 (trained lengths)"."""
        return f"{self.id} ({self.part})" if self.part else self.id

    def beyond(self, statement: str, *rules: Rule) -> Claim:
        """Make the claim's part `also`: its rule, and `rules` that an untrained model fails."""
        return Claim(self.id, statement, self.source, "none", All(self.rule, *rules), self.also[0])


@dataclass(frozen=True)
class Estimate:
    """A number, what it is a number of, and what its claim's rule is given beside it."""

    value: float | None
    """None where nothing can be said."""
    measured: str = ""
    """What was measured, in words, with its unit."""
    n: int = 0
    """Sequences, prompts or seeds behind the number."""
    seeds: int = 0
    """Training seeds behind it; 0 where nothing was trained."""
    control: str = ""
    """The same number where nothing was learned."""
    values: Values = field(default_factory=dict, compare=False, repr=False)
    """The quantities that the rule asks for, by name."""


@dataclass(frozen=True)
class Interval:
    """How far a number spreads to both sides."""

    spread: float
    over: str
    """What it spreads over: "3 seeds", "texts"."""


@dataclass(frozen=True)
class Evidence:
    """What was measured for a claim on one checkpoint, before any rule: rows of the table that
    `judge` reads.
    """

    claim: Claim
    checkpoint: str
    estimate: Estimate
    interval: Interval | None = None
    notes: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    """Why nothing can be said; empty where something can."""
    seed: int | None = None
    """The training seed; None where the evidence is not of one of several."""

    def on(self, claim: Claim, values: Values, *note: str, control: str | None = None) -> Evidence:
        """The evidence on another claim about the same number, from its `values` and those here."""
        known = self.estimate
        estimate = replace(
            known,
            values={**known.values, **values},
            control=known.control if control is None else control,
        )
        return replace(self, claim=claim, estimate=estimate, notes=_texts(note))

    def without_a_number(self, *why: str) -> Evidence:
        """The same, not measurable for these reasons; what is so already stays as it is."""
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
        """What its reasons say in words of the experiment."""
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
    """What was measured for `claim`, with the number that is shown, `ours`.

    Not measurable for the reasons of `unmeasurable`, where there are some.
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
    """Evidence that a claim cannot be measured, and why."""
    return Evidence(
        claim, checkpoint, Estimate(None, measured, control=control), why=_texts(why) or ("",)
    )


def decide(given: Sequence[Evidence]) -> Verdict:
    """The verdict of a claim's rule on the evidence of one checkpoint, or of its training seeds.

    Raises KeyError where a quantity of the rule is missing.
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
    """What the verdicts of single seeds on one claim come to."""
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
    """Why a claim is undecided: on which side its differences lie, and how many seeds would decide,
    if all stay as they are: so many that the first of those that lie against it would tell, else
    the last of all.
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
    """The checkpoints that decide on `claim` out of those that could be `judged`: the first of
    those its experiment has `named`, else the first of all; for a claim `about` several things, the
    first of each.
    """
    judged = list(judged)
    things = [
        name
        for group in claim.about.values()
        for name in [each for each in group if each in judged][:1]
    ]
    return things or [name for name in (*named, *judged) if name in judged][:1]


def corrected_together(verdicts: Sequence[Verdict], named: Iterable[str] = ()) -> list[Verdict]:
    """The same verdicts, where several rows that decide on one claim (`primaries`) and hold by
    tests also have to hold after Holm's correction.

    Rows on other checkpoints are no further tests of the claim, and are judged each by itself.
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
    """The reasons that a column of a table of verdicts holds as JSON."""
    return tuple(Reason(Kind(each.pop("kind")), **each) for each in json.loads(text))


def _texts(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Every text that is not empty."""
    return tuple(text for text in ((texts,) if isinstance(texts, str) else texts) if text)
