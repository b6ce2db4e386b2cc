"""A text per head as colored cells, in a strip that fits beside a few sentences.

cell (column: layer, row: head)     color of the text; gray: none
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from repo_interp.plots.marks.panels import MISSING
from repo_interp.plots.style import PaperFigure, paper_figure, style

WIDEST = 7.0
"""Inches of a strip, at most."""
TICKS = 16
"""Layers, or heads, that are numbered at most."""


@style()
def head_strip(texts: xr.DataArray, colors: Mapping[str, str]) -> PaperFigure:
    """Draw the text of every head, layers from left to right.

    Args:
        texts: Text of every head, "" for none [layer, head].
        colors: Colors by text, in the order of the legend.

    Returns:
        The figure.
    """
    names = texts.transpose("head", "layer")
    heads, layers = names.shape
    figure = paper_figure(min(WIDEST, 1.9 + 0.15 * layers), 0.45 + max(1.0, min(2.2, 0.12 * heads)))
    ax: Any = figure.subplots()
    cells = [[to_rgb(colors.get(name, MISSING)) for name in row] for row in names.values]
    ax.imshow(np.array(cells), aspect="auto", gid="names")
    for axis, count, at in (("x", layers, names["layer"]), ("y", heads, names["head"])):
        some = range(0, count, -(-count // TICKS))
        getattr(ax, f"set_{axis}ticks")(some, at.values[list(some)])
        # White lines between cells
        getattr(ax, f"set_{axis}ticks")(np.arange(count - 1) + 0.5, minor=True)
    ax.set(xlabel="layer", ylabel="head")
    ax.grid(which="minor", color="white", linewidth=0.6)
    ax.tick_params(which="both", length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    present = {name: color for name, color in colors.items() if (names == name).any()}
    present["no name"] = MISSING
    handles = [Patch(facecolor=color, label=name) for name, color in present.items()]
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure
