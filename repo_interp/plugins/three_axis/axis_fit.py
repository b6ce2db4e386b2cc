"""Ridge fit W_ij ~ a_{i-j} + b_i + c_j over seen pairs, from sums of W alone.

    (M + ridge) x = s       x = (a, b, c), s the diagonal, row and column sums of W, M the pairs'
                            normal matrix
    sum fit = sum over diagonals of M x,   sum fit^2 = x.M x,   sum fit W = x.s,
    hence Pearson's correlation

A pair (i, j) of a query and a key is seen where row i takes part, key j takes part and 0 <= i - j <
window. M x is the diagonal, row and column sums of the map a_{i-j} + b_i + c_j; with R and S the
masks of rows and keys,

    diagonal t:  n_t a_t + sum_i R_i b_i S_{i-t} + sum_j R_{j+t} S_j c_j          (t < window)
    row i:       n_i b_i + R_i (sum_t a_t S_{i-t} + sum of S_j c_j over the keys in the window)
    column j:    n_j c_j + S_j (sum_t a_t R_{j+t} + sum of R_i b_i
                 over the rows whose window holds j)

n_t, n_i, n_j count the seen pairs of a diagonal, a row, a column. M x needs a few correlations,
computed by Fourier transforms in O(n log n). If the valid tokens of a prompt are contiguous and the
layer has no window, the pairs are a triangle: M x needs only running sums, and the solve is exact
and banded, with one factorization per length. Conjugate gradients solve all other cases (see
solvers).

This module knows nothing about where the sums come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.kernels.rounding import variance_of
from repo_interp.measures.kernels.seen_pairs import (
    by_head,
    earlier,
    extents,
    fast_length,
    is_whole,
    later,
    once,
    pair_counts,
)
from repo_interp.measures.kernels.solvers import Axes, conjugate_gradients, fit_triangle, gauges


@dataclass(frozen=True)
class AdditivePairs:
    """The pairs of rows and keys that take part; made by `additive_pairs`. Float64."""

    rows: Float[Tensor, "... n"]
    keys: Float[Tensor, "... n"]
    window: int | None
    triangle: bool
    """Whether all rows see all earlier keys."""
    counts: Axes
    """Number of seen pairs of every distance, row and key."""

    @property
    def total(self) -> Float[Tensor, "..."]:
        """Number of seen pairs."""
        return self.counts.distance.sum(-1)

    def sums(self, axes: Axes) -> Axes:
        """Return sums of the map of `axes` along diagonals, rows and columns.

        Args:
            axes: Float64 [..., n] per axis; leading dimensions broadcast against the masks'.

        Returns:
            Sums [..., n] along diagonals, rows and columns, float64.
        """
        if self.triangle:
            # Whole triangle: all couplings are running sums, reversed if they end at n-1-t
            a, b, c = axes
            until, after, keys = a.cumsum(-1), later(b, None), c.cumsum(-1)
            others = Axes(after + keys.flip(-1), until + keys, until.flip(-1) + after)
            # counts * axes is the diagonal part of M x; the other terms couple the three axes
            return Axes(
                *(torch.addcmul(*part) for part in zip(others, self.counts, axes, strict=True))
            )
        # Masked once here: below, b is R b and c is S c
        a, b, c = _first(axes.distance, self.window), axes.query * self.rows, axes.key * self.keys
        spectrum, (rows, keys) = self._forward(a), self._spectra
        # A conjugated spectrum gives a correlation (over i - j), a plain one a convolution
        diagonal = self._back(self._forward(b) * keys.conj() + rows * self._forward(c).conj())
        by_row = self._back(spectrum * keys) + earlier(c, self.window)
        by_key = self._back(rows * spectrum.conj()) + later(b, self.window)
        return Axes(
            self.counts.distance * a + _first(diagonal, self.window),
            self.counts.query * b + self.rows * by_row,
            self.counts.key * c + self.keys * by_key,
        )

    @cached_property
    def _spectra(self) -> tuple[Tensor, Tensor]:
        return self._forward(self.rows), self._forward(self.keys)

    def gauges(self) -> Float[Tensor, "n_unknown direction"]:
        """Return the directions (a, b, c) in which the map does not change.

        Returns:
            Float64 [3 n, 3]: the three axes concatenated, one direction per column.
        """
        steps = torch.arange(self.rows.shape[-1], dtype=torch.float64, device=self.rows.device)
        return gauges(Axes(steps, steps, steps))

    def _forward(self, values: Tensor) -> Tensor:
        return torch.fft.rfft(values, n=_length(values.shape[-1]))

    def _back(self, spectrum: Tensor) -> Tensor:
        tokens = self.rows.shape[-1]
        return torch.fft.irfft(spectrum, n=_length(tokens))[..., :tokens]


def additive_pairs(
    rows: Bool[Tensor, "... n"], keys: Bool[Tensor, "... n"], window: int | None = None
) -> AdditivePairs:
    """Return the pairs of rows with keys that are not later and are inside the window.

    Args:
        rows: Mask [..., n] of the queries that take part.
        keys: Mask [..., n] of the keys that take part.
        window: Keys that a row sees, itself included; None: all earlier ones.

    Returns:
        The pairs and their counts.
    """
    counts = pair_counts(keys, window, rows)
    # Compared by identity, since comparing two masks would wait for the device
    triangle = rows is keys and (window is None or window >= keys.shape[-1]) and is_whole(keys)
    made = Axes(counts.distance, counts.query, counts.key)
    return AdditivePairs(rows.to(torch.float64), keys.to(torch.float64), window, triangle, made)


def additive_pairs_of(valid: Bool[Tensor, "prompt token"], window: int | None) -> AdditivePairs:
    """Return the pairs of the valid tokens of a batch, made once for all its layers.

    Args:
        valid: Mask [prompt, token].
        window: Keys that a row sees; None: all earlier ones.

    Returns:
        The pairs, with masks [prompt, 1, token].
    """
    # [prompt, 1, token]: the axis of heads broadcasts
    shown = by_head(valid)
    return once(("additive", window), lambda: additive_pairs(shown, shown, window), valid)


def _length(tokens: int) -> int:
    """A fast transform length at which correlations of `tokens` entries do not wrap around."""
    # Lags run from -(n - 1) to n - 1: with fewer than 2n - 1 entries negative ones would alias
    return fast_length(2 * tokens)


def _first(values: Tensor, count: int | None) -> Tensor:
    """Return `values` with zeros from entry `count` on."""
    if count is None or count >= values.shape[-1]:
        return values
    return torch.where(torch.arange(values.shape[-1], device=values.device) < count, values, 0)


# The axes are results here, so the residual goes down to rounding; `position_cells` needs only a
# correlation and stops at 1e-6
TOLERANCE = 1e-11
# Some sets of pairs leave more directions open than the gauges; the ridge must then exceed the
# solver's residual
LEAST_RIDGE = 100 * TOLERANCE
"""Smallest ridge for pairs that do not form a whole triangle; a smaller ridge is replaced by it."""


def fit_axes(
    sums: Axes, valid: Bool[Tensor, "prompt token"], window: int | None, ridge: float
) -> Axes:
    """Return the axes of the ridge fit over the pairs of valid tokens in the window.

    A distance is a difference of token indices, including invalid tokens between.

    Args:
        sums: Diagonal, row and column sums of the map, float64 [..., prompt, head, token].
        valid: Mask [prompt, token].
        window: Keys that a row sees; None: all earlier ones.
        ridge: Weight of the squared axes, positive.

    Returns:
        Axes [..., prompt, head, token], float64, in units of the map; 0 where no pair is seen.
    """
    triangles, others = _triangles(valid, window)
    if is_whole(valid) and not others:
        # All prompts have one length and no padding: one solve for the batch, without slices
        return fit_triangle(sums, ridge)
    axes = Axes(*(torch.zeros_like(part) for part in sums))
    # Prompts with equal start and length share a factorization and are solved together
    for (start, length), prompts in triangles.items():
        tokens = slice(start, start + length)
        # Left padding shifts rows and keys, but distances always start at 0
        spans = (slice(0, length), tokens, tokens)
        fitted = fit_triangle(
            Axes(
                *(
                    part[..., prompts, :, :][..., span]
                    for part, span in zip(sums, spans, strict=True)
                )
            ),
            ridge,
        )
        for part, span, values in zip(axes, spans, fitted, strict=True):
            part[..., prompts, :, span] = values
    if others:
        pairs = additive_pairs(valid[others][:, None], valid[others][:, None], window)
        fitted = fit_pairs(Axes(*(part[..., others, :, :] for part in sums)), pairs, ridge)
        for part, values in zip(axes, fitted, strict=True):
            part[..., others, :, :] = values
    return axes


def fit_pairs(sums: Axes, pairs: AdditivePairs, ridge: float) -> Axes:
    """Return the axes of the ridge fit over any pairs, by conjugate gradients.

    Args:
        sums: Diagonal, row and column sums of the map, float64 [..., n].
        pairs: The seen pairs; leading dimensions broadcast.
        ridge: Weight of the squared axes, positive.

    Returns:
        Axes [..., n], float64.
    """

    def apply(unknowns: Tensor) -> Tensor:
        # The solver sees one vector of 3 n unknowns: a, b and c side by side
        return torch.cat(pairs.sums(Axes(*unknowns.chunk(3, -1))), -1)

    solution = conjugate_gradients(
        apply,
        torch.cat(sums, -1),
        torch.cat(pairs.counts, -1),
        pairs.gauges(),
        max(ridge, LEAST_RIDGE),
        TOLERANCE,
    )
    return Axes(*solution.chunk(3, -1))


def fit_correlation(
    axes: Axes, sums: Axes, square: Float[Tensor, "*layer prompt head"], pairs: AdditivePairs
) -> Float[Tensor, "*layer prompt head"]:
    """Return the Pearson correlation of a map and its fit over the seen pairs.

    Args:
        axes: The fit [..., prompt, head, token].
        sums: Diagonal, row and column sums of the map, of the same shape.
        square: Sum of the map's squares [..., prompt, head], float64.
        pairs: The seen pairs.

    Returns:
        Correlation [..., prompt, head], float64; NaN if a side varies only by rounding.
    """
    # M x gives both moments of the fit: its sum over diagonals, and its sum of squares x . M x
    of_fit = pairs.sums(axes)
    # Both inner products at once: [with the fit or the map, axis, prompt, head, token]
    both = torch.stack([*of_fit, *sums]).unflatten(0, (2, 3))
    squares = (torch.stack(axes) * both).sum((1, -1))
    return pearson(
        count=pairs.total,
        total=sums.distance.sum(-1),
        square=square,
        fitted_total=of_fit.distance.sum(-1),
        fitted_square=squares[0],
        product=squares[1],
    )


def pearson(
    count: Tensor,
    total: Tensor,
    square: Tensor,
    fitted_total: Tensor,
    fitted_square: Tensor,
    product: Tensor,
) -> Tensor:
    """Return the Pearson correlation from raw sums over pairs.

    Args:
        count: Number of pairs; all arguments are float64 of one shape, or broadcast.
        total: Sum of the first side.
        square: Sum of its squares.
        fitted_total: Sum of the second side.
        fitted_square: Sum of its squares.
        product: Sum of the products of both sides.

    Returns:
        Correlation in -1 .. 1, float64; NaN where a side varies by rounding only.
    """
    # In float64 throughout: raw moments are subtracted, and the means may dwarf the spread
    moments = torch.stack([total, fitted_total, square, fitted_square, product]) / count
    variances = variance_of(moments[2:4], moments[:2]).prod(0)
    covariance = moments[4] - moments[:2].prod(0)
    # With rounding a perfect fit may exceed 1
    return (covariance / variances.sqrt()).clamp(-1, 1).masked_fill(variances <= 0, torch.nan)


def inner_product(left: Axes, right: Axes) -> Tensor:
    """Return a.a' + b.b' + c.c' of two sets of axes.

    Args:
        left: Axes [..., n].
        right: Axes of the same shape.

    Returns:
        Sum over all entries [...].
    """
    return (torch.stack(left) * torch.stack(right)).sum((0, -1))


def _triangles(
    valid: Bool[Tensor, "prompt token"], window: int | None
) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """Return prompts that are whole triangles by (first token, length), and the others."""
    triangles: dict[tuple[int, int], list[int]] = {}
    others: list[int] = []
    for prompt, (first, end, count) in enumerate(extents(valid)):
        # No gap between valid tokens, and the window hides none of them
        if count and end - first == count and (window is None or window >= count):
            triangles.setdefault((first, count), []).append(prompt)
        elif count:
            others.append(prompt)
    return triangles, others
