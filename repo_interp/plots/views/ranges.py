"""Ranges of positions, d = max z - min z of every head, with the context length.

RePo sec. 5.2, fig. 2. It also decides which heads to show.

    d^{k,h} in positions, layer k, head h; a prompt of n tokens spans n - 1 under RoPE

Draws `position_range` and `token_count` of the group `positions`. Knows nothing about how ranges
are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    LEARNED_SCHEMES,
    Cell,
    Table,
    cells,
    counted,
    draw_by_head,
    group,
    learned_layers,
    legend_below,
    nanmean,
    over_prompts,
    plain_decades,
    ranked_heads,
    say,
    scheme_handles,
    schemes,
)
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    scheme_name,
    style,
)
from repo_interp.plots.views.attention_mass import main_span

LOG_ABOVE = 50.0
"""Ratio of the largest to the smallest range from which the axis is logarithmic."""
BINS = 24
_BARS: Mapping[str, Any] = {"orientation": "horizontal", "edgecolor": "white", "linewidth": 0.4}
_MEDIAN_LINE: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.9}
_CONTEXT_LINE: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.8, "linestyle": (0, (4, 2))}

ALIKE = 0.98
"""Correlation of two heads' positions over a prompt from which they show the same."""


def has_positions(run: xr.DataTree) -> bool:
    """Tell whether any layer of a run gives positions to tokens.

    Layers with CoPE and NoPE do not.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        True if some layer does; the run must have the group `positions`.
    """
    return bool(group(run, "positions")["position_range"].notnull().any())


def positions_of(run: xr.DataTree) -> xr.Dataset:
    """Return the group `positions` of a run.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The group.

    Raises:
        InputError: The run lacks the group, or no layer has positions.
    """
    positions = group(run, "positions")
    if not has_positions(run):
        named = ", ".join(dict.fromkeys(schemes(positions).values()))
        raise InputError(
            f"no layer of this run gives tokens positions ({named}), so there are none to "
            "draw; leave this figure out"
        )
    return positions


def heads_to_show(run: xr.DataTree) -> list[tuple[int, int]]:
    """Sort heads with positions by how much they show.

    score = range / largest range + max(0, mass - chance) / largest such mass, with the mass on the
    needle; means over prompts. If any layer learns positions, only heads of such layers are listed.
    Of heads of a layer that share their positions only the one with the best score is listed; a
    head whose curve over the first prompt is nearly that of an earlier one (|r| >= `ALIKE`) comes
    later.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Labels (layer, head), the best first.

    Raises:
        InputError: The run has no positions.
    """
    positions = group(run, "positions")
    ranges = over_prompts(positions["position_range"])
    scores = ranges / max(float(ranges.max()), np.finfo(float).tiny)
    if main_span(run) == "needle":
        attention = group(run, "attention_mass").sel(span="needle", drop=True)
        chance = over_prompts(attention["chance"]) if "chance" in attention else 0.0
        excess = (
            (over_prompts(attention["mass"]) - chance)
            .clip(min=0)
            .reindex(layer=ranges["layer"], head=ranges["head"])
        )
        scores = scores + (excess / max(float(excess.max()), np.finfo(float).tiny)).fillna(0)
    layers = learned_layers(positions) or ranges["layer"].values
    order = ranked_heads(scores.where(np.isfinite(ranges)).sel(layer=layers))
    curves = {head: _curve(positions, *head) for head in order}
    first: list[tuple[int, int]] = []
    alike: list[tuple[int, int]] = []
    for head in order:
        if any(
            head[0] == other[0] and np.array_equal(curves[head], curves[other])
            for other in (*first, *alike)
        ):
            continue
        near = any(abs(float(curves[head] @ curves[other])) >= ALIKE for other in first)
        (alike if near else first).append(head)
    return [*first, *alike]


def _curve(positions: xr.Dataset, layer: int, head: int) -> np.ndarray:
    """Positions of the first prompt without their mean, of length 1; 0 where they do not vary."""
    values = positions["position"].isel(prompt=0).sel(layer=layer, head=head).values.astype(float)
    values = values[np.isfinite(values)]
    centred = values - values.mean() if values.size else values
    length = float(np.linalg.norm(centred))
    return (
        centred / length
        if length > 1e-9 * (1 + np.abs(values).max(initial=0.0))
        else np.zeros_like(centred)
    )


@style()
def position_ranges(run: xr.DataTree) -> PaperFigure:
    """Draw the ranges of positions by head, and their distribution (RePo fig. 2).

    Left: a dot is the mean of a head over prompts, heads from left to right within their layer; a
    thin line goes from the smallest to the largest prompt; a bar is the median of the layer. Right:
    the number of learned heads by range. The band is the context length.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no positions.
    """
    positions = positions_of(run)
    ranges = positions["position_range"].transpose("layer", "head", "prompt")
    lengths = positions["token_count"].values
    named = schemes(positions)
    prompts = ranges.sizes["prompt"]
    figure = paper_figure(PAGE_WIDTH, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=(3.4, 1), sharey=True)
    means, places = ranges.mean("prompt"), np.arange(len(named))
    draw_by_head(
        left, means, ends=(ranges.min("prompt"), ranges.max("prompt")), nothing="no positions"
    )
    left.hlines(means.median("head"), places - 0.42, places + 0.42, **_MEDIAN_LINE, zorder=3)
    left.set_ylabel("range of positions, max − min")
    _scale(left, ranges.values, lengths)
    learned = [place for place, scheme in enumerate(named.values()) if scheme in LEARNED_SCHEMES]
    _distribution(right, ranges.values[learned], [list(named.values())[place] for place in learned])
    for ax in (left, right):
        if lengths.max() > lengths.min():
            ax.axhspan(
                lengths.min(), lengths.max(), color="#222222", alpha=0.15, linewidth=0, zorder=0
            )
        ax.axhline(lengths.mean(), **_CONTEXT_LINE, gid="context length")
    heads = ranges.sizes["layer"] * ranges.sizes["head"]
    spread = (
        ""
        if prompts == 1
        else f", mean over {counted(prompts, 'prompt')}; line: smallest to largest prompt"
    )
    left.set_title(f"{counted(heads, 'head')}{spread}")
    right.set_title(counted(len(learned) * ranges.sizes["head"], "learned head"))
    median = Line2D([], [], **_MEDIAN_LINE, label="median of a layer's heads")
    context = Line2D([], [], **_CONTEXT_LINE, label=f"context length: {_span_of(lengths)} tokens")
    legend_below(figure, [*scheme_handles(named.values(), "o"), median, context])
    return figure


def range_table(run: xr.DataTree) -> Table:
    """Tabulate the ranges of positions by layer (RePo fig. 2).

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per layer: smallest, median and largest range over heads and prompts, and the median
        as a share of the context.

    Raises:
        InputError: The run has no positions.
    """
    positions = group(run, "positions")
    ranges = positions["position_range"].transpose("layer", "head", "prompt").values
    lengths = positions["token_count"].values
    rows: list[tuple[Cell, ...]] = []
    for (layer, scheme), values in zip(schemes(positions).items(), ranges, strict=True):
        finite, shares = (each[np.isfinite(values)] for each in (values, 100 * values / lengths))
        numbers = (
            (finite.min(), np.median(finite), finite.max(), np.median(shares))
            if finite.size
            else [np.nan] * 4
        )
        rows.append((f"layer {layer}", scheme_name(scheme), *cells(numbers)))
    columns = ("layer", "scheme", "smallest", "median", "largest", "median / context (%)")
    note = (
        f"In positions, over {ranges.shape[1]} heads per layer and {ranges.shape[2]} "
        f"prompts of {_span_of(lengths)} tokens."
    )
    return Table("positions", "Ranges of positions, max − min", columns, tuple(rows), note)


def _scale(ax: Axes, ranges: np.ndarray, lengths: np.ndarray) -> None:
    finite = ranges[np.isfinite(ranges)]
    positive = finite[finite > 0]
    top = max(float(lengths.max()), float(finite.max(initial=0.0)))
    if not positive.size or top / positive.min() <= LOG_ABOVE:
        ax.set_ylim(0, top * 1.12)
        return
    bottom, has_zeros = float(positive.min()), positive.size < finite.size
    ax.set_yscale("symlog" if has_zeros else "log", **({"linthresh": bottom} if has_zeros else {}))
    ax.set_ylim(-0.2 * bottom if has_zeros else bottom / 1.6, top * 1.8)
    plain_decades(ax.yaxis)


def _distribution(ax: Axes, ranges: np.ndarray, names: list[str]) -> None:
    """Draw a histogram, stacked by scheme, of the mean range over prompts.

    Bins are even on the scale of the axis.
    """
    ax.set_xlabel("heads")
    ax.grid(axis="x")
    if not np.isfinite(ranges).any():
        say(ax, "no learned\npositions")
        return
    bins = int(np.clip(3 * np.sqrt(ranges.shape[0] * ranges.shape[1]), 6, BINS))
    transform = ax.yaxis.get_transform()
    low, high = transform.transform(np.array(ax.get_ylim()))
    edges = transform.inverted().transform(np.linspace(low, high, bins + 1)).tolist()
    kinds, means = list(dict.fromkeys(names)), nanmean(ranges, axis=-1)
    stacked = [
        of[np.isfinite(of)] for of in (means[[name == kind for name in names]] for kind in kinds)
    ]
    ax.hist(
        stacked, bins=edges, stacked=True, color=[scheme_colour(kind) for kind in kinds], **_BARS
    )
    ax.locator_params(axis="x", integer=True, nbins=4)


def _span_of(lengths: np.ndarray) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return f"{low:,}" if high == low else f"{low:,} to {high:,}"
