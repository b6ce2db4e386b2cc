"""A claim of a paper, what was measured of it, and the verdict that its rule gives: rows of a table that nobody types.

    evidence -> rule -> holds / does not hold / not measurable here

A claim that can come out differently in its parts is several claims with one id: "R1" and "R1 (trained lengths)" each have a row. Knows
nothing about any paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from position_papers.kit.differences import holm
from position_papers.kit.rules import Rule, Values, chance, holds_but_for_chance
from position_papers.kit.scale import Scale

HOLDS = "holds"
FAILS = "does not hold"
UNMEASURED = "not measurable here"
BY_CHANCE = "as claimed, but no more than chance may make it with so few samples"
"""What a note ends with where a claim fails for its errors alone."""
AFTER_HOLM = "holds by itself, but not after Holm's correction over"
"""What the end of a note begins with where a row fails beside other rows of its claim alone."""
UNDEFINED = "its number is not defined on what was measured"
"""What a note begins with where a number is NaN."""
EVERY_SEED = "every seed"
BLIND, SEEN = "blind", "after results were seen"
"""When a rule was written."""


@dataclass(frozen=True, eq=False)
class Claim:
    """What a paper says, and the rule that judges it here."""

    id: str
    """Letter and number: "R1"."""
    statement: str
    source: str
    paper_number: str
    """The paper's number; "figure" where it only draws."""
    rule: Rule
    part: str = ""
    """Which part of the claim; empty for the claim itself."""
    written: str = BLIND
    """Whether the rule was written blind or after results were seen."""
    scale: Scale | None = None
    """The model that the claim is about, where it is another than its experiment's."""
    also: tuple[str, ...] = ()
    """Parts of the same id that have to hold too for it to stand: beyond a null, in every seed, against the rival that the paper has."""
    cause: str = ""
    """The part of the same id, of ours, that asks what breaks where this is removed; empty where none does."""
    about: tuple[tuple[str, ...], ...] = ()
    """Where it speaks of several things - schemes, tasks -: for each the zoo's checkpoints that can decide; the first that is judged does.
    Empty: it speaks of one, and the first of its experiment's checkpoints decides."""

    @property
    def label(self) -> str:
        """What the claim is called in tables: "R1", "R1 (trained lengths)"."""
        return f"{self.id} ({self.part})" if self.part else self.id

    @property
    def part_of_every_seed(self) -> str:
        """The part that asks the same of every training seed: "every seed", "trained lengths, every seed"."""
        return ", ".join(filter(None, (self.part, EVERY_SEED)))


@dataclass(frozen=True)
class Evidence:
    """What was measured of one claim on one checkpoint, or on several that are compared."""

    claim: Claim
    checkpoint: str
    measured: str
    """What `ours` is, in words, with its unit."""
    values: Values = field(default_factory=dict)
    """The quantities that the claim's rule asks for."""
    ours: float | None = None
    spread: float | None = None
    spread_over: str = ""
    n: int = 0
    """Sequences, prompts or seeds behind `ours`."""
    control: str = ""
    """The same number where nothing was learned."""
    note: str = ""
    unmeasurable: str = ""
    """Why nothing can be said here; empty where the rule decides."""
    seeds: int = 1
    """Training seeds behind `ours`; 0 where nothing was trained."""


@dataclass(frozen=True)
class Verdict:
    """What became of a claim on one checkpoint."""

    claim: Claim
    checkpoint: str
    verdict: str
    measured: str
    ours: float | None = None
    spread: float | None = None
    spread_over: str = ""
    n: int = 0
    control: str = ""
    note: str = ""
    seeds: int = 0


def judge(evidence: Evidence) -> Verdict:
    """The verdict of the claim's rule. Raises ValueError for evidence that has no number and does not say why.

    A number that is NaN - a mean of nothing, a share of 0 - decides nothing.
    """
    undefined = evidence.ours is not None and np.isnan(evidence.ours)
    why = evidence.unmeasurable or ("; ".join(filter(None, (UNDEFINED, evidence.note))) if undefined else "")
    if why:
        claim, name = evidence.claim, evidence.checkpoint
        return Verdict(claim, name, UNMEASURED, evidence.measured, control=evidence.control, note=why)
    if evidence.ours is None:
        raise ValueError(f"{evidence.claim.label} on {evidence.checkpoint}: a verdict stands on a number")
    verdict, note = HOLDS if evidence.claim.rule.holds(evidence.values) else FAILS, evidence.note
    if verdict == FAILS and holds_but_for_chance(evidence.claim.rule, evidence.values):
        note = "; ".join(filter(None, (note, BY_CHANCE)))
    numbers = (evidence.ours, evidence.spread, evidence.spread_over, evidence.n, evidence.control, note, evidence.seeds)
    return Verdict(evidence.claim, evidence.checkpoint, verdict, evidence.measured, *numbers)


def judge_together(evidence: Sequence[Evidence]) -> list[Verdict]:
    """The verdict on every row, where several rows of one claim that hold by tests also have to hold after Holm's correction."""
    verdicts = [judge(each) for each in evidence]
    for claim in dict.fromkeys(each.claim for each in evidence):
        rows = [place for place, each in enumerate(verdicts) if each.claim is claim and each.verdict != UNMEASURED]
        tested = {place: own for place in rows if (own := chance(claim.rule, evidence[place].values)) is not None}
        for place, corrected in zip(tested, holm(np.array(list(tested.values()))), strict=True):
            if verdicts[place].verdict == HOLDS and corrected > 1:
                note = f"{AFTER_HOLM} the {len(tested)} rows of this claim"
                note = "; ".join(filter(None, (verdicts[place].note, note)))
                verdicts[place] = replace(verdicts[place], verdict=FAILS, note=note)
    return verdicts


def unmeasured(claim: Claim, why: str, checkpoint: str = "none") -> Verdict:
    """The verdict "not measurable here", and why."""
    return Verdict(claim, checkpoint, UNMEASURED, "", note=why)


_CLAIM = {"claim": "label", "statement": "statement", "source": "source", "paper": "paper_number", "written": "written"}
_VERDICT = tuple(each.name for each in fields(Verdict) if each.name != "claim")
ROW = (*_CLAIM, *_VERDICT, "rule")
"""The columns of a verdict as text."""


def verdict_rows(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """Verdicts as plain text by column, for a table or a file."""
    return [
        {column: getattr(verdict.claim, name) for column, name in _CLAIM.items()}
        | {name: _text(getattr(verdict, name)) for name in _VERDICT}
        | {"rule": verdict.claim.rule.words}
        for verdict in verdicts
    ]


def markdown_table(rows: list[dict[str, str]], columns: Mapping[str, str]) -> str:
    """A Markdown table of some of the rows' columns; `columns` maps their keys to what stands above them."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row[key].replace("|", "\\|").replace("\n", " ") or "–" for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def _text(value: object) -> str:
    if value is None or (value == 0 and isinstance(value, int)):
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
