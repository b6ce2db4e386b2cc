"""A sentence about a run: a number that passed its threshold or its null, and where its reader finds it confirmed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One sentence about a run, and where its reader finds it confirmed."""

    sentence: str
    """A whole sentence in plain English, with its numbers."""
    evidence: str
    """The variable, the threshold and the null behind it."""
    weight: float
    """How much it tells, from 0 to 1; findings are read in descending order."""
    group: str
    """The group of the run that holds the evidence."""
    layer: int | None = None
    head: int | None = None
    prompt: int | None = None
    token: int | None = None
