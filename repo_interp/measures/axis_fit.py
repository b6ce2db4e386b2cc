"""The ridge fit W_ij ~ a_{i-j} + b_i + c_j over the seen pairs of every head, and how well it does, from sums alone.

    fit:      (M + ridge) x = s,     x = (a, b, c), s the diagonal, row and column sums of W, M the pairs' normal matrix
    Pearson:  sum fit = sum over diagonals of M x,   sum fit^2 = x.M x,   sum fit W = x.s

A prompt whose tokens stand together and whose layer has no window is a causal triangle: exact banded solve (triangle_solver), one
factorization a length. Any other set of pairs goes to conjugate gradients. Knows nothing about where the sums come from.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures import conjugate_gradient
from repo_interp.measures.seen_pairs import SeenPairs, seen_pairs
from repo_interp.measures.triangle_solver import Axes, fit_triangle


def fit_axes(
    sums: Axes, valid: Bool[Tensor, "prompt n"], window: int | None, ridge: float
) -> Axes:
    """Axes [prompt, head, n] of the fit over the pairs of valid tokens inside the window; 0 where nothing was seen.

    `sums` are [prompt, head, n], float64; distances are counted in tokens, invalid ones between two valid ones included.
    """
    axes = Axes(*(torch.zeros_like(part) for part in sums))
    lengths = valid.sum(-1).tolist()
    starts = valid.to(torch.int8).argmax(-1).tolist()
    together = [_stand_together(valid[prompt]) and (window is None or window >= length) for prompt, length in enumerate(lengths)]
    for length, start in sorted({(n, start) for n, start, whole in zip(lengths, starts, together, strict=True) if whole and n}):
        some = [p for p, whole in enumerate(together) if whole and (lengths[p], starts[p]) == (length, start)]
        spans = Axes(slice(0, length), slice(start, start + length), slice(start, start + length))
        fitted = fit_triangle(Axes(*(part[some][..., span] for part, span in zip(sums, spans, strict=True))), ridge)
        for part, span, values in zip(axes, spans, fitted, strict=True):
            part[some, ..., span] = values
    rest = [p for p, whole in enumerate(together) if not whole]
    if rest:
        fitted = fit_pairs(Axes(*(part[rest] for part in sums)), seen_pairs(valid[rest][:, None], valid[rest][:, None], window), ridge)
        for part, values in zip(axes, fitted, strict=True):
            part[rest] = values
    return axes


def fit_pairs(sums: Axes, pairs: SeenPairs, ridge: float) -> Axes:
    """Axes of the fit over any seen pairs, by conjugate gradients."""

    def apply(unknowns: Tensor) -> Tensor:
        return torch.cat(pairs.sums(Axes(*unknowns.chunk(3, -1))), -1)

    solution = conjugate_gradient.solve(apply, torch.cat(sums, -1), torch.cat(pairs.counts, -1), ridge)
    return Axes(*solution.chunk(3, -1))


def fit_correlation(
    axes: Axes, sums: Axes, square: Float[Tensor, "prompt head"], pairs: SeenPairs
) -> Float[Tensor, "prompt head"]:
    """Pearson correlation over the seen pairs of W, given by its sums and its sum of squares, with the map of `axes`."""
    of_fit = pairs.sums(axes)
    return pearson(
        count=pairs.total,
        total=sums.distance.sum(-1),
        square=square,
        fitted_total=of_fit.distance.sum(-1),
        fitted_square=_inner(axes, of_fit),
        product=_inner(axes, sums),
    )


def pearson(
    count: Tensor, total: Tensor, square: Tensor, fitted_total: Tensor, fitted_square: Tensor, product: Tensor
) -> Tensor:
    """Pearson correlation from raw sums over `count` pairs; NaN where either side does not vary (beyond rounding)."""
    mean, fitted_mean = total / count, fitted_total / count
    variance = square / count - mean**2
    fitted_variance = fitted_square / count - fitted_mean**2
    rounding = 64 * torch.finfo(torch.float64).eps
    varies = (variance > rounding * square / count) & (fitted_variance > rounding * fitted_square / count)
    covariance = product / count - mean * fitted_mean
    correlation = covariance / (variance.clamp(min=0) * fitted_variance.clamp(min=0)).sqrt()
    return torch.where(varies, correlation.clamp(-1, 1), torch.nan)


def _inner(left: Axes, right: Axes) -> Tensor:
    return sum(((one * other).sum(-1) for one, other in zip(left, right, strict=True)), torch.zeros(()))


def _stand_together(valid: Bool[Tensor, "n"]) -> bool:
    indices = valid.nonzero()[:, 0]
    return len(indices) == 0 or int(indices[-1] - indices[0]) + 1 == len(indices)
