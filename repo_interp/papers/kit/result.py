"""One figure of a paper, made again: its data, its drawing, what is said below it, and the verdicts that stand on it.

Knows nothing about any paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from repo_interp.papers.kit.claims import Verdict
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


def plain(data: xr.Dataset) -> xr.Dataset:
    """What a netCDF file takes: truth values as 0 and 1, only the attributes of variables."""
    kept = data.drop_attrs(deep=False)
    return kept.assign({name: array.astype("int8") for name, array in kept.items() if array.dtype == bool})
