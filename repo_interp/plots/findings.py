"""What a run shows, in sentences: each states a number that passed its threshold or its null, and names the head, prompt and token.

    finding = sentence + evidence (the numbers, the threshold and the null) + where to look        `View.findings` gives those of one group

`findings` orders those of all views of a run by `weight` and keeps a few of each group, so that no group hides another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import xarray as xr

MOST = 8
"""Findings of a run."""
MOST_OF_GROUP = 2
"""Findings of one group, while other groups have some."""


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


def findings(run: xr.DataTree, most: int = MOST) -> list[Finding]:
    """At most `most` findings of `run`, the heaviest first; of each group its heaviest `MOST_OF_GROUP` precede all its others."""
    from repo_interp.plots.catalogue import views_of

    ranked: list[tuple[bool, float, int, Finding]] = []
    order = count()
    for view in views_of(run):
        given = sorted(view.findings(run), key=lambda finding: -finding.weight)
        ranked += [(place >= MOST_OF_GROUP, -finding.weight, next(order), finding) for place, finding in enumerate(given)]
    return [finding for *_, finding in sorted(ranked, key=lambda entry: entry[:3])[:most]]
