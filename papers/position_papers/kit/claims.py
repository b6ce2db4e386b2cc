"""A claim of a paper, and the verdict on it: what came out, from which number, within which
interval, and for what reasons.

    values -> rule of the claim -> Verdict(claim, checkpoint, outcome, estimate, interval, reasons)

Outcomes and reasons are data: the templates of the pages (`pages/`) put them into words, and no
code reads those words back. A claim that can come out differently in its parts is several claims
with one id: "R1" and "R1 (trained lengths)" each have a row. Knows nothing about any paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from position_papers.kit.differences import holm
from position_papers.kit.rules import Rule, Values, chance, leans, may_hold, tests
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
    about: tuple[tuple[str, ...], ...] = ()
    """Where it speaks of several things - schemes, tasks -: for each the zoo's checkpoints that can
    decide; the first that is judged does.

    Empty: it speaks of one, and the first of its experiment's checkpoints decides.
    """

    @property
    def label(self) -> str:
        """What the claim is called in tables: "R1", "R1 (trained lengths)"."""
        return f"{self.id} ({self.part})" if self.part else self.id


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

    def on(self, claim: Claim, values: Values, *note: str, control: str | None = None) -> Verdict:
        """The verdict on another claim about the same number, from its `values` and those here."""
        known = self.estimate
        if known.value is None:
            return replace(self, claim=claim)
        own = replace(
            known,
            values={**known.values, **values},
            control=known.control if control is None else control,
        )
        return _judged(
            Verdict(claim, self.checkpoint, FAILS, own, self.interval, _reasons(Kind.NOTE, note))
        )

    def without_a_number(self, *why: str) -> Verdict:
        """The same, not measurable for these reasons; what is so already stays as it is, and so
        does everything without reasons.
        """
        if self.outcome == UNMEASURABLE or not any(why):
            return self
        return unmeasured(
            self.claim, self.checkpoint, why, self.estimate.measured, self.estimate.control
        )


def verdict(
    claim: Claim,
    checkpoint: str,
    measured: str,
    values: Values,
    ours: float,
    spread: float | None = None,
    spread_over: str = "",
    n: int = 0,
    control: str = "",
    note: str | Iterable[str] = (),
    unmeasurable: str | Iterable[str] = (),
    seeds: int = 1,
) -> Verdict:
    """The verdict of the claim's rule on `values`, with the number that is shown, `ours`.

    Not measurable for the reasons of `unmeasurable`, where there are some, and where the number is
    NaN. Raises KeyError where a quantity of the rule is missing.
    """
    nothing = unmeasured(claim, checkpoint, unmeasurable, measured, control)
    if nothing.reasons:
        return nothing
    estimate = Estimate(float(ours), measured, n, seeds, control, values)
    interval = None if spread is None else Interval(float(spread), spread_over)
    return _judged(Verdict(claim, checkpoint, FAILS, estimate, interval, _reasons(Kind.NOTE, note)))


def unmeasured(
    claim: Claim, checkpoint: str, why: str | Iterable[str], measured: str = "", control: str = ""
) -> Verdict:
    """The verdict that a claim cannot be measured, and why."""
    return Verdict(
        claim,
        checkpoint,
        UNMEASURABLE,
        Estimate(None, measured, control=control),
        reasons=_reasons(Kind.WHY, why),
    )


def _judged(given: Verdict) -> Verdict:
    """`given` with the outcome that its claim's rule gives."""
    rule, values, number = given.claim.rule, given.estimate.values, given.estimate.value
    if number is None or np.isnan(number):
        bare = unmeasured(
            given.claim, given.checkpoint, "", given.estimate.measured, given.estimate.control
        )
        return replace(bare, reasons=(Reason(Kind.UNDEFINED), *given.reasons))
    if rule.holds(values):
        return replace(given, outcome=HOLDS)
    return (
        replace(given, outcome=UNDECIDED, reasons=(_open(rule, values), *given.reasons))
        if may_hold(rule, values)
        else given
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
        name for group in claim.about for name in [each for each in group if each in judged][:1]
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
            if (own := chance(claim.rule, verdicts[place].estimate.values)) is not None
        }
        for place, probable in zip(tested, holm(np.array(list(tested.values()))), strict=True):
            own = verdicts[place]
            if own.outcome == HOLDS and probable > 1:
                reasons = (Reason(Kind.HOLM, of=len(tested)), *own.reasons)
                corrected[place] = replace(own, outcome=UNDECIDED, reasons=reasons)
    return corrected


def _reasons(kind: Kind, texts: str | Iterable[str]) -> tuple[Reason, ...]:
    """Every text that is not empty as a reason of this kind."""
    return tuple(
        Reason(kind, text) for text in ((texts,) if isinstance(texts, str) else texts) if text
    )
