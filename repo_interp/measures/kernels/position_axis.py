"""The three-axis fit with its distance axis over learned positions, u = floor(z / width) a token's cell.

    W_ij ~ a[u_i - u_j] + b_i + c_j

Where positions are the token index and width is 1, u_i - u_j = i - j and this is the fit of `axis_fit`; a layer
that learns its positions is judged by the distances it has made. Only the correlation is wanted, whose error is
of the order of the square of the solver's: few steps do. Knows nothing about how positions came about.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels import conjugate_gradient
from repo_interp.measures.kernels.axis_fit import pearson
from repo_interp.measures.kernels.logit_sums import MapSums, is_bilinear, row_blocks
from repo_interp.measures.kernels.over_heads import MEMORY
from repo_interp.measures.kernels.position_cells import BinnedPairs, binned_pairs, product_sums
from repo_interp.positions.rotary import expand_heads

TOLERANCE = 1e-6


def position_correlation(
    inputs: AttentionInputs, sums: MapSums, width: float, most_cells: int, ridge: float
) -> Float[Tensor, "prompt head"]:
    """Pearson correlation of the logits and their fit; `sums` are those of the logits.

    `width` is in positions. NaN for a head whose positions reach over more than `most_cells` cells in that
    prompt, and where the logits do not vary. ValueError for a layer without positions.
    """
    if inputs.head_positions is None:
        raise ValueError(f"layer {inputs.layer} ({inputs.scheme}) has no positions to measure distances by")
    cell, within = _cells(inputs.head_positions, inputs.valid, width, most_cells)
    takes_part = inputs.valid[:, None] & within[..., None]
    correlation = torch.full(within.shape, torch.nan, dtype=torch.float64, device=cell.device)
    queries, keys = inputs.rotated_queries, expand_heads(inputs.rotated_keys, inputs.heads)
    tokens, d_head = queries.shape[-2:]
    items = within.flatten().nonzero()[:, 0]
    if not len(items):
        return correlation
    for block in items.split(max(1, 2 * MEMORY // (tokens * (8 * d_head + 2048)))):
        prompt, head = block // inputs.heads, block % inputs.heads
        part = takes_part[prompt, head]
        pairs = binned_pairs(cell[prompt, head], part, inputs.window)
        if is_bilinear(inputs):
            some_queries = queries[prompt, head].masked_fill(~part[..., None], 0)
            some_keys = keys[prompt, head].masked_fill(~part[..., None], 0)
            by_bin = inputs.logit_scale * product_sums(some_queries, some_keys, pairs, inputs.window)
        else:
            by_bin = _written_out(inputs, cell[prompt, head], prompt, head, pairs)
        some = [by_bin, sums.lines.query[prompt, head], sums.lines.key[prompt, head]]
        correlation[prompt, head] = _fit_correlation(torch.cat(some, -1), sums.square[prompt, head], pairs, ridge)
    return correlation


def _cells(
    positions: Float[Tensor, "prompt head token"],
    valid: Bool[Tensor, "prompt token"],
    width: float,
    most_cells: int,
) -> tuple[Int[Tensor, "prompt head token"], Bool[Tensor, "prompt head"]]:
    """Cell of every valid token from the lowest on, 0 elsewhere; and which heads have at most `most_cells`."""
    cell = torch.floor(positions.to(torch.float64) / width)
    lowest = cell.masked_fill(~valid[:, None], torch.inf).amin(-1, keepdim=True)
    cell = (cell - lowest).masked_fill(~valid[:, None], 0)
    within = (cell.amax(-1) < most_cells) & valid.any(-1)[:, None]
    return torch.where(within[..., None], cell, 0).to(torch.int64), within


def _fit_correlation(
    sums: Float[Tensor, "item unknown"], square: Float[Tensor, "item"], pairs: BinnedPairs, ridge: float
) -> Float[Tensor, "item"]:
    sizes = [part.shape[-1] for part in pairs.counts]

    def apply(unknowns: Tensor) -> Tensor:
        return torch.cat(pairs.sums(*unknowns.split(sizes, -1)), -1)

    axes = conjugate_gradient.solve(apply, sums, torch.cat(pairs.counts, -1), pairs.gauges(), ridge, TOLERANCE)
    of_fit = apply(axes)
    return pearson(
        count=pairs.counts[0].sum(-1),
        total=sums[..., : sizes[0]].sum(-1),
        square=square,
        fitted_total=of_fit[..., : sizes[0]].sum(-1),
        fitted_square=(axes * of_fit).sum(-1),
        product=(axes * sums).sum(-1),
    )


def _written_out(
    inputs: AttentionInputs, cell: Int[Tensor, "item token"], prompt: Tensor, head: Tensor, pairs: BinnedPairs
) -> Float[Tensor, "item bin"]:
    """Sum of the logits of every bin where they are no dot product: rows are written out, O(n^2 d)."""
    sums = torch.zeros_like(pairs.counts[0])
    for rows, logits in row_blocks(inputs):
        values = torch.where(inputs.visible(rows)[:, None], logits, 0)[prompt, head].to(torch.float64)
        bins = cell[:, rows, None] - cell[:, None, :] + pairs.cells - 1
        sums.scatter_add_(-1, bins.flatten(1), values.flatten(1))
    return sums
