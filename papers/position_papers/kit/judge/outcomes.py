"""Join the rows of verdicts on one claim to a verdict on the claim itself, as data without words.

A table of verdicts has one row per verdict, as text, like verdicts.csv; the column `reasons` has
records as JSON. This module knows no paper by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from position_papers.kit.experiment import Paper
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNMEASURABLE,
    Claim,
    Kind,
    Outcome,
    Reason,
    Verdict,
    primaries,
    reasons_of,
)

COLUMNS = (
    "claim",
    "statement",
    "source",
    "paper",
    "checkpoint",
    "outcome",
    "measured",
    "ours",
    "spread",
    "over",
    "n",
    "seeds",
    "control",
    "reasons",
    "rule",
    "scale",
    "command",
)
Row = Mapping[str, Any]
"""One verdict of a table: text by column, and its reasons."""
Deciding = Callable[[Claim], Sequence[Row]]
"""The rows that decide on a claim."""


def verdict_table(
    verdicts: Iterable[Verdict], scales: Iterable[str] = (), command: str = ""
) -> pd.DataFrame:
    """Return verdicts as a table of text. `scales`: the differences of the models from the paper's."""
    table = pd.DataFrame([_row(each) for each in verdicts], columns=list(COLUMNS))
    return table.assign(scale=[*scales] or "", command=command)


def _row(verdict: Verdict) -> dict[str, str]:
    claim, estimate, interval = verdict.claim, verdict.estimate, verdict.interval
    return {
        "claim": claim.label,
        "statement": claim.statement,
        "source": claim.source,
        "paper": claim.paper_number,
        "checkpoint": verdict.checkpoint,
        "outcome": verdict.outcome.value,
        "measured": estimate.measured,
        "ours": "" if estimate.value is None else f"{estimate.value:.3g}",
        "spread": "" if interval is None else f"{interval.spread:.3g}",
        "over": "" if interval is None else interval.over,
        "n": str(estimate.n or ""),
        "seeds": str(estimate.seeds or ""),
        "control": estimate.control,
        "reasons": json.dumps(
            [
                {name: value for name, value in asdict(each).items() if value}
                for each in verdict.reasons
            ]
        ),
        "rule": claim.rule.words,
    }


def read_table(file: Path) -> pd.DataFrame:
    """Read a table of text from CSV."""
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def records(table: pd.DataFrame) -> list[Row]:
    """Return the rows of a table of verdicts, with reasons as records. `shown` has the reasons for
    a page: of several reasons why a claim cannot be measured, only the first.
    """
    rows = [{**row, "reasons": reasons_of(row["reasons"])} for row in table.to_dict("records")]
    return [
        row | {"shown": row["reasons"][: 1 if row["outcome"] == UNMEASURABLE else None]}
        for row in rows
    ]


def primary_rows(rows: Sequence[Row], paper: Paper, claim: Claim) -> list[Row]:
    """Return the rows on the checkpoints that decide `claim` (`claims.primaries`); all rows if none
    could be judged.
    """
    own = [row for row in rows if row["claim"] == claim.label]
    judged = [row["checkpoint"] for row in own if row["outcome"] != UNMEASURABLE]
    named = (
        name
        for experiment in paper.experiments
        if claim in experiment.claims
        for name in experiment.needs.zoo
    )
    chosen = primaries(claim, judged, named)
    return [row for row in own if row["checkpoint"] in chosen or not chosen]


def standing(deciding: Deciding, paper: Paper, claim: Claim) -> Verdict | None:
    """Return the verdict on `claim` itself; None without measurements.

    The claim holds if all deciding rows hold. It is undecided if some are undecided and none fails.
    The reasons state how many rows hold if not all do, the required parts (`Claim.also`) that fail
    or are undecided, the things of the claim that could be judged, and the numbers in words
    (`Claim.says`).
    """
    rows = deciding(claim)
    judged = [row for row in rows if row["outcome"] != UNMEASURABLE]
    held = sum(row["outcome"] == HOLDS for row in judged)
    if not rows:
        return None
    if not judged:
        return _verdict(
            claim,
            rows,
            UNMEASURABLE,
            next((row["reasons"] for row in rows if row["reasons"]), ())[:1],
        )
    if not any(row["outcome"] == FAILS for row in judged) and held < len(judged):
        return _verdict(claim, judged, UNDECIDED, [_most_seeds(judged), *_said(judged)])
    if not held:
        return _verdict(claim, judged, FAILS, _said(judged))
    parts = {
        each: standing(deciding, paper, each)
        for each in paper.claims
        if each.id == claim.id and each.part in claim.also
    }
    lacks = [
        Reason(Kind.LACKS, _beside(part, claim))
        for part, own in parts.items()
        if own is not None and _is_against(own)
    ]
    untold = [
        Reason(Kind.UNTOLD, _beside(part, claim))
        for part, own in parts.items()
        if own is None or own.outcome == UNMEASURABLE
    ]
    names = {row["checkpoint"] for row in judged}
    silent = [thing for thing, group in claim.about.items() if not names & {*group}]
    if 0 < len(silent) < len(claim.about):
        known = [thing for thing in claim.about if thing not in silent]
        text = f"for {', '.join(known)}; not measurable: {', '.join(silent)}"
        untold.append(Reason(Kind.ABOUT, text))
    if held < len(judged):
        return _verdict(
            claim, judged, FAILS, (Reason(Kind.PART, count=held, of=len(judged)), *lacks)
        )
    return _verdict(claim, judged, HOLDS, [*(lacks or untold), *_said(judged)])


def _said(rows: Sequence[Row]) -> list[Reason]:
    """Return the numbers of rows in words, each text once."""
    given = (reason for row in rows for reason in row["reasons"] if reason.kind == Kind.SAYS)
    return list(dict.fromkeys(given))


def _most_seeds(rows: Sequence[Row]) -> Reason:
    """Return why rows are undecided: the reason with the largest number of needed seeds."""
    given = [
        reason
        for row in rows
        for reason in row["reasons"]
        if reason.kind in (Kind.CHANCE, Kind.NEITHER, Kind.HOLM)
    ]
    return max(given, key=lambda reason: reason.count, default=Reason(Kind.CHANCE))


def _verdict(
    claim: Claim, rows: Sequence[Row], outcome: Outcome, reasons: Iterable[Reason]
) -> Verdict:
    return Verdict(
        claim,
        ", ".join(dict.fromkeys(row["checkpoint"] for row in rows)),
        outcome,
        reasons=tuple(reasons),
    )


def _is_against(part: Verdict) -> bool:
    lacks = any(reason.kind == Kind.LACKS for reason in part.reasons)
    return part.outcome != UNMEASURABLE and (part.outcome != HOLDS or lacks)


def _beside(part: Claim, claim: Claim) -> str:
    """Return the additional condition of `part` over `claim`: "beyond random weights"."""
    own = claim.part.split(", ")
    return ", ".join(word for word in part.part.split(", ") if word not in own)
