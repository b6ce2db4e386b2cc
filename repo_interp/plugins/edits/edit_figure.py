"""Figure of the cost of edits: one row per edit, one mark per band.

    dot           change of the loss by the edit, with its 95 % interval
    hollow dot    the same of its control

Draws the result of `ri.try_edits`. This module knows nothing about models.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from repo_interp.plots.marks import bar_lengths, legend_below, name_rows_down, require_result
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plugins.edits.bands import band_colour, band_name

_APART = 0.62
"""Height of the marks of one edit; a row is 1 high."""


@style()
def edit_costs(found: xr.Dataset) -> PaperFigure:
    """Draw the change of the loss by edits, and by their controls.

    Args:
        found: Result of `ri.try_edits`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is not a result of `ri.try_edits`.
    """
    variables = ("change", "change_low", "mean_loss")
    require_result(found, variables, "costs of edits are", "try_edits")
    plain, names = str(found["edit"].values[0]), found["edit"].values[1:]
    bands = found["band"].values
    figure = paper_figure(PAGE_WIDTH, 1.0 + 0.15 * len(names) * max(2, len(bands)))
    ax = figure.subplots()
    steps = _APART * (np.arange(len(bands)) - (len(bands) - 1) / 2) / max(2, len(bands))
    handles: list[Line2D] = []
    for place, (band, step) in enumerate(zip(bands, steps, strict=True)):
        colour = band_colour(place)
        of_plain = float(found["mean_loss"].sel(edit=plain, band=band))
        for kind, face in (("control_change", "white"), ("change", colour)):
            if kind not in found:
                continue
            values, low, high = (
                found[f"{kind}{end}"].sel(edit=names, band=band).values
                for end in ("", "_low", "_high")
            )
            marks = ax.errorbar(
                values,
                np.arange(len(names)) + step,
                xerr=bar_lengths(values, low, high),
                fmt="o",
                color=colour,
                markerfacecolor=face,
                markersize=3.6,
                elinewidth=0.9,
            )
            marks[0].set_gid(f"{kind} {band}")
        label = f"{band_name(band)}: {of_plain:.2f} {plain}"
        handles.append(Line2D([], [], marker="o", linestyle="", color=colour, label=label))
    ax.axvline(0, color="#333333", linewidth=0.6)
    name_rows_down(ax, [str(name) for name in names])
    ax.set_xlabel(f"change of the loss (nats), with 95 % intervals over {found.attrs['unit']}")
    if "control_change" in found:
        look: dict[str, Any] = {
            "marker": "o",
            "linestyle": "",
            "color": "#333333",
            "markerfacecolor": "white",
        }
        handles.append(Line2D([], [], **look, label="the edit's control"))
    legend_below(figure, handles, length=1.0)
    return figure
