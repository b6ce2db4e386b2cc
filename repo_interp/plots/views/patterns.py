"""How positions run inside chunks: shares of constant, mono and hybrid chunks.

RePo sec. 5.2, fig. 3.

    share of pattern p = chunks labeled p / chunks                constant + mono + hybrid = 1
    resolution         = least distance from which 90 % of pairs of tokens have one order
    trend              = rank correlation of positions and the token index, over the whole prompt

Draws the group `patterns` of a run. This module knows nothing about how a chunk is labeled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Cell,
    Chart,
    Finding,
    Heads,
    Panels,
    Table,
    cells,
    colour_map,
    counted,
    group,
    heads_named,
    heads_where,
    layer_scheme,
    learned_layers,
    nanmean,
    over_prompts,
    strongest_head,
)
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PATTERN_COLOURS,
    PaperFigure,
    darker,
    style,
)
from repo_interp.plots.view import View

ORDERED, NEAR = 0.8, 0.05
"""Order at which 90 % of pairs have one order, and the largest distance from it that is near."""


@style()
def pattern_shares(run: xr.DataTree) -> PaperFigure:
    """Draw the shares of the patterns for every head (RePo fig. 3).

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no patterns, or no chunk: no layer has positions, or prompts are
            shorter than a chunk.
    """
    return share_grid(run).figure()


def share_grid(run: xr.DataTree) -> Panels:
    """Make the chart of `pattern_shares`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.

    Raises:
        InputError: The run has no chunk of positions.
    """
    if not _has_chunks(run):
        raise InputError(
            "this run has no chunk of positions: no layer has any, or prompts are shorter; "
            "leave this figure out"
        )
    patterns = group(run, "patterns")
    shares = 100 * patterns["pattern_share"].transpose("pattern", "layer", "head")
    title = f"Share of chunks by pattern (%); {caption_of(patterns)}"
    whole = 100 * patterns["pattern_share_all"]
    return _by_pattern(
        "pattern_shares",
        shares,
        whole,
        title,
        cell=0.15,
        width=PAGE_WIDTH,
        caption="Chunks of prompts by how positions run inside them, by layer and head: constant, "
        "strictly monotonic (mono), or neither (hybrid; RePo, fig. 3).",
    )


def _by_pattern(
    name: str, shares: xr.DataArray, whole: xr.DataArray | None, title: str, **options: Any
) -> Panels:
    """Make a grid with a panel per pattern of `shares` [pattern, row, column] in per cent.

    Titles have `whole` [pattern]. A pattern below half a per cent everywhere is mentioned.
    """
    panels, looks, absent = {}, {}, []
    for pattern in map(str, shares["pattern"].values):
        of, colour = shares.sel(pattern=pattern), PATTERN_COLOURS[pattern]
        # Cells have no decimals: below half a per cent all of them would read 0.
        if bool((of >= 0.5).any()):
            mean = (
                ""
                # NaN where no scheme of ours learns positions, as of another package's
                if whole is None or bool(whole.sel(pattern=pattern).isnull())
                else f", {float(whole.sel(pattern=pattern)):.0f} % in learned layers"
            )
            panels[pattern + mean] = of
            colours = colour_map("share", colour, darker(colour, 0.75))
            looks[pattern + mean] = {"cmap": colours, "vmin": 0, "vmax": 100}
        else:
            absent.append(pattern)
    few = f"below half a per cent everywhere: {' and '.join(absent)}" if absent else ""
    text = "; ".join(filter(None, (title, few)))
    return Panels(name, panels, text, ".0f", looks=looks, **options)


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


def sensitivity_grid(run: xr.DataTree) -> Panels:
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
    # Epsilon went through a file as a float, so it is found within rounding.
    rows, columns = np.nonzero((sizes == size)[:, None] & np.isclose(epsilons, epsilon))
    grid = grid.assign_coords(
        epsilon=("epsilon", epsilons, {"long_name": "ε (positions)"}),
        chunk_size=("chunk_size", sizes, {"long_name": "chunk size (tokens)"}),
    )
    chosen = next(zip(rows.tolist(), columns.tolist(), strict=True), None)
    return _by_pattern(
        "pattern_sensitivity",
        grid,
        None,
        "Share of chunks by pattern (%)",
        chosen=chosen,
        caption="The same shares, over all layers that learn positions, for other sizes of chunks and "
        "tolerances ε; the frame is the choice of this run.",
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
        # Runs that state no parameters would end in a lone full stop.
        note.replace(" .", ""),
    )


def caption_of(patterns: xr.Dataset) -> str:
    """Describe the chunks of a run.

    Args:
        patterns: Group of a run.

    Returns:
        Their size, the tolerance, and how many there are.
    """
    parts = []
    if "chunk_size" in patterns.attrs:
        parts.append(f"chunks of {patterns.attrs['chunk_size']} tokens")
    if "epsilon" in patterns.attrs:
        parts.append(f"ε = {patterns.attrs['epsilon']:g} positions")
    if "chunk_pattern" in patterns and _chunks(patterns):
        parts.append(f"n = {_chunks(patterns):,} chunks in learned layers")
    return ", ".join(parts)


def _chunks(patterns: xr.Dataset) -> int:
    """How many chunks of layers that learn positions are labeled."""
    # -1 marks a chunk without positions, or beyond the end of a shorter prompt.
    return int((patterns["chunk_pattern"].sel(layer=learned_layers(patterns)) >= 0).sum())


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    patterns = group(run, "patterns")
    if _has_chunks(run):
        yield share_grid(run)
        if bool(patterns["sensitivity"].notnull().any()):
            yield sensitivity_grid(run)
        shares = patterns["pattern_share"]
        for name in shares["pattern"].values:
            share = shares.sel(pattern=name, drop=True).assign_attrs(
                long_name=f"share of {name} chunks", units="1"
            )
            yield Heads(share)
    if "trend" in patterns:
        yield Heads(over_prompts(patterns["trend"]))
    if "resolution" in patterns and bool(patterns["resolution"].notnull().any()):
        yield Heads(patterns["resolution"])


def _has_chunks(run: xr.DataTree) -> bool:
    """Whether any head has a chunk with a known pattern."""
    return bool(group(run, "patterns")["pattern_share"].notnull().any())


def _not_all_monotonic(run: xr.DataTree) -> bool:
    """Tell whether any head has a chunk that is not strictly monotonic.

    All chunks of the token index are.
    """
    shares = group(run, "patterns")["pattern_share"]
    return bool(
        (
            # The token index rises strictly, so its chunks are only mono.
            shares.sel(pattern=[name for name in shares["pattern"].values if name != "mono"]) > 0
        ).any()
    )


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Heads with learned positions that tell the order of tokens, and from which distance on."""
    patterns = group(run, "patterns")
    if "resolution" not in patterns:
        return
    resolution = patterns["resolution"].sel(layer=learned_layers(patterns))
    heads = heads_where(resolution.notnull())
    if not heads:
        return
    layer, head, finest = strongest_head(-resolution)
    prompts = int(patterns["order_prompts"].sel(layer=layer, head=head))
    others = [pair for pair in heads if resolution.sel(layer=pair[0], head=pair[1]) > -finest]
    same = [pair for pair in heads if pair not in others]
    per_layer, verb = patterns.sizes["head"], "orders" if len(same) == 1 else "order"
    sentence = (
        f"{heads_named(same, per_layer=per_layer)} {verb} two tokens rightly in 90 % of pairs from "
        f"{counted(int(-finest), 'token')} apart"
    )
    if others:
        slower = resolution.where(resolution > -finest)
        ends = dict.fromkeys(f"{float(end):g}" for end in (slower.min(), slower.max()))
        sentence += (
            f", {counted(len(others), 'further head')} ({heads_named(others, per_layer=per_layer)}) "
            f"from {' to '.join(ends)}"
        )
    near = int((abs(patterns["order_told"].sel(layer=resolution["layer"]) - ORDERED) < NEAR).sum())
    evidence = (
        f"the same order in {counted(prompts, 'prompt')}; a walk without drift has none in 99 of "
        f"100; {counted(near, 'head')} within {NEAR:g} of the limit, an order of {ORDERED:g}"
    )
    weight = 0.58
    yield Finding(
        sentence,
        evidence,
        weight,
        "patterns",
        layer,
        head,
        variable="resolution",
    )


VIEW = View(
    "patterns",
    "Patterns of positions",
    "Chunks of a prompt by how positions run inside them: constant, strictly monotonic, or "
    "neither (RePo, fig. 3). A head that "
    "counts with noise is hybrid too: whether it counts is told by the least distance from which its "
    "positions order 90 % of pairs of tokens rightly.",
    _charts,
    tables=lambda run: (pattern_table(run),) if _has_chunks(run) else (),
    findings=_findings,
    informative=_not_all_monotonic,
    compared=("pattern_share", "sensitivity", "trend", "order"),
    by_index=("pattern_share", "sensitivity", "trend", "order", "resolution"),
)
