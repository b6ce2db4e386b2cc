"""Charts of position and semantics in the last query's logits by key and distance.

Position Generalization fig. 3.

    W'_dj ~ a_d + b_j                 fake map with its two axes along its sides, their sum

Draws the groups `fake_distance` and `maps`; values of maps are block means. This module knows
nothing about how fits are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    Heads,
    colour_bar,
    envelope,
    figures_of_heads,
    group,
    has_groups,
    layer_colour,
    pick,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plots.view import View
from repo_interp.plugins.three_axis import fit_figure
from repo_interp.plugins.three_axis import view as fits

CORRELATIONS = {"r": "r of the fake-distance fit"}


@style()
def fake_distance_fit(run: xr.DataTree, layer: int, head: int) -> PaperFigure:
    """Draw a head's fake-distance map, its two axes and their sum (fig. 3).

    The figure shows the first prompt.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.

    Returns:
        The figure.

    Raises:
        InputError: The run has no `maps`, or no axes of `fake_distance`.
    """
    maps, fit = group(run, "maps"), group(run, "fake_distance")
    if "position_axis" not in fit:
        raise InputError(
            'this run has no axes; analyze again with the parameter axes="first_prompt" of '
            "fake_distance"
        )
    shown = pick(maps["fake_map"], layer=layer, head=head).transpose("distance_block", "key_block")
    position, semantic = (
        pick(fit[name], layer=layer, head=head).values
        for name in ("position_axis", "semantic_axis")
    )
    tokens, starts = semantic.size, shown["key_block"].values
    edges = fit_figure.edges_of(starts, tokens)
    sizes = np.diff(edges)
    # Block means of the axes, to match the block means of the map.
    by_distance, by_key = (
        np.add.reduceat(axis, edges[:-1]) / sizes for axis in (position, semantic)
    )
    rebuilt = by_distance[:, None] + by_key
    figure = paper_figure(PAGE_WIDTH, 3.0)
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 0.28, 1.12), height_ratios=(0.28, 1))
    # Both maps share the color limits of the measured one, so that they can be compared.
    limits, colour = fit_figure.map_limits(shown.values), layer_colour(fit, layer)
    ax, along, beside, beneath = (
        figure.add_subplot(grid[place]) for place in ((1, 0), (0, 0), (1, 1), (1, 2))
    )
    down = "fake distance (tokens)"
    fit_figure.draw_map(ax, shown.values, tokens, limits, "", down)
    fit_figure.draw_axis(along, semantic, colour, "semantic")
    along.set_title("Fake-distance logits; above: semantic axis, right: position axis")
    along.tick_params(labelbottom=False)
    kept = envelope(position, fit_figure.PIXELS)
    beside.plot(position[kept], kept, color=colour, linewidth=0.7, gid="axis position")
    # Distances increase downwards, as in the map beside it.
    beside.set(ylim=(max(1, position.size - 1), 0), xlabel="logits")
    beside.grid(axis="x")
    beside.locator_params(axis="x", nbins=2)
    # Horizontal labels of three small numbers would touch
    beside.tick_params(axis="x", labelrotation=45)
    beside.tick_params(labelleft=False)
    title = f"Sum of the axes, r = {fit_figure.r_of(fit, layer, head)}"
    image = fit_figure.draw_map(beneath, rebuilt, tokens, limits, title, down)
    colour_bar(figure, image, beneath, "logits", pad=0.02, fraction=0.05)
    figure.suptitle(fit_figure.figure_title(fit, layer, head, tokens, maps), x=0.01, ha="left")
    return figure


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart correlations by head, if `three_axis` does not, and fig. 3 if the run has its data."""
    if not has_groups(run, ["three_axis"]):
        yield fits.correlation_grid(run)
    dataset = group(run, "fake_distance")
    if "position_axis" in dataset:
        draw, heads = partial(fake_distance_fit, run), fits.heads_with_maps(run, dataset)
        caption = (
            "logits of the last query with every key at every distance, the two axes of their fit, and "
            "the sum of these."
        )
        yield from figures_of_heads("fake_distance", draw, heads, caption, live=True)
    yield from fits.correlation_maps(dataset, CORRELATIONS)
    if "reach" in dataset and bool(dataset["reach"].notnull().any()):
        yield Heads(dataset["reach"])
    if "semantic_share" in dataset:
        yield Heads(dataset["semantic_share"].mean("prompt", keep_attrs=True))
    axes = {
        "Position axis": ("position", "fake distance (tokens)"),
        "Semantic axis": ("semantic", "key (token)"),
    }
    yield from fits.fit_charts(dataset, "r of the fake-distance fit", axes)


VIEW = View(
    "fake_distance",
    "Position and semantics: fake distance",
    "Correlation of the logits that the last query would give every key at every distance "
    "with a part for the distance and one for the "
    "key, added up (Position Generalization, sec. 3.2). Without rotation it is 1 by construction.",
    _charts,
    tables=fits.correlation_tables("fake_distance", CORRELATIONS),
    compared=("r", "position_axis"),
    not_averaged=("position_axis", "semantic_axis", "reach"),
)
