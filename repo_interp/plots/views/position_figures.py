"""Figures of positions over a prompt: one head with tokens and spans (RePo fig. 8), and all heads.

    z_i against i        z_i: the position a head gives to token i of the prompt, in positions; i: its index

Layers without positions (NoPE) are shown as such, never as zeros. Long prompts are drawn by the
extremes within a pixel, so every point on paper is a token. This module knows nothing about how
positions were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    FEWEST,
    PromptTokens,
    contiguous,
    envelope,
    fences,
    global_range,
    label_tokens,
    layer_colour,
    layer_scheme,
    legend_below,
    lone_entry,
    name_ticks,
    note,
    number,
    panels,
    part_ribbon,
    pick,
    prompt_tokens,
    say,
    scheme_handles,
    scheme_swatches,
    schemes,
    shade_spans,
    span_handles,
    token_label,
    unit_label,
)
from repo_interp.plots.style import (
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PaperFigure,
    darker,
    paper_figure,
    scheme_colour,
    span_colours,
    style,
)
from repo_interp.plots.views.ranges import (
    positions_group,
)

LINES = 3
"""Most heads with a figure of positions, or drawn run below run."""
LABELS = 100
"""Token labels that fit under a figure of page width."""
PIXELS = 1800
"""Columns of a figure of page width in print."""
MOST_DOTS = 400
"""Tokens above which a line has no dots."""
NAMED_OUTLIERS = 5
"""Outliers that are named at their point."""


@style()
def position_lines(
    run: xr.DataTree, layer: int, head: int | Sequence[int], prompt: int = 0
) -> PaperFigure:
    """Draw the positions of one or more heads over one prompt (RePo fig. 8).

    Spans are shaded, tokens are labeled, and the farthest outliers are named.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer; several have a panel each, one below the other, and
            those with the same positions one together.
        prompt: Label of the prompt.

    Returns:
        The figure.

    Raises:
        InputError: The run has no positions, or lacks this layer, head or prompt; or no head is
            named.
    """
    positions = positions_group(run)
    several = isinstance(head, Sequence | np.ndarray) and not isinstance(head, str)
    heads: list[Any] = list(cast(Any, head)) if several else [head]
    if not heads:
        raise InputError("no head is named; give one or more, such as 0 or [0, 1]")
    shared: dict[Any, xr.DataArray] = {}
    for one in heads:
        row = pick(positions["position"], prompt=prompt, layer=layer, head=one)
        shared.setdefault(row.values.tobytes() if row.notnull().any() else one, row)
    rows = list(shared.values())
    tokens = prompt_tokens(positions, prompt)
    names = span_names(positions)
    figure, axes = panels(len(rows), 1, 2.2, 0.5, PAGE_WIDTH)
    parts: list[str] = []
    for ax, values in zip(axes, rows, strict=True):
        parts = _draw_head(ax, positions, values, tokens, names)
        if several:
            ax.label_outer()
    legend_below(figure, span_handles([*tokens.top_spans, *parts], names))
    return figure


def _draw_head(
    ax: Axes, positions: xr.Dataset, row: xr.DataArray, tokens: PromptTokens, names: list[str]
) -> list[str]:
    """Draw the positions of one head; return the parts of spans with a ribbon."""
    layer, values = int(row["layer"]), row.values[: tokens.count]
    draw_positions(ax, values, layer_colour(positions, layer))
    shade_spans(ax, tokens.top_spans, names)
    parts = part_ribbon(ax, tokens.spans, names)
    inks = {name: darker(colour, 0.62) for name, colour in span_colours(names).items()}
    owned = {token: inks[name] for name, members in tokens.top_spans.items() for token in members}
    worth = _by_worth(values, tokens)
    label_tokens(ax, tokens, worth, LABELS, lambda token: owned.get(token, "#333333"))
    _name_outliers(ax, values, tokens)
    ax.set_ylabel(unit_label("position z", positions["position"]))
    of_layer = positions["position"].sel(prompt=tokens.prompt, layer=layer)
    # NaN equals nothing, so a layer without positions counts no head alike, not even this one.
    same = (of_layer == row).isel(token=slice(tokens.count)).all("token")
    heads = (
        f"head {int(row['head'])}"
        if int(same.sum()) < 2
        else f"heads {', '.join(map(str, same['head'].values[same.values]))} alike"
    )
    title = (
        f"Layer {layer}, {heads} ({layer_scheme(positions, layer)}), prompt {tokens.prompt}, "
        f"{tokens.count:,} tokens"
    )
    handles = span_handles([*tokens.top_spans, *parts], names)
    ax.set_title("; ".join(filter(None, (title, lone_entry(handles, "shaded")))))
    return parts


def draw_positions(ax: Axes, values: np.ndarray, colour: str) -> Axes:
    """Draw positions as a line with one dot per token.

    Args:
        ax: Axes to draw on.
        values: Positions [token]; if all are NaN, a note is written.
        colour: Color of the line.

    Returns:
        `ax`.
    """
    room = max(0.5, 0.008 * len(values))
    ax.set_xlim(-room, len(values) - 1 + room)
    limits = global_range(values)
    if limits is None:
        ax.set_yticks([])
        say(ax, "no positions in this layer", colour="#5A5A5A")
        return ax
    shown = envelope(values, PIXELS)
    marker = "o" if len(shown) <= MOST_DOTS else ""
    ax.plot(
        shown,
        values[shown],
        color=colour,
        linewidth=0.6,
        marker=marker,
        markersize=1.8,
        gid="positions",
    )
    ax.set_ylim(*limits)
    ax.grid(axis="y")
    return ax


def _by_worth(values: np.ndarray, tokens: PromptTokens) -> Iterator[int]:
    """Token indices in the order in which their labels are worth their room."""
    for members in tokens.top_spans.values():
        for first, last in contiguous(members):
            yield from (first, last)
    finite = np.isfinite(values)
    if finite.any():
        # From the median: outliers, which deserve a name most, would move a mean.
        distance = np.where(finite, abs(values - np.median(values[finite])), -1)
        yield from np.argsort(-distance, kind="stable")[:8].tolist()
    for members in tokens.top_spans.values():
        yield from members
    step = max(1, tokens.count // LABELS)
    yield from range(0, tokens.count, step)


def _name_outliers(ax: Axes, values: np.ndarray, tokens: PromptTokens) -> None:
    """Write the text of the farthest tokens outside the fences at their points.

    Texts that would collide are left out.
    """
    finite = values[np.isfinite(values)]
    if tokens.texts is None or finite.size < FEWEST:
        return
    low, high = fences(finite)
    distance = np.where(np.isfinite(values), np.maximum(values - high, low - values), -1)
    named: list[int] = []
    # Neighbors of an outlier are often outliers too, so more are tried than are named.
    for token in np.argsort(-distance, kind="stable")[: 8 * NAMED_OUTLIERS].tolist():
        crowded = any(
            abs(token - other) < 0.07 * tokens.count
            and abs(values[token] - values[other]) < 0.07 * np.ptp(finite)
            for other in named
        )
        if distance[token] > 0 and not crowded:
            named.append(token)
    for token in named[:NAMED_OUTLIERS]:
        right = token > 0.85 * tokens.count
        look = {"ha": "right" if right else "left", "color": "#333333"}
        note(
            ax,
            token_label(tokens.text(token)),
            (token, values[token]),
            (-3 if right else 3, 0),
            5.2,
            **look,
        )


@style()
def position_grid(run: xr.DataTree, prompt: int = 0) -> PaperFigure:
    """Draw the positions of every head over one prompt.

    Rows are layers and columns are heads; every cell has its scale, and spans are shaded. The
    number in a cell is its range, max - min, in positions.

    Args:
        run: Tree of a run, a group per measure.
        prompt: Label of the prompt.

    Returns:
        The figure.

    Raises:
        InputError: The run has no positions, or lacks this prompt.
    """
    positions = positions_group(run)
    values = pick(positions["position"], prompt=prompt).transpose("layer", "head", "token")
    tokens = prompt_tokens(positions, prompt)
    layers, named = values.sizes["layer"], schemes(positions)
    # Many layers get flatter cells rather than a figure taller than a page.
    cell = min(0.62, (PAGE_HEIGHT - 0.8) / layers)
    figure = paper_figure(PAGE_WIDTH, max(1.6, cell * layers + 0.8))
    ax = figure.subplots()
    _shade_columns(ax, tokens, layers, values.sizes["head"], span_names(positions))
    draw_grid(
        ax, values.values[..., : tokens.count], [scheme_colour(scheme) for scheme in named.values()]
    )
    for axis, dim in ((ax.yaxis, "layer"), (ax.xaxis, "head")):
        name_ticks(axis, values[dim].values, values.sizes[dim])
        axis.set_label_text(dim)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.tick_params(axis="x", length=0)
    scheme_swatches(ax, named, "y")
    handles: list[Any] = [
        *scheme_handles(named.values()),
        *span_handles(tokens.top_spans, span_names(positions)),
    ]
    title = f"Positions over prompt {prompt}, {tokens.count:,} tokens; number: range in positions"
    ax.set_title("; ".join(filter(None, (title, lone_entry(handles, "shaded")))))
    legend_below(figure, handles)
    return figure


def draw_grid(ax: Axes, values: np.ndarray, colours: list[str]) -> Axes:
    """Draw positions as a grid of small lines, scaled to their cells.

    Cell (layer, head) is centered at x = head, y = layer; y points downwards. A constant head is a
    flat line, and a head with only NaN is a dash.

    Args:
        ax: Axes to draw on.
        values: Positions [layer, head, token].
        colours: Color of every layer.

    Returns:
        `ax`.
    """
    layers, heads, count = values.shape
    # The columns of print that one cell has, but at least 40.
    bins = max(40, PIXELS // heads)
    middle: Any = {
        "ha": "center",
        "va": "center",
        "fontsize": 4.5 if heads <= 8 else 2.5,
        "color": "#8A8A8A",
    }
    for layer, of_layer in enumerate(values):
        lines = []
        for head, cell in enumerate(of_layer):
            limits = global_range(cell)
            if limits is None:
                ax.text(head, layer, "no positions", **middle)
                continue
            shown = envelope(cell, bins)
            # A margin of .03 on either side keeps the lines of neighbors apart.
            x = head - 0.47 + 0.94 * (shown + 0.5) / count
            lines.append(
                # Downwards axis, so large positions have small y; the top quarter is left to the
                # range's number.
                np.column_stack(
                    (x, layer + 0.47 - 0.74 * (cell[shown] - limits[0]) / (limits[1] - limits[0]))
                )
            )
            if heads <= 16:
                spread = np.nanmax(cell) - np.nanmin(cell)
                ax.text(
                    head - 0.46,
                    layer - 0.45,
                    number(spread),
                    fontsize=4.2,
                    va="top",
                    color="#333333",
                    zorder=4,
                )
        look = {
            "colors": colours[layer],
            "linewidths": 0.45 if heads <= 8 else 0.3,
            "gid": f"positions {layer}",
        }
        ax.add_collection(LineCollection(lines, **look))
    # Drawn above the lines, to cover the width of lines that extends into the next cell.
    for edge in range(heads + 1):
        ax.axvline(edge - 0.5, color="white", linewidth=1.2, zorder=5)
    for edge in range(layers + 1):
        ax.axhline(edge - 0.5, color="#DDDDDD", linewidth=0.4, zorder=1)
    ax.set(xlim=(-0.5, heads - 0.5), ylim=(layers - 0.5, -0.5))
    ax.spines[:].set_visible(False)
    return ax


def _shade_columns(
    ax: Axes, tokens: PromptTokens, layers: int, heads: int, names: list[str]
) -> None:
    colours = span_colours(names)
    for name, members in tokens.top_spans.items():
        strips = []
        for first, last in contiguous(members):
            for head in range(heads):
                left, right = (
                    head - 0.47 + 0.94 * edge / tokens.count for edge in (first, last + 1)
                )
                strips.append(
                    [(left, -0.5), (left, layers - 0.5), (right, layers - 0.5), (right, -0.5)]
                )
        ax.add_collection(
            PolyCollection(
                strips,
                facecolors=colours[name],
                alpha=0.3,
                linewidths=0,
                zorder=0,
                gid=f"span {name}",
            )
        )


def span_names(positions: xr.Dataset) -> list[str]:
    """List the spans of prompts.

    Args:
        positions: Group `positions` of a run.

    Returns:
        Their names; none where prompts have no spans.
    """
    return [str(name) for name in positions["span"].values] if "span" in positions.coords else []
