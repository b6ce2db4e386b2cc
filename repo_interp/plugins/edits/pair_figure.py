"""Figure of the effects of rotary pairs: changes of the loss by the number of turns.

    one row       one line per band, with 95 % intervals; dashed: all pairs together
    by layer      one map per band, layer by pair

Draws the result of `ri.pair_effects`. This module knows nothing about models.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.plots.marks import (
    bar_lengths,
    colour_bar,
    draw_cells,
    legend_below,
    look_around_zero,
    panels,
    plain_decades,
    require_result,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plugins.edits.bands import band_colour, band_name


@style()
def pair_effects(found: xr.Dataset) -> PaperFigure:
    """Draw the cost of changing single rotary pairs.

    Args:
        found: Result of `ri.pair_effects`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is not a result of `ri.pair_effects`.
    """
    variables = ("change", "together", "turns")
    require_result(found, variables, "effects of pairs are", "pair_effects")
    title = f"One pair at {found.attrs['factor']:g} of its frequency"
    if "layer" in found.dims:
        return _maps(found, title)
    figure = paper_figure(PAGE_WIDTH, 2.8)
    ax = figure.subplots()
    handles = [
        _draw_band(ax, found.isel(band=place), place) for place in range(found.sizes["band"])
    ]
    ax.axhline(0, color="#333333", linewidth=0.6)
    ax.axvline(1, color="#333333", linewidth=0.6, linestyle=":")
    ax.set_xscale("log")
    plain_decades(ax.xaxis)
    # The fastest pair stands on the left, as it is the first
    ax.invert_xaxis()
    ax.set_xlabel(f"{found['turns'].attrs['long_name']} (dotted: one)")
    ax.set_ylabel("change of the loss (nats)")
    handles.append(Line2D([], [], color="#333333", linestyle="--", label="all pairs together"))
    legend_below(figure, handles)
    figure.suptitle(f"{title}, with 95 % intervals over {found.attrs['unit']}")
    return figure


def _draw_band(ax: Axes, found: xr.Dataset, place: int) -> Line2D:
    """Draw one band, pair by pair and all pairs together; return its entry in the legend."""
    colour, turns = band_colour(place), found["turns"].values
    change, low, high = (found[f"change{end}"].values for end in ("", "_low", "_high"))
    ax.errorbar(
        turns,
        change,
        yerr=bar_lengths(change, low, high),
        color=colour,
        marker="o",
        markersize=3.2,
        linewidth=0.8,
        elinewidth=0.8,
    )[0].set_gid(f"band {place}")
    ax.axhline(float(found["together"]), color=colour, linestyle="--", linewidth=0.8)
    for pair in np.argsort(-np.abs(change), kind="stable")[:2]:
        ax.annotate(
            f"{found['pair'].values[pair]}", (turns[pair], change[pair]), (3, 3),
            textcoords="offset points", color=colour, fontsize=6,
        )  # fmt: skip
    label = f"{band_name(found['band'].item())}: {float(found['plain_loss']):.2f} as it is"
    return Line2D([], [], color=colour, marker="o", markersize=3.2, label=label)


def _maps(found: xr.Dataset, title: str) -> PaperFigure:
    """Draw one map per band, layers by pairs, all on one color scale."""
    height = 0.9 + 0.1 * found.sizes["layer"]
    figure, axes = panels(found.sizes["band"], 2, height, 0.5, PAGE_WIDTH)
    look = look_around_zero("PuOr", found["change"])
    turns = found["turns"].max("layer")
    named = [
        f"{pair}\n{turned:.2g}"
        for pair, turned in zip(turns["pair"].values, turns.values, strict=True)
    ]
    images = []
    for place, ax in enumerate(axes):
        here = found["change"].isel(band=place).transpose("layer", "pair").assign_coords(pair=named)
        images.append(draw_cells(ax, here, look | {"gid": f"band {place}"}, most=8))
        ax.set_xlabel(f"pair, and its {found['turns'].attrs['long_name']}")
        ax.set_title(
            f"{band_name(here['band'].item())}: {float(found['plain_loss'][place]):.2f} as it is"
        )
    colour_bar(figure, images[0], axes, "change of the loss (nats)", fraction=0.046)
    figure.suptitle(title)
    return figure
