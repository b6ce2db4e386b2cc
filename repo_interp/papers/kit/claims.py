"""A claim of a paper, the rule that judges it, and what was found: rows of a table that nobody types.

    holds / does not hold / not measurable here

A `Claim` is written before anything is measured: statement, source, the paper's number, and the rule in words. A `Verdict` is
what the rule made of one checkpoint, with the number, its spread and over what, and the same number of a control. Knows nothing
about any paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from repo_interp.errors import InputError

HOLDS = "holds"
FAILS = "does not hold"
UNMEASURED = "not measurable here"


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it is judged here."""

    id: str
    statement: str
    source: str
    paper_number: str
    """The paper's number; "figure" where it only draws."""
    rule: str
    """When the claim holds, in words; the code that decides stands beside it."""


@dataclass(frozen=True)
class Verdict:
    """What became of a claim on one checkpoint."""

    claim: Claim
    checkpoint: str
    verdict: str
    measured: str
    """What `ours` is, in words, with its unit."""
    ours: float | None = None
    spread: float | None = None
    spread_over: str = ""
    n: int = 0
    """Sequences, prompts or seeds behind `ours`."""
    control: str = ""
    """The same number where nothing was learned."""
    note: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in (HOLDS, FAILS, UNMEASURED):
            raise InputError(f"a verdict is {HOLDS!r}, {FAILS!r} or {UNMEASURED!r}, not {self.verdict!r}")
        if (self.ours is None) != (self.verdict == UNMEASURED):
            raise InputError(
                f"{self.claim.id} on {self.checkpoint}: a verdict stands on a number, and only {UNMEASURED!r} has none"
            )


_CLAIM = {"claim": "id", "statement": "statement", "source": "source", "paper": "paper_number"}
_VERDICT = tuple(field.name for field in fields(Verdict) if field.name != "claim")
ROW = (*_CLAIM, *_VERDICT, "rule")
"""The columns of a verdict as text."""


def judged(holds: bool) -> str:
    """The verdict that a rule's answer means."""
    return HOLDS if holds else FAILS


def verdict_rows(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """Verdicts as plain text by column, for a table or a file."""
    return [
        {column: getattr(one.claim, name) for column, name in _CLAIM.items()}
        | {name: _text(getattr(one, name)) for name in _VERDICT}
        | {"rule": one.claim.rule}
        for one in verdicts
    ]


def markdown_table(rows: list[dict[str, str]], columns: dict[str, str]) -> str:
    """A Markdown table of some of the rows' columns; `columns` maps their keys to what stands above them."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row[key].replace("|", "\\|").replace("\n", " ") or "–" for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def _text(value: object) -> str:
    if value is None or (value == 0 and isinstance(value, int)):
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
