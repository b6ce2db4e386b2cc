"""Shares of the patterns of chunks as stacked bars (RePo fig. 3).

Draws the group `patterns` of a run. Knows nothing about how a chunk is labelled.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.drawing import (
    bare,
    legend_below,
    name_ticks,
    say,
    scheme_handles,
    scheme_swatches,
)
from repo_interp.plots.marks.reading import group, schemes
from repo_interp.plots.style import (
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PATTERN_COLOURS,
    PaperFigure,
    paper_figure,
    style,
)
from repo_interp.plots.views.patterns import caption_of


@style()
def stacked_shares(run: xr.DataTree) -> PaperFigure:
    """Draw stacked shares of the patterns (RePo fig. 3).

    The panels show all layers that learn positions, single layers, and single heads.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.
    """
    patterns = group(run, "patterns")
    shares = patterns["pattern_share"].transpose("layer", "head", "pattern")
    names = [str(name) for name in patterns["pattern"].values]
    named = schemes(patterns)
    figure = paper_figure(PAGE_WIDTH, min(PAGE_HEIGHT, max(2.4, 0.17 * len(named) + 1.1)))
    overall, by_layer, by_head = figure.subplots(1, 3, width_ratios=(0.75, 2.1, 2.6))
    draw_stack(overall, patterns["pattern_share_all"].values[None], names)
    overall.set(xticks=[], ylabel="share of chunks (%)", title="Learned layers")
    _write_shares(overall, patterns["pattern_share_all"].values)
    by_layer.sharey(overall)
    draw_stack(by_layer, nanmean(shares.values, axis=1), names)
    by_layer.tick_params(labelleft=False)
    scheme_swatches(by_layer, named, "x")
    name_ticks(by_layer.xaxis, named, 16)
    by_layer.set(xlabel="layer", title="By layer")
    draw_mosaic(by_head, shares.values, names)
    scheme_swatches(by_head, named, "y")
    name_ticks(by_head.yaxis, named, 32)
    name_ticks(by_head.xaxis, shares["head"].values, 16)
    by_head.set(xlabel="head", ylabel="layer", title="By layer and head")
    figure.suptitle(caption_of(patterns), x=0.01, ha="left")
    handles = [Patch(facecolor=PATTERN_COLOURS[name], label=name) for name in names]
    legend_below(figure, [*handles, *scheme_handles(named.values())])
    return figure


def draw_stack(ax: Axes, shares: np.ndarray, names: list[str]) -> Axes:
    """Draw shares as stacked bars in per cent.

    Args:
        ax: Axes to draw on.
        shares: Shares [bar, pattern] from 0 to 1.
        names: Patterns, from the lowest to the highest.

    Returns:
        `ax`.
    """
    bottom = np.zeros(len(shares))
    for code, name in enumerate(names):
        height = np.nan_to_num(100 * shares[:, code])
        ax.bar(
            np.arange(len(shares)), height, 0.86, bottom, color=PATTERN_COLOURS[name], label=name
        )
        bottom += height
    for bar in np.flatnonzero(~np.isfinite(shares).all(axis=1)).tolist():
        say(ax, "no positions", bar)
    ax.set(xlim=(-0.6, len(shares) - 0.4), ylim=(0, 100))
    return ax


def draw_mosaic(ax: Axes, shares: np.ndarray, names: list[str]) -> Axes:
    """Draw shares as cells of heads, cut from left to right.

    Args:
        ax: Axes to draw on.
        shares: Shares [layer, head, pattern]; a cell with NaN stays empty.
        names: Patterns, from left to right.

    Returns:
        `ax`.
    """
    layers, heads, _ = shares.shape
    edges = np.concatenate(
        (np.zeros((layers, heads, 1)), np.cumsum(np.nan_to_num(shares), axis=-1)), axis=-1
    )
    width, height = 0.94, 0.84
    for code, name in enumerate(names):
        layer, head = np.nonzero(shares[..., code] > 0)
        left, right = (
            head - width / 2 + width * edges[layer, head, code + side] for side in (0, 1)
        )
        top, bottom = layer - height / 2, layer + height / 2
        corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(
            -1, 4, 2
        )
        ax.add_collection(
            PolyCollection(
                list(corners), facecolors=PATTERN_COLOURS[name], linewidths=0, gid=f"pattern {name}"
            )
        )
    ax.set(xlim=(-0.5, heads - 0.5), ylim=(layers - 0.5, -0.5))
    bare(ax)
    return ax


def _write_shares(ax: Axes, shares: np.ndarray) -> None:
    """Per cent inside each part of the only bar, or to its right where the part is too low."""
    bottom = 0.0
    ax.set_xlim(-0.55, 0.95)
    for share in 100 * shares[np.isfinite(shares)]:
        inside = share >= 7
        place = (0.0, "center") if inside else (0.47, "left")
        middle = max(bottom + share / 2, 2.5)  # above the axis, where the share is 0
        ax.text(place[0], middle, f"{share:.0f} %", ha=place[1], va="center", fontsize=6.5)
        bottom += share
