"""What the verdicts of one claim come to, as words of the pages over all papers; rows are those of verdicts.csv. Knows no paper by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """The verdict on the checkpoint that the claim is about first of all: the first of those its experiment names that could be judged,
    else any other that could.
    """
    names = [name for experiment in paper.experiments if claim in experiment.claims for name in experiment.needs.zoo]
    by_checkpoint = {row["checkpoint"]: row["verdict"] for row in reversed(rows)}
    known = [by_checkpoint[name] for name in (*names, *reversed(by_checkpoint)) if name in by_checkpoint]
    return next((verdict for verdict in known if verdict != UNMEASURED), UNMEASURED if known else NOT_YET)


@dataclass(frozen=True)
class Told:
    """A claim with what became of it, in words."""

    claim: Claim
    outcome: str
    """The heading that it stands under."""
    why: str = ""
    """The reason, where nothing can be told."""
    where: str = ""
    """On which data alone it was asked, where not on all."""


def paragraph(paper: Paper, told: Sequence[Told], headings: Sequence[str]) -> list[str]:
    """The paper's name and a list: under each of `headings` its claims; those of one wording once, those of one reason together."""
    items = []
    for heading in headings:
        some = [each for each in told if each.outcome == heading]
        for why in dict.fromkeys(each.why for each in some):
            labels: dict[str, list[str]] = {}
            for each in some:
                if each.why == why:
                    labels.setdefault(each.claim.statement.rstrip("."), []).append(each.claim.label + each.where)
            claims = "; ".join(f"{statement} ({', '.join(known)})" for statement, known in labels.items())
            items.append(f"- *{heading}*{f' ({why})' if why else ''}: {claims}.")
    return [f"**{paper.title.partition(',')[0]}**\n\n" + "\n".join(items)] if items else []


def reason(rows: Sequence[Mapping[str, str]]) -> str:
    """Why nothing can be told: the first words of the first note of rows of verdicts."""
    why = next((row["note"] for row in rows if row["note"]), "")
    return why.partition(": ")[0].partition("; ")[0]
