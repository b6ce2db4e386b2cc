"""One figure of a paper, made again: its data, its drawing, what is said below it, and the verdicts that stand on it.

Knows nothing about any paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from repo_interp.papers.claims import Verdict
from repo_interp.plots.style import PaperFigure


@dataclass(frozen=True)
class Result:
    """A figure with everything that belongs to it."""

    name: str
    """Stem of its files."""
    caption: str
    data: xr.Dataset
    figure: PaperFigure
    verdicts: tuple[Verdict, ...] = ()
