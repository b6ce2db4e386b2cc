"""What heads are called in each of several runs: which names changed, from the group `atlas` of each.

Heads are lined up by layer and number. Between steps of one training that is the same head; between twins that were trained apart it is
only the same place. Knows nothing about what names mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.patches import Patch

from repo_interp.comparison.looks import Runs, spread
from repo_interp.plots.marks.drawing import legend_below, name_ticks
from repo_interp.plots.marks.heads import MISSING
from repo_interp.plots.marks.table import Table
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plots.views.atlas import NO_NAME, draw_names, label_colours, names_of

BESIDE, COLUMNS = 5, 4
"""Runs that have a panel, and a column."""
NONE = "–"


def changed_names(comparison: xr.DataTree, runs: Runs) -> Table | None:
    """One row per head that is not called the same in all runs, one column per run; None where no two runs have names."""
    if "atlas" not in comparison.children or "name" not in comparison["atlas"].data_vars:
        return None
    name = comparison["atlas"]["name"].transpose("run", "layer", "head")
    shown = spread(list(runs.names), COLUMNS)
    texts = name.sel(run=shown).values.astype(str)
    places = np.argwhere((name.values.astype(str) != name.values.astype(str)[:1]).any(0))
    rows = tuple(
        (int(name["layer"][layer]), int(name["head"][head]), *(text or NONE for text in texts[:, layer, head]))
        for layer, head in places.tolist()
    )
    note = f"{len(rows)} of {name.sizes['layer'] * name.sizes['head']} heads are not called the same; heads are lined up by their place."
    return Table("atlas", "Heads whose name changes", ("layer", "head", *(runs.title(one) for one in shown)), rows, note)


def names_beside(comparison: xr.DataTree, runs: Runs) -> Iterator[tuple[str, PaperFigure, str]]:
    """What heads are called, one panel per run: the name of the figure, the figure and its caption."""
    atlas = comparison["atlas"].to_dataset()
    if "name" not in atlas:
        return
    shown, labels = spread(list(runs.names), BESIDE), [str(label) for label in atlas["label"].values]
    colours = label_colours(labels)
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.9 + 0.15 * max(6, atlas.sizes["layer"]))
        axes: Any = figure.subplots(1, len(shown), sharey=True, squeeze=False)
        found: set[str] = set()
        for ax, run in zip(axes[0], shown, strict=True):
            names = names_of(atlas.sel(run=run))
            found |= {of[0] for of in names.ravel() if of}
            draw_names(ax, names, colours)
            name_ticks(ax.xaxis, atlas["head"].values, 16)
            name_ticks(ax.yaxis, atlas["layer"].values, 32)
            ax.set(title=runs.title(run), xlabel="head")
        axes[0, 0].set_ylabel("layer")
        handles = [Patch(facecolor=colours[label], label=label) for label in labels if label in found]
        legend_below(figure, [*handles, Patch(facecolor=MISSING, label=NO_NAME)])
    yield "atlas_names", figure, "First name of a head, run by run; +1: another name besides."
