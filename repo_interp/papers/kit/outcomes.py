"""What the verdicts of one claim come to, as words of the pages over all papers; rows are those of verdicts.csv. Knows no paper by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from repo_interp.papers.kit.claims import FAILS, HOLDS, UNMEASURED, Claim
from repo_interp.papers.kit.experiment import Paper

NOT_YET = "not measured yet"
EXTENSION = "none"
"""The paper's number of a claim that no paper makes: a question of ours to one of theirs."""


def number(row: Mapping[str, str]) -> str:
    """The number of one row with its checkpoint and spread."""
    spread = f" ± {row['spread']}" if row["spread"] else ""
    return f"{row['checkpoint']}: {row['ours']}{spread}"


def together(rows: Sequence[Mapping[str, str]]) -> str:
    """What the verdicts of one claim come to."""
    if not rows:
        return NOT_YET
    judged = [row["verdict"] for row in rows if row["verdict"] != UNMEASURED]
    if not judged:
        notes = dict.fromkeys(row["note"] for row in rows if row["note"])
        return f"{UNMEASURED}: {'; '.join(notes)}" if notes else UNMEASURED
    held = judged.count(HOLDS)
    if held == len(judged):
        return f"**{HOLDS}**" + (f" ({held} of {held})" if held > 1 else "")
    return f"{HOLDS} in {held} of {len(judged)}" if held else FAILS


def primary(rows: Sequence[Mapping[str, str]], paper: Paper, claim: Claim) -> str:
    """The verdict on the checkpoint that the claim is about first of all: of those its experiment names, the first that has a row."""
    names = [name for experiment in paper.experiments if claim in experiment.claims for name in experiment.needs.zoo]
    by_checkpoint = {row["checkpoint"]: row["verdict"] for row in reversed(rows)}
    known = [by_checkpoint[name] for name in (*names, *reversed(by_checkpoint)) if name in by_checkpoint]
    return next((verdict for verdict in known if verdict != UNMEASURED), UNMEASURED if known else NOT_YET)
