"""The ridge fit W_ij ~ a_{i-j} + b_i + c_j over the seen pairs of every head, and its quality, from sums of W alone.

    (M + ridge) x = s       x = (a, b, c), s the diagonal, row and column sums of W, M the pairs' normal matrix
    sum fit = sum over diagonals of M x,   sum fit^2 = x.M x,   sum fit W = x.s        hence Pearson's correlation

A prompt whose valid tokens stand together, in a layer without a window, is a causal triangle: exact banded solve
(triangle_solver), one factorization a length. Any other set of pairs goes to conjugate gradients.
Knows nothing about where the sums come from.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.kernels import conjugate_gradient
from repo_interp.measures.kernels.additive_map import AdditivePairs, additive_pairs
from repo_interp.measures.kernels.triangle_solver import Axes, fit_triangle

TOLERANCE = 1e-11


def fit_axes(sums: Axes, valid: Bool[Tensor, "prompt token"], window: int | None, ridge: float) -> Axes:
    """Axes [prompt, head, token] of the fit over the pairs of valid tokens in the window; 0 where none was seen.

    `sums` are of that shape, float64. A distance is a difference of token indices: invalid tokens in between count.
    """
    axes = Axes(*(torch.zeros_like(part) for part in sums))
    triangles, others = _triangles(valid, window)
    for (start, length), prompts in triangles.items():
        tokens = slice(start, start + length)
        spans = (slice(0, length), tokens, tokens)
        fitted = fit_triangle(Axes(*(part[prompts][..., span] for part, span in zip(sums, spans, strict=True))), ridge)
        for part, span, values in zip(axes, spans, fitted, strict=True):
            part[prompts, :, span] = values
    if others:
        pairs = additive_pairs(valid[others][:, None], valid[others][:, None], window)
        fitted = fit_pairs(Axes(*(part[others] for part in sums)), pairs, ridge)
        for part, values in zip(axes, fitted, strict=True):
            part[others] = values
    return axes


def fit_pairs(sums: Axes, pairs: AdditivePairs, ridge: float) -> Axes:
    """Axes of the fit over any seen pairs, by conjugate gradients; leading axes broadcast."""

    def apply(unknowns: Tensor) -> Tensor:
        return torch.cat(pairs.sums(Axes(*unknowns.chunk(3, -1))), -1)

    solution = conjugate_gradient.solve(apply, torch.cat(sums, -1), torch.cat(pairs.counts, -1), pairs.gauges(), ridge, TOLERANCE)
    return Axes(*solution.chunk(3, -1))


def fit_correlation(
    axes: Axes, sums: Axes, square: Float[Tensor, "prompt head"], pairs: AdditivePairs
) -> Float[Tensor, "prompt head"]:
    """Pearson correlation over the seen pairs of W, given by its sums and sum of squares, with the map of `axes`."""
    of_fit = pairs.sums(axes)
    return pearson(
        count=pairs.total,
        total=sums.distance.sum(-1),
        square=square,
        fitted_total=of_fit.distance.sum(-1),
        fitted_square=inner_product(axes, of_fit),
        product=inner_product(axes, sums),
    )


def pearson(count: Tensor, total: Tensor, square: Tensor, fitted_total: Tensor, fitted_square: Tensor, product: Tensor) -> Tensor:
    """Pearson correlation from raw float64 sums over `count` pairs; NaN where a side varies by rounding only."""
    mean, fitted_mean = total / count, fitted_total / count
    variance = square / count - mean**2
    fitted_variance = fitted_square / count - fitted_mean**2
    rounding = 64 * torch.finfo(torch.float64).eps
    varies = (variance > rounding * square / count) & (fitted_variance > rounding * fitted_square / count)
    covariance = product / count - mean * fitted_mean
    correlation = covariance / (variance.clamp(min=0) * fitted_variance.clamp(min=0)).sqrt()
    return torch.where(varies, correlation.clamp(-1, 1), torch.nan)


def inner_product(left: Axes, right: Axes) -> Tensor:
    """a.a' + b.b' + c.c'."""
    return (left.distance * right.distance + left.query * right.query + left.key * right.key).sum(-1)


def _triangles(valid: Bool[Tensor, "prompt token"], window: int | None) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """Prompts that are whole triangles, by (first token, length), and others; one without tokens is in neither."""
    triangles: dict[tuple[int, int], list[int]] = {}
    others: list[int] = []
    for prompt, mask in enumerate(valid.cpu()):
        tokens = mask.nonzero()[:, 0].tolist()
        if not tokens:
            continue
        whole = tokens[-1] - tokens[0] + 1 == len(tokens) and (window is None or window >= len(tokens))
        if whole:
            triangles.setdefault((tokens[0], len(tokens)), []).append(prompt)
        else:
            others.append(prompt)
    return triangles, others
