"""Ranges of positions, d = max z - min z of every head, with the context length.

RePo sec. 5.2, fig. 2. It also decides which heads to show.

    d^{k,h} in positions, layer k, head h; a prompt of n tokens spans n - 1 under RoPE

Draws `position_range` and `token_count` of the group `positions`. This module knows nothing about
how ranges are measured.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    HeadDots,
    Table,
    counted,
    group,
    learned_layers,
    over_prompts,
    ranked_heads,
    schemes,
    table_of,
)
from repo_interp.plots.style import PaperFigure, style
from repo_interp.plots.views.attention_mass import ranked_span

ALIKE = 0.98
"""Least correlation of two heads' positions over a prompt that counts as equal."""


def has_positions(run: xr.DataTree) -> bool:
    """Tell whether any layer of a run gives positions to tokens.

    Layers with CoPE and NoPE do not.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        True if some layer does; the run must have the group `positions`.
    """
    return bool(group(run, "positions")["position_range"].notnull().any())


def positions_group(run: xr.DataTree) -> xr.Dataset:
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
    Among heads of a layer that share positions, only the head with the best score is listed. A head
    with a curve over the first prompt similar to an earlier head's (|r| >= `ALIKE`) comes later.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Labels (layer, head), the best first.

    Raises:
        InputError: The run has no positions.
    """
    positions = group(run, "positions")
    ranges = over_prompts(positions["position_range"])
    # The least number above 0: a run of constant positions divides 0 by it, not by 0.
    scores = ranges / max(float(ranges.max()), np.finfo(float).tiny)
    if ranked_span(run) == "needle":
        attention = group(run, "attention_mass").sel(span="needle", drop=True)
        chance = over_prompts(attention["chance"]) if "chance" in attention else 0.0
        excess = (
            (over_prompts(attention["mass"]) - chance)
            .clip(min=0)
            # The two measures may have kept other layers; a missing mass counts 0 below.
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
        # Curves are centered and of length 1, so their product is the correlation; of either sign,
        # since a mirrored curve shows nothing new.
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
        # A constant head has a length of rounding, which would become a curve of noise.
        if length > 1e-9 * (1 + np.abs(values).max(initial=0.0))
        else np.zeros_like(centred)
    )


@style()
def position_ranges(run: xr.DataTree) -> PaperFigure:
    """Draw the ranges of positions by head (RePo fig. 2).

    A dot is the mean of a head over prompts; heads of a layer are drawn from left to right. A thin
    line spans the smallest to the largest prompt; a bar is the median of the layer. The dashed line
    is the context length.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no positions.
    """
    return range_chart(run).figure()


def range_chart(run: xr.DataTree) -> HeadDots:
    """Make the chart of `position_ranges`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    positions = positions_group(run)
    ranges, lengths = positions["position_range"], positions["token_count"].values
    # HeadDots draws a bar by head; here it is one per layer.
    median = ranges.mean("prompt").median("head").broadcast_like(ranges)
    title = (
        f"Range of the positions of a prompt: {counted(ranges[0].size, 'head')}, "
        f"{counted(ranges.sizes['prompt'], 'prompt')}"
    )
    return HeadDots(
        "position_ranges",
        {title: (ranges, median)},
        "median of a layer's heads",
        "max − min (positions)",
        {title: lengths.mean()},
        f"context length: {_span_of(lengths)} tokens",
        caption="Largest minus smallest position that a head gives to the tokens of a prompt, mean over "
        "prompts, beside the median head of its layer and the length of the context (RePo, fig. 2).",
    )


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
    ranges, lengths, over = (
        positions["position_range"],
        positions["token_count"],
        ("prompt", "head"),
    )
    columns = [
        ("smallest", ranges.min(over)),
        ("median", ranges.median(over)),
        ("largest", ranges.max(over)),
        ("median / context (%)", (100 * ranges / lengths).median(over)),
    ]
    note = (
        f"In positions, over {counted(ranges.sizes['head'], 'head')} per layer and "
        f"{ranges.sizes['prompt']} prompts of {_span_of(lengths.values)} tokens."
    )
    return table_of("positions", "Ranges of positions, max − min", columns, note)


def _span_of(lengths: np.ndarray) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return f"{low:,}" if high == low else f"{low:,} to {high:,}"
