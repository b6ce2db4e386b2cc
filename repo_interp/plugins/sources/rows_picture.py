"""Figure of rows of learned positions: order by distance, sources, and loss when frozen.

    cell         2 share(later token has the higher position) - 1, mean over prompts; red 1, blue -1;
                 opacity: |mean of its sign| over prompts
    bar          held-out shares of the variance of positions by source; a negative share has length
                 0
    cost         mean rise of -log p of a target with frozen positions of the row's heads, if
                 `effects` measured heads

Heads that share positions are one row. Draws `patterns`, `position_sources` and `effects` of a run.
This module knows nothing about how they were measured.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Patch

from repo_interp.plots.marks import (
    CustomFigure,
    bare,
    colour_bar,
    group,
    heads_named,
    heads_where,
    learned_layers,
    legend_below,
)
from repo_interp.plots.style import (
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    rendered,
    style,
)

COLOURS = {
    "slow": "#E69F00",
    "token": "#56B4E9",
    "previous": "#CC79A7",
    "segment": "#009E73",
    "line end": "#D55E00",
}
WORDS = {
    "slow": "slow part",
    "token": "word",
    "previous": "previous word",
    "segment": "segment",
    "line end": "line end beyond its word",
}
"""Sources in words."""
CAPTION = (
    "Left: how far the later of two tokens has the higher position, by the tokens from one to the "
    "other: red always, blue never, white no order; transparent where prompts disagree. Right: "
    "what explains the variance of a row on held-out text"
)
_COST = ", and what freezing its positions costs."
_PIXELS = 110
"""Pixels per inch on the page."""
_MOST = 90
"""Most rows that are drawn; from more rows, evenly spaced ones."""


def heads_by_row(values: xr.DataArray, layers: list[int]) -> list[list[tuple[int, int]]]:
    """List the heads of every row of positions.

    Args:
        values: Measurements of positions [layer, head, ...], equal for heads that share positions.
        layers: Layers to list.

    Returns:
        Heads (layer, head) by row, in order.
    """
    rows: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    for layer in layers:
        for head in values["head"].values.tolist():
            content = values.sel(layer=layer, head=head).values.tobytes()
            rows.setdefault((layer, content), []).append((layer, head))
    return [*rows.values()]


def embedded_picture(run: xr.DataTree) -> dict[str, Any] | None:
    """Return the picture for the script of the page, above the texts of the kinds.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Source, width in pixels and caption; None if the run has no such picture.
    """
    for chart in rows_charts(run):
        figure = chart.figure()
        content = b64encode(rendered(figure, ("svg",))["svg"]).decode()
        return {
            "source": f"data:image/svg+xml;base64,{content}",
            "width": round(figure.get_figwidth() * _PIXELS),
            "caption": chart.caption,
        }
    return None


def rows_charts(run: xr.DataTree) -> Iterator[CustomFigure]:
    """Chart rows of positions by distance, if the run has all groups that are needed.

    Args:
        run: Tree of a run, a group per measure.

    Yields:
        The chart.
    """
    if "patterns" not in run.children or "order" not in group(run, "patterns"):
        return
    order = group(run, "patterns")["order"]
    layers = [
        layer for layer in learned_layers(order) if bool(order.sel(layer=layer).notnull().any())
    ]
    if layers:
        caption = CAPTION + (_COST if _costs(run) is not None else ".")
        yield CustomFigure(
            "rows_of_positions", partial(rows_of_positions, run), caption=caption, live=True
        )


@style()
def rows_of_positions(run: xr.DataTree) -> PaperFigure:
    """Draw the order that every row of learned positions encodes, and its sources.

    Args:
        run: Tree of a run with `patterns` and `position_sources`.

    Returns:
        The figure.
    """
    order, sources = group(run, "patterns")["order"], group(run, "position_sources")
    order = order.transpose("layer", "head", "prompt", "distance")
    rows = heads_by_row(order, learned_layers(order))
    if len(rows) > _MOST:
        rows = [rows[place] for place in np.linspace(0, len(rows) - 1, _MOST).astype(int)]
    costs = _costs(run)
    beside = [3.0, 1.6] + [0.9] * (costs is not None)
    figure = paper_figure(PAGE_WIDTH, min(PAGE_HEIGHT, 1.1 + 0.115 * len(rows)))
    axes = figure.subplots(1, len(beside), sharey=True, width_ratios=beside)
    image = _draw_orders(axes[0], order, rows)
    _draw_shares(axes[1], sources["share"], rows)
    if costs is not None:
        _draw_costs(axes[2], costs, rows)
    names = [heads_named(heads, per_layer=0) for heads in rows]
    size = 5.5 if len(rows) <= 40 else 4.2
    axes[0].set_yticks(range(len(rows)), names, fontsize=size)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    label = "later token has the higher position: 1 always, -1 never"
    colour_bar(
        figure,
        image,
        axes[0],
        label,
        location="top",
        shrink=0.6,
        aspect=40,
        ticks=[-1, -0.5, 0, 0.5, 1],
    )
    handles = [Patch(facecolor=COLOURS[name], label=WORDS[name]) for name in COLOURS]
    legend_below(figure, handles)
    return figure


def _draw_orders(ax: Axes, order: xr.DataArray, rows: list[list[tuple[int, int]]]) -> Any:
    of_rows = np.stack([order.sel(layer=heads[0][0], head=heads[0][1]).values for heads in rows])
    known = np.isfinite(of_rows)
    count = np.maximum(known.sum(1), 1)
    # [row, distance]: means over prompts that are long enough
    mean = np.where(known, of_rows, 0).sum(1) / count
    agree = np.abs(np.where(known, np.sign(of_rows), 0).sum(1)) / count
    norm = Normalize(-1, 1)
    shades = mpl.colormaps["RdBu_r"](norm(mean))
    # Opacity from signs; with few prompts a white cell may be opaque, which looks the same
    shades[..., 3] = np.where(known.any(1), agree, 0)
    ax.imshow(shades, aspect="auto", interpolation="nearest")
    bare(ax)
    distances = order["distance"].values.tolist()
    ax.set_xticks(range(len(distances)), [str(distance) for distance in distances])
    ax.set_xlabel("tokens from one to the other")
    return ScalarMappable(norm, "RdBu_r")


def _draw_shares(ax: Axes, share: xr.DataArray, rows: list[list[tuple[int, int]]]) -> None:
    places, start = np.arange(len(rows)), np.zeros(len(rows))
    for source, colour in COLOURS.items():
        of_source = share.sel(source=source)
        values = [float(of_source.sel(layer=heads[0][0], head=heads[0][1])) for heads in rows]
        # A negative share misleads on held-out text, so it has length 0
        lengths = np.minimum(np.nan_to_num(values).clip(0), 1 - start)
        ax.barh(places, 100 * lengths, left=100 * start, height=0.8, color=colour)
        start = start + lengths
    ax.set_xlim(0, 100)
    ax.set_xlabel("% of the variance\nexplained, held out")
    ax.tick_params(axis="y", length=0)


ROUNDING = 0.001
"""Nats; an axis of costs is not drawn finer."""


def _draw_costs(ax: Axes, costs: xr.DataArray, rows: list[list[tuple[int, int]]]) -> None:
    values = []
    for heads in rows:
        known = [
            float(costs.sel(layer=layer, head=head))
            for layer, head in heads
            if layer in costs["layer"] and head in costs["head"]
        ]
        values.append(float(np.nanmean(known)) if known and not np.isnan(known).all() else np.nan)
    ax.barh(np.arange(len(rows)), np.nan_to_num(values), height=0.8, color="#555555")
    ax.axvline(0, color="#222222", linewidth=0.5)
    if np.nanmax(np.abs(values), initial=0.0) < ROUNDING:
        ax.set_xlim(-ROUNDING, ROUNDING)  # bars of rounding alone have no length
    ax.set_xlabel("cost of freezing\na head (nats)")
    ax.tick_params(axis="y", length=0)


def _costs(run: xr.DataTree) -> xr.DataArray | None:
    """Return the rise of -log p with the positions of a head frozen; None if not measured."""
    if "effects" not in run.children:
        return None
    effects = group(run, "effects")
    if "effect" not in effects or "frozen" not in effects["kind"].values:
        return None
    cost = -effects["effect"].sel(kind="frozen", drop=True)
    return cost if heads_where(cost.notnull()) else None
