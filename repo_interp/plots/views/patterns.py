"""How positions run inside chunks: shares of constant, mono and hybrid chunks.

RePo sec. 5.2, fig. 3.

    share of pattern p = chunks labelled p / chunks                constant + mono + hybrid = 1
    trend              = rank correlation of positions and the token index: 1 counts tokens, -1 counts them backwards

Draws the group `patterns` of a run. Knows nothing about how a chunk is labelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Cell,
    Chart,
    CustomFigure,
    Finding,
    Grid,
    Heads,
    Table,
    bare,
    cells,
    colour_map,
    group,
    heads_named,
    heads_where,
    layer_scheme,
    learned_layers,
    legend_below,
    name_ticks,
    nanmean,
    over,
    over_prompts,
    percent,
    say,
    scheme_handles,
    scheme_swatches,
    schemes,
)
from repo_interp.plots.style import (
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PATTERN_COLOURS,
    PaperFigure,
    darker,
    paper_figure,
    style,
)
from repo_interp.plots.view import View


@style()
def pattern_shares(run: xr.DataTree) -> PaperFigure:
    """Draw stacked shares of the patterns (RePo fig. 3).

    The panels show all layers that learn positions, single layers, and single heads.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no patterns, or no chunk: no layer has positions, or prompts are
            shorter than a chunk.
    """
    patterns = group(run, "patterns")
    if not _has_chunks(run):
        raise InputError(
            "this run has no chunk of positions: no layer has any, or prompts are shorter; "
            "leave this figure out"
        )
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
    figure.suptitle(_caption(patterns), x=0.01, ha="left")
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


@style()
def pattern_sensitivity(run: xr.DataTree) -> PaperFigure:
    """Draw shares over a grid of chunk size and epsilon (RePo sec. 5.2, footnote 5).

    The choice of the run has a frame. A pattern that stays below half a per cent everywhere is
    named and not drawn.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no patterns, or no chunk: no layer learns positions, or prompts are
            shorter than all chunk sizes.
    """
    return sensitivity_grid(run).figure()


def sensitivity_grid(run: xr.DataTree) -> Grid:
    """Make the chart of `pattern_sensitivity`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.

    Raises:
        InputError: The run has no patterns, or no chunk of learned positions at any chunk size.
    """
    patterns = group(run, "patterns")
    grid = 100 * patterns["sensitivity"].transpose("pattern", "chunk_size", "epsilon")
    if not bool(grid.notnull().any()):
        raise InputError(
            "this run has no chunk of learned positions at any chunk size; give longer "
            "prompts, or leave this figure out"
        )
    sizes, epsilons = grid["chunk_size"].values, grid["epsilon"].values
    size, epsilon = (patterns.attrs.get(name, np.nan) for name in ("chunk_size", "epsilon"))
    rows, columns = np.nonzero((sizes == size)[:, None] & np.isclose(epsilons, epsilon))
    grid = grid.assign_coords(
        epsilon=("epsilon", epsilons, {"long_name": "ε (positions)"}),
        chunk_size=("chunk_size", sizes, {"long_name": "chunk size (tokens)"}),
    )
    panels, looks, absent = {}, {}, []
    for name in map(str, grid["pattern"].values):
        title, colour = f"{name} (% of chunks)", PATTERN_COLOURS[name]
        if bool((grid.sel(pattern=name) >= 0.5).any()):
            panels[title] = grid.sel(pattern=name)
            looks[title] = {
                "cmap": colour_map("share", colour, darker(colour, 0.75)),
                "vmin": 0,
                "vmax": 100,
            }
        else:
            absent.append(name)
    few = (
        f"Below half a per cent of chunks are {' or '.join(absent)}, at all sizes and ε"
        if absent
        else ""
    )
    return Grid(
        "pattern_sensitivity",
        panels,
        few,
        ".0f",
        looks=looks,
        chosen=next(zip(rows.tolist(), columns.tolist(), strict=True), None),
    )


def pattern_table(run: xr.DataTree) -> Table:
    """Tabulate the shares of the patterns in per cent (RePo fig. 3).

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        A row for all layers that learn positions, then one row per layer.

    Raises:
        InputError: The run has no patterns.
    """
    patterns = group(run, "patterns")
    shares = 100 * patterns["pattern_share"].transpose("layer", "head", "pattern").values
    names = [str(name) for name in patterns["pattern"].values]
    rows: list[tuple[Cell, ...]] = [
        ("learned layers", "", *cells(100 * patterns["pattern_share_all"].values))
    ]
    for layer, share in zip(patterns["layer"].values.tolist(), shares, strict=True):
        rows.append(
            (f"layer {layer}", layer_scheme(patterns, layer), *cells(nanmean(share, axis=0)))
        )
    parameters = [
        f"{key.replace('_', ' ')} {patterns.attrs[key]}"
        for key in ("chunk_size", "epsilon")
        if key in patterns.attrs
    ]
    chunks = (
        f"{_chunks(patterns):,} chunks in learned layers. " if "chunk_pattern" in patterns else ""
    )
    columns, note = (
        ("layers", "scheme", *(f"{name} (%)" for name in names)),
        f"{chunks}{', '.join(parameters).capitalize()}.",
    )
    return Table(
        "patterns",
        "Patterns of positions inside chunks",
        columns,
        tuple(rows),
        note.replace(" .", ""),
    )


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


def _caption(patterns: xr.Dataset) -> str:
    parts = []
    if "chunk_size" in patterns.attrs:
        parts.append(f"chunks of {patterns.attrs['chunk_size']} tokens")
    if "epsilon" in patterns.attrs:
        parts.append(f"ε = {patterns.attrs['epsilon']:g} positions")
    if "chunk_pattern" in patterns:
        parts.append(f"n = {_chunks(patterns):,} chunks in learned layers")
    return ", ".join(parts)


def _chunks(patterns: xr.Dataset) -> int:
    """How many chunks of layers that learn positions are labelled."""
    return int((patterns["chunk_pattern"].sel(layer=learned_layers(patterns)) >= 0).sum())


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    patterns = group(run, "patterns")
    if _has_chunks(run):
        yield CustomFigure("pattern_shares", partial(pattern_shares, run))
        if bool(patterns["sensitivity"].notnull().any()):
            yield sensitivity_grid(run)
        shares = patterns["pattern_share"]
        for name in shares["pattern"].values:
            share = shares.sel(pattern=name, drop=True).assign_attrs(
                long_name=f"share of {name} chunks", units="1"
            )
            yield Heads(share, learned=True)
    if "trend" in patterns:
        yield Heads(over_prompts(patterns["trend"]), learned=True)


def _has_chunks(run: xr.DataTree) -> bool:
    """Whether any head has a chunk whose pattern is known."""
    return bool(group(run, "patterns")["pattern_share"].notnull().any())


def _not_all_monotonic(run: xr.DataTree) -> bool:
    """Tell whether any head has a chunk that is not strictly monotonic.

    All chunks of the token index are.
    """
    shares = group(run, "patterns")["pattern_share"]
    return bool(
        (
            shares.sel(pattern=[name for name in shares["pattern"].values if name != "mono"]) > 0
        ).any()
    )


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Heads with learned positions that count tokens, forwards and backwards."""
    patterns = group(run, "patterns")
    if "trend" not in patterns:
        return
    trend, slope = (
        over_prompts(patterns[name].sel(layer=learned_layers(patterns)))
        for name in ("trend", "trend_slope")
    )
    counts = patterns["counts_tokens"].sel(layer=trend["layer"]) == 1
    for direction, sign, found in (
        ("rise with the token index", "", counts & (trend > 0)),
        ("fall as the token index rises", "-", counts & (trend < 0)),
    ):
        if heads := heads_where(found):
            step_size, null = (
                f"{float(value):.3g}"
                for value in (np.abs(slope.where(found)).mean(), patterns["trend_null"].max())
            )
            named = heads_named(heads, per_layer=patterns.sizes["head"])
            sizes = abs(trend.where(found))
            ends = " to ".join(
                dict.fromkeys(
                    f"{sign}{math.floor(100 * end) / 100}"
                    for end in (float(sizes.min()), float(sizes.max()))
                )
            )
            sentence = (
                f"Positions of {named} {direction} (rank correlation "
                f"{ends}, {over(patterns)}), by {step_size} positions per token on average"
                f"{_by_spans(run, found)}"
            )
            evidence = (
                "the rank correlation is beyond 0.8 in every prompt; of permuted positions "
                f"95 % stay within {null}"
            )
            yield Finding(sentence, evidence, 0.58, "patterns", *heads[0], variable="trend")


def _by_spans(run: xr.DataTree, found: xr.DataArray) -> str:
    """Return a clause for heads whose positions step with line, sentence or span.

    These explain the positions better than the token index does.
    """
    if "position_sources" not in run.children:
        return ""
    alone = group(run, "position_sources")["alone"].where(found)
    index, segment = (float(alone.sel(source=source).mean()) for source in ("index", "segment"))
    explained = (
        f"; line, sentence or span explain {percent(segment)} of their variance, "
        f"the index {percent(index)}"
    )
    return explained if segment > index + 0.1 else ""


VIEW = View(
    "patterns",
    "Patterns of positions",
    "Chunks of a prompt by how positions run inside them: constant, strictly monotonic, or "
    "neither (RePo, fig. 3). A head that "
    "counts with noise is hybrid too: whether it counts is told by the rank correlation of "
    "its positions and the token index.",
    _charts,
    tables=lambda run: (pattern_table(run),) if _has_chunks(run) else (),
    findings=_findings,
    informative=_not_all_monotonic,
    compared=("pattern_share", "sensitivity", "trend"),
)
