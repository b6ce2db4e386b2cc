"""How well axes fitted on some rows of a map predict the others: held-out R^2 of W_ij ~ a_{i-j} + c_j.

    R^2 = 1 - sum (W_ij - W_i. - f_ij + f_i.)^2 / sum (W_ij - W_i.)^2    over held-out rows, f_ij = a_{i-j} + c_j

W_i., f_i. are means over row i. A held-out row has no fitted b_i; its offset is left free, which is what the
softmax does with it, and what the gauges of the fit change. Negative where the axes predict worse than the
row's mean. Rows are drawn at random; the last one is always fitted on, so that every distance and every key
has been seen. Knows nothing about where the sums come from.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.kernels.additive_map import additive_pairs
from repo_interp.measures.kernels.axis_fit import fit_pairs, inner_product
from repo_interp.measures.kernels.logit_sums import MapSums
from repo_interp.measures.kernels.triangle_solver import Axes


def draw_rows(valid: Bool[Tensor, "prompt token"], share: float, seed: int) -> Bool[Tensor, "prompt token"]:
    """Rows to hold out: `share` of the valid ones but the last, drawn by `seed` and their number alone."""
    drawn = torch.zeros_like(valid)
    for prompt, tokens in enumerate(valid.cpu()):
        rows = tokens.nonzero()[:-1, 0]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")
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
    """R^2 on the held-out `rows`, from sums over all rows and over those; NaN where nothing is to be explained."""
    fitted_on = additive_pairs((valid & ~rows)[:, None], valid[:, None], window)
    judged_on = additive_pairs(rows[:, None], valid[:, None], window)
    sums = Axes(*(all_rows - some for all_rows, some in zip(every.lines, held_out.lines, strict=True)))
    axes = fit_pairs(sums, fitted_on, ridge)
    axes = Axes(axes.distance, torch.zeros_like(axes.query), axes.key)
    of_fit = judged_on.sums(axes)
    per_row = 1 / judged_on.counts.query.clamp(min=1)
    scatter = held_out.square - (per_row * held_out.lines.query**2).sum(-1)
    fitted_scatter = inner_product(axes, of_fit) - (per_row * of_fit.query**2).sum(-1)
    product = inner_product(axes, held_out.lines) - (per_row * of_fit.query * held_out.lines.query).sum(-1)
    rounding = 64 * torch.finfo(torch.float64).eps * held_out.square
    return torch.where(scatter > rounding, 1 - (scatter - 2 * product + fitted_scatter) / scatter, torch.nan)
