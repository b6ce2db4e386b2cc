"""Titles of figures: the quantity, and a line on the averages.

This module knows arrays and figures.
"""

from __future__ import annotations

from collections.abc import Hashable

import xarray as xr

from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.style import PaperFigure


def name_figure(figure: PaperFigure, title: str, detail: str) -> None:
    """Write a title and a line of detail above a figure.

    Args:
        figure: Figure to write on.
        title: Title; its first letter becomes a capital. It wraps at the width of the figure.
        detail: Line below the title; "" writes none.
    """
    text = title[:1].upper() + title[1:]
    figure.suptitle(f"{text}\n{detail}" if detail else text, x=0.01, ha="left")


def averaged_over(values: xr.DataArray, *apart: Hashable | None, middle: str = "half") -> str:
    """Describe a line and its band: "mean and middle half over 4 layers of 4 heads".

    Args:
        values: Array that is averaged.
        *apart: Axes that have a role, and are not averaged.
        middle: Share of layers and heads in the band.

    Returns:
        The text; empty if no layers and heads are averaged.
    """
    rest = [
        f"{values.sizes[dim]} {dim}s"
        for dim in ("layer", "head")
        if dim in values.dims and dim not in apart
    ]
    return f"mean and middle {middle} over {' of '.join(rest)}" if rest else ""


def title_of(values: xr.DataArray) -> str:
    """Write the name of an array with its units.

    Args:
        values: Array with `long_name` and `units`.

    Returns:
        The text.
    """
    return unit_label(str(values.attrs.get("long_name", values.name)), values)
