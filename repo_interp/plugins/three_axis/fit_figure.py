"""Figure of a head's three-axis fit: its logit map, the three axes, their sum.

Position Generalization fig. 2.

    W_ij ~ a_{i-j} + b_i + c_j        logit map, its three axes, their sum

Maps are the block means of the group `maps`. The sum of the axes is averaged over the same blocks
exactly: with A the running sum of a's running sum, the sum of a over a block is A(below) - A(above)
at its corners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    colour_bar,
    counted,
    envelope,
    group,
    layer_colour,
    layer_scheme,
    pick,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

PIXELS = 600
"""Least number of drawn points of an axis."""
SHOWN = (1, 99)
"""Percentiles of a map at the ends of its color scale."""


@style()
def three_axis_fit(run: xr.DataTree, layer: int, head: int) -> PaperFigure:
    """Draw a head's logit map, its three axes and their sum (fig. 2).

    The axes are distance, query and key. The figure shows the first prompt.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.

    Returns:
        The figure.

    Raises:
        InputError: The run has no `maps`, or no axes: `three_axis` keeps them with
            axes="first_prompt".
    """
    maps, fit = group(run, "maps"), group(run, "three_axis")
    if "distance_axis" not in fit:
        raise InputError(
            'this run has no axes; analyze again with the parameter axes="first_prompt" of '
            "three_axis"
        )
    shown = pick(maps["logit_map"], layer=layer, head=head).transpose("query_block", "key_block")
    axes = {
        name: pick(fit[f"{name}_axis"], layer=layer, head=head).values
        for name in ("distance", "query", "key")
    }
    starts, tokens = shown["key_block"].values, axes["query"].size
    rebuilt = additive_means(axes["distance"], axes["query"], axes["key"], edges_of(starts, tokens))
    figure = paper_figure(PAGE_WIDTH, 2.3)
    # Subfigures, since the three parts have different rows.
    left, middle, right = cast(Any, figure.subfigures(1, 3, width_ratios=(1.0, 0.9, 1.17)))
    limits = map_limits(shown.values)
    draw_map(left.subplots(), shown.values, tokens, limits, "Logits", "query (token)")
    title = f"Sum of the axes, r = {r_of(fit, layer, head)}"
    image = draw_map(right.subplots(), rebuilt, tokens, limits, title, "query (token)")
    colour_bar(right, image, right.axes, "logits", pad=0.02, fraction=0.05)
    colour = layer_colour(fit, layer)
    for ax, (name, values) in zip(middle.subplots(3, 1), axes.items(), strict=True):
        draw_axis(ax, values, colour, name)
        ax.set_title(f"{name} axis", pad=2)
    figure.suptitle(figure_title(fit, layer, head, tokens, maps), x=0.01, ha="left")
    return figure


def additive_means(
    distance: np.ndarray, query: np.ndarray, key: np.ndarray, edges: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Average a_{i-j} + b_i + c_j over the causal pairs of every block.

    The cost is tokens x blocks, never tokens x tokens.

    Args:
        distance: a [token], by distance.
        query: b [token].
        key: c [token].
        edges: Starts of the blocks, and the end of the last one.

    Returns:
        Means [query_block, key_block]; NaN for blocks without causal pairs.
    """
    edges = np.asarray(edges)
    tokens, starts = edges[-1], edges[:-1]
    # Keys of a block that a query sees, and queries of a block that see a key.
    # [query, key_block] and [query_block, key]: the causal cut needs no token x token mask.
    seen = np.clip(np.arange(tokens)[:, None] + 1 - starts, 0, np.diff(edges))
    seeing = np.clip(edges[1:][:, None] - np.arange(tokens), 0, np.diff(edges)[:, None])
    pairs = np.add.reduceat(seen, starts, axis=0)
    of_query = np.add.reduceat(query[:, None] * seen, starts, axis=0)
    of_key = np.add.reduceat(key * seeing, starts, axis=1)
    # The sum of a_{i-j} over a rectangle is four corners of a's double cumulative sum.
    twice = np.concatenate(([0.0, 0.0], np.cumsum(np.cumsum(distance[:tokens]))))

    # [row, column]; below distance 0 the sum is 0, so pairs with later keys add nothing.
    def corner(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return twice[np.clip(rows[:, None] - columns + 1, 0, tokens + 1)]

    of_distance = (
        corner(edges[1:], starts)
        - corner(starts, starts)
        - corner(edges[1:], edges[1:])
        + corner(starts, edges[1:])
    )
    # Blocks without causal pairs divide by 1 and are then replaced by NaN.
    with np.errstate(invalid="ignore"):
        return np.where(pairs > 0, (of_query + of_key + of_distance) / np.maximum(pairs, 1), np.nan)


def edges_of(starts: np.ndarray, tokens: int) -> np.ndarray:
    """Append the end of the last block to the starts of blocks.

    Args:
        starts: First token of every block.
        tokens: Number of tokens.

    Returns:
        Starts of the blocks, then the end of the last one.
    """
    return np.append(starts, tokens).astype(np.int64)


def draw_map(
    ax: Axes,
    values: np.ndarray,
    tokens: int,
    limits: tuple[float, float],
    title: str,
    down: str,
):
    """Draw block means as an image.

    Args:
        ax: Axes to draw on.
        values: Block means [row, column].
        tokens: Number of tokens.
        limits: Ends of the colors.
        title: Title of the axes.
        down: Label of the y axis.
    """
    look: Any = {
        "cmap": "viridis",
        "interpolation": "nearest",
        "aspect": "auto",
        "gid": f"map {title.split(',')[0]}".strip(),
    }
    image = ax.imshow(values, vmin=limits[0], vmax=limits[1], extent=(0, tokens, tokens, 0), **look)
    ax.set(xlabel="key (token)", ylabel=down)
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    return image


def draw_axis(ax: Axes, values: np.ndarray, colour: str, name: str) -> None:
    """Draw an axis of a fit as a line; a long one by its extremes.

    Args:
        ax: Axes to draw on.
        values: Values [token].
        colour: Color of the line.
        name: Name of the axis.
    """
    shown = envelope(values, PIXELS)
    ax.plot(shown, values[shown], color=colour, linewidth=0.7, gid=f"axis {name}")
    ax.set(xlim=(0, max(1, values.size - 1)))
    ax.grid(axis="y")


def map_limits(values: np.ndarray) -> tuple[float, float]:
    """Compute the percentiles `SHOWN` of some values.

    Args:
        values: Numbers of any shape; NaN are ignored.

    Returns:
        Lower and upper limit; 1 apart if they are equal.
    """
    # A few extreme logits, often of the first token, would give all others one color.
    low, high = np.nanpercentile(values, SHOWN)
    return float(low), float(high) if high > low else float(low) + 1.0


def r_of(fit: xr.Dataset, layer: int, head: int) -> str:
    """Write r of the fit of a head for the first prompt.

    Args:
        fit: Group of the fit.
        layer: Label of the layer.
        head: Label of the head in its layer.

    Returns:
        The text.
    """
    value = float(pick(fit["r"], layer=layer, head=head).values[0])
    return f"{value:.3f}" if np.isfinite(value) else "–"


def figure_title(fit: xr.Dataset, layer: int, head: int, tokens: int, maps: xr.Dataset) -> str:
    """Describe the head and the prompt of a figure, and its pixels.

    Args:
        fit: Group of the fit.
        layer: Label of the layer.
        head: Label of the head in its layer.
        tokens: Number of tokens.
        maps: Group `maps` of the run.

    Returns:
        The text.
    """
    size = int(maps["block_size"])
    pixel = "" if size == 1 else f"; a pixel is the mean over {size} x {size} pairs"
    return (
        f"Layer {layer} ({layer_scheme(fit, layer)}), head {head}, first prompt, "
        f"{counted(tokens, 'token')}{pixel}"
    )
