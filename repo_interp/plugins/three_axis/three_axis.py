"""Three-axis linear approximation of a head's logits.

Position Generalization sec. 3.1, eq. 2, 7, 8, app. A.

    min over a, b, c of  sum over seen pairs (W_ij - a_{i-j} - b_i - c_j)^2 + ridge |a, b, c|^2
    r = Pearson correlation of W_ij and a_{i-j} + b_i + c_j over seen pairs

W are the logits of the model, with 1/sqrt(d_head), soft cap and position bias. The paper leaves
these choices open. Three directions leave the map unchanged (the level of two axes, and a common
slope); the ridge solution has no component along them, so only differences of an axis from its
level and slope are meaningful. Pairs outside a layer's window are not seen. A distance is a
difference of token indices.

`r_position` replaces indices by learned positions, for schemes that learn them (position_cells). On
request the attention weights are fitted too (O(n^2 d) time). There are two controls on request; for
the paper's control, apply this measure to a model with freshly initialized weights.

`r_shuffled` uses the map a_{s(i-j)} + b_i + c_j with s a random permutation of the seen distances.
A trend a_t = alpha + beta t is not specific to the distance axis: beta (i - j) is also a row and a
column effect (a gauge of the fit). The trend is moved to b and c first, which gives a the least
variance over pairs, so that shuffling destroys only the part that distances alone explain.

`r2_held_out` measures how well axes fitted on some rows predict the others,

    R^2 = 1 - sum (W_ij - W_i. - f_ij + f_i.)^2 / sum (W_ij - W_i.)^2
            over held-out rows, f_ij = a_{i-j} + c_j

W_i., f_i. are means over row i. A held-out row has no fitted b_i, and its offset is left free: the
softmax ignores it, and the gauges of the fit change it. R^2 is negative if the axes predict worse
than the row's mean. Held-out rows are random; the last row is always fitted, so that every distance
and every key is seen.

This module knows nothing about the contents of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.heads import Reduction
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.logit_sums import LogitSums, MapSums, attention_sums, logit_sums
from repo_interp.measures.kernels.rounding import ROUNDING
from repo_interp.measures.kernels.seen_pairs import extents
from repo_interp.measures.kernels.solvers import Axes
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.plugins.three_axis.axis_fit import (
    AdditivePairs,
    additive_pairs,
    additive_pairs_of,
    fit_axes,
    fit_correlation,
    fit_pairs,
    inner_product,
)
from repo_interp.plugins.three_axis.position_cells import position_correlation
from repo_interp.values import Count, Positive, Seed

Extra = Literal["attention", "position", "shuffled", "held_out"]
_PER_PROMPT = {
    "r": "correlation of logits and their three-axis fit",
    "r_attention": "correlation of attention weights and their three-axis fit",
    "r_position": (
        "correlation of logits and their three-axis fit with distances of learned positions"
    ),
    "r_shuffled": "correlation of logits and their three-axis fit with its distance axis shuffled",
    "r2_held_out": (
        "share of variance within held-out rows explained by axes fitted on the other rows"
    ),
}
_AXES = {
    "distance_axis": "distance axis of the first prompt [logits]",
    "query_axis": "query axis of the first prompt [logits]",
    "key_axis": "key axis of the first prompt [logits]",
}


@dataclass(frozen=True)
class ThreeAxis(Measure, needs=Needs(by_pair=True, nan=tuple(_PER_PROMPT))):
    """The measure `three_axis`."""

    axes: Literal["none", "first_prompt"] = "none"
    """Axes that are kept: "none", or those of the "first_prompt" of the analysis, number 0."""
    extras: tuple[Extra, ...] = ("position",)
    """Optional variables, of "attention", "position", "shuffled", "held_out"."""
    # Small enough not to change the fit, and above 0, so that the solution is unique
    ridge: Positive = 1e-6
    """Weight of the squared axes in the fit."""
    position_width: Positive = 1.0
    """Width of a cell of learned positions, in positions."""
    most_cells: Count = 4096
    """`r_position` is NaN for a head whose positions reach over more cells than this in a prompt.
    """
    held_out_share: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """Share of the rows that is held out."""
    seed: Seed = 0
    """Seed of the shuffled distances and the held-out rows."""
    name: str = "three_axis"
    describes: ClassVar[str] = "logits as a sum of distance, query and key"
    topic: ClassVar[str] = "generalization"

    def beside(self, names: Collection[str]) -> Measure:
        """Return this measure with axes, which the figure of `maps` draws, if `maps` is named."""
        return replace(self, axes="first_prompt") if "maps" in names else self

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The fields, with the extras as one text."""
        return {**super().parameters, "extras": ", ".join(self.extras)}

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Correlations [prompt, layer, head]; on request the axes of the first prompt."""
        # The fit needs only these sums of the map; the map is never made
        sums, row = logit_sums(inputs), inputs.row_of_first_prompt
        row = None if self.axes == "none" else row
        shared = inputs.valid, inputs.window
        found = _fitted(sums, self, *shared, row, "shuffled" in self.extras)
        values = {"r": found["r"]}
        if "attention" in self.extras:
            of_weights = _fitted(attention_sums(inputs), self, *shared, None, False)
            values["r_attention"] = of_weights["r"]
        if "position" in self.extras:
            values["r_position"] = self._by_position(inputs, sums)
        if "shuffled" in self.extras:
            values["r_shuffled"] = found["r_shuffled"]
        if "held_out" in self.extras:
            rows = draw_rows(inputs.valid, self.held_out_share, self.seed)
            values["r2_held_out"] = held_out_r2(
                sums, logit_sums(inputs, rows), rows, inputs.valid, inputs.window, self.ridge
            )
        record, first, labels = (
            {name: ("prompt layer head", value) for name, value in values.items()},
            {},
            {},
        )
        if row is not None:
            start, end, _ = extents(inputs.valid)[row]
            labels = {"distance": np.arange(float(end - start)), "token": np.arange(float(end))}
            axes = ("distance", "token", "token")
            first = {
                name: (f"layer head {axis}", found[name])
                for name, axis in zip(_AXES, axes, strict=True)
            }
        return Statistics(
            per_prompt=arrays(inputs, record), first_prompt=arrays(inputs, first, **labels)
        )

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[Reduction, ...]:
        """Sums of the logits."""
        return (LogitSums(),)

    def _by_position(self, inputs: AttentionInputs, sums: MapSums) -> Any:
        # Index positions of width 1 would repeat r
        if not inputs.learned or not inputs.one_position:
            return torch.full_like(sums.square, torch.nan)
        return position_correlation(inputs, sums, self.position_width, self.most_cells, self.ridge)

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `three_axis` of a run."""
        measured, labels = statistics.variables()
        return described_group(measured, _PER_PROMPT | _AXES, labels)


def _fitted(
    sums: MapSums,
    measure: ThreeAxis,
    valid: Bool[Tensor, "prompt token"],
    window: int | None,
    row: int | None,
    shuffled: bool,
) -> Any:
    """Results of `_fits`, of all layers together where they wait."""
    return jointly(_fits, {"sums": sums.together}, [measure, valid, window, row, shuffled])


def _fits(
    measure: ThreeAxis,
    valid: Bool[Tensor, "prompt token"],
    window: int | None,
    row: int | None,
    shuffled: bool,
    sums: Float[Tensor, "layer prompt head three_tokens_and_1"],
) -> dict[str, Tensor]:
    """Correlations of layers, and the axes of the prompt at `row`."""
    of_map, pairs = MapSums(sums), additive_pairs_of(valid, window)
    axes = fit_axes(of_map.lines, valid, window, measure.ridge)
    found = {"r": fit_correlation(axes, of_map.lines, of_map.square, pairs)}
    if shuffled:
        others = shuffle_distances(axes, pairs, measure.seed)
        found["r_shuffled"] = fit_correlation(others, of_map.lines, of_map.square, pairs)
    if row is not None:
        first, end, _ = extents(valid)[row]
        sizes = end - first, end, end
        found |= {
            name: part[:, row, :, :size]
            for name, part, size in zip(_AXES, axes, sizes, strict=True)
        }
    return found


def shuffle_distances(axes: Axes, pairs: AdditivePairs, seed: int) -> Axes:
    """Permute the distance axis after moving its trend to the other axes.

    Args:
        axes: Axes [..., prompt, head, n].
        pairs: Seen pairs of the prompts.
        seed: Seed; the permutation depends only on it and on the number of seen distances.

    Returns:
        Axes of the same shape.
    """
    steady = without_trend(axes, pairs)
    distance = steady.distance.clone()
    seen = pairs.counts.distance > 0
    for prompt in range(len(seen)):
        # Only seen distances: unseen ones would add zeros
        distances = seen[prompt, 0].cpu().nonzero()[:, 0]
        # The same permutation for all heads, layers and batches
        order = _drawn_order(len(distances), seed)
        distance[..., prompt, :, distances] = steady.distance[..., prompt, :, distances[order]]
    return Axes(distance, steady.query, steady.key)


def without_trend(axes: Axes, pairs: AdditivePairs) -> Axes:
    """Return axes of the same map whose distance axis has mean 0 and no slope.

    Distances are weighted by their numbers of pairs.

    Args:
        axes: Axes [prompt, head, n].
        pairs: Seen pairs of the prompts.

    Returns:
        Axes of the same shape.
    """
    steps = torch.arange(
        axes.distance.shape[-1], dtype=axes.distance.dtype, device=axes.distance.device
    )
    share = pairs.counts.distance / pairs.total.clamp(min=1)[..., None]
    # Weighted by pairs, so that a has the least variance over pairs
    centred = steps - _mean(share, steps)
    # beta (i - j) is also a row and a column effect: moving it does not change the map.
    slope = _mean(share, centred * axes.distance) / _mean(share, centred**2).clamp(
        min=torch.finfo(steps.dtype).tiny
    )
    level = _mean(share, axes.distance) - slope * _mean(share, steps)
    return Axes(
        axes.distance - level - slope * steps,
        # slope (i - j): + slope i for rows, - slope j for keys; the level goes to the rows
        axes.query + level + slope * steps,
        axes.key - slope * steps,
    )


def _mean(share: Tensor, values: Tensor) -> Tensor:
    return (share * values).sum(-1, keepdim=True)


def _drawn_order(count: int, seed: int) -> Int[Tensor, "place"]:
    # On the processor: one seed gives the same order on any device
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def draw_rows(
    valid: Bool[Tensor, "prompt token"], share: float, seed: int
) -> Bool[Tensor, "prompt token"]:
    """Draw rows to hold out; the last valid row is never drawn.

    Args:
        valid: Mask of the tokens that are not padding.
        share: Share of the other valid rows, from 0 to 1.
        seed: Seed; the draw depends only on it and on the number of rows.

    Returns:
        Mask of the drawn rows.
    """
    drawn = torch.zeros_like(valid)
    for prompt, tokens in enumerate(valid.cpu()):
        # The last row sees every distance and key, so it is never held out.
        rows = tokens.nonzero()[:-1, 0]
        order = _drawn_order(len(rows), seed)
        drawn[prompt, rows[order[: round(share * len(rows))]]] = True
    return drawn


def held_out_r2(
    every: MapSums,
    held_out: MapSums,
    rows: Bool[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"],
    window: int | None,
    ridge: float,
) -> Float[Tensor, "prompt head"]:
    """Return R^2 on held-out rows, of axes fitted to the other rows.

    Args:
        every: Sums over all rows.
        held_out: Sums over the held-out rows.
        rows: Mask of the held-out rows.
        valid: Mask of the tokens that are not padding.
        window: Tokens that a query sees, itself included; None: all earlier tokens.
        ridge: Weight of the squared axes.

    Returns:
        R^2 [prompt, head], at most 1; NaN where the held-out rows do not vary.
    """
    fitted_on = additive_pairs((valid & ~rows)[:, None], valid[:, None], window)
    judged_on = additive_pairs(rows[:, None], valid[:, None], window)
    # Sums over the fitted rows by subtraction, without a second pass over the logits.
    sums = Axes(
        *(all_rows - some for all_rows, some in zip(every.lines, held_out.lines, strict=True))
    )
    axes = fit_pairs(sums, fitted_on, ridge)
    # A held-out row has no fitted offset; R^2 within rows does not depend on it.
    axes = Axes(axes.distance, torch.zeros_like(axes.query), axes.key)
    of_fit = judged_on.sums(axes)
    # sum (x - row mean)^2 = sum x^2 - sum over rows of (row sum)^2 / n_i, without a map
    per_row = 1 / judged_on.counts.query.clamp(min=1)
    scatter = held_out.square - (per_row * held_out.lines.query**2).sum(-1)
    fitted_scatter = inner_product(axes, of_fit) - (per_row * of_fit.query**2).sum(-1)
    product = inner_product(axes, held_out.lines) - (
        per_row * of_fit.query * held_out.lines.query
    ).sum(-1)
    return torch.where(
        scatter > ROUNDING * held_out.square,
        1 - (scatter - 2 * product + fitted_scatter) / scatter,
        torch.nan,
    )
