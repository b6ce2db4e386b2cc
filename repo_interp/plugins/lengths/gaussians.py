"""Gaussians fitted to feature vectors, and the divergence between two.

Position Generalization, sec. 4.2 and table 2, in nats:

    KL(N_0 || N_1) = 1/2 (tr(C_1^-1 C_0) + (m_1 - m_0)^T C_1^-1 (m_1 - m_0) - d
                          + ln det C_1 - ln det C_0)

m, C: mean and covariance of the vectors, both from sums of x and x x^T, so that the sums of two
batches add up. `shrinkage` times the mean variance of C_1 is added to the diagonals of both C:
outputs that span fewer than d dimensions would give an infinite divergence. Each fit to n
independent vectors biases the divergence by about d^2 / 4n nats, and tokens of one document are far
from independent, so compare only fits to equally many vectors. Leading axes hold several Gaussians.
Float64.

This module knows nothing about where vectors come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class VectorSums:
    """Sums over vectors.

    The sum of two objects is over the vectors of both; the difference removes vectors again.
    """

    count: int | Int[Tensor, "fold"]
    """Number of vectors; with several folds, per fold."""
    total: Float[Tensor, "*item d"]
    square: Float[Tensor, "*item d d"]

    # Sums instead of fits, so that batches add up and a group can be removed exactly
    def __add__(self, other: VectorSums) -> VectorSums:
        return VectorSums(
            self.count + other.count, self.total + other.total, self.square + other.square
        )

    def __sub__(self, other: VectorSums) -> VectorSums:
        return VectorSums(
            self.count - other.count, self.total - other.total, self.square - other.square
        )

    def __getitem__(self, folds: Any) -> VectorSums:
        """Select folds."""
        return VectorSums(self.count[folds], self.total[folds], self.square[folds])  # pyright: ignore[reportIndexIssue]

    @property
    def counts(self) -> list[int]:
        """Number of vectors of every fold."""
        return [self.count] if isinstance(self.count, int) else self.count.tolist()

    @property
    def mean(self) -> Float[Tensor, "*item d"]:
        """Mean vector."""
        return self.total / self._count_along(self.total)

    @property
    def covariance(self) -> Float[Tensor, "*item d d"]:
        """Covariance, divided by the number of vectors."""
        # Divided by n, as in the maximum-likelihood fit of the divergence, not by n - 1
        mean = self.mean
        return self.square / self._count_along(self.square) - mean[..., None] * mean[..., None, :]

    def _count_along(self, sums: Tensor) -> int | Tensor:
        """The count with as many axes as `sums`; folds are the first axis."""
        if isinstance(self.count, int):
            return self.count
        return self.count.to(sums).reshape(-1, *[1] * (sums.ndim - 1))


def fold_sums(
    vectors: Float[Tensor, "set *item vector d"], folds: Sequence[int], count: int
) -> VectorSums:
    """Sum sets of vectors by folds.

    Args:
        vectors: Sets of equally many vectors.
        folds: Fold of every set.
        count: Number of folds.

    Returns:
        Sums of `count` folds along the first axis; 0 for folds without a set.
    """
    found = vector_sums(vectors)
    into = torch.tensor(folds)
    total, square = (
        sums.new_zeros(count, *sums.shape[1:]).index_add_(0, into.to(sums.device), sums)
        for sums in (found.total, found.square)
    )
    return VectorSums(into.bincount(minlength=count) * found.count, total, square)


def leave_one_out(sums: VectorSums, count: int) -> VectorSums:
    """Sum all folds, then all folds but one, for each of the first `count` folds.

    Leaving out a fold costs no forward pass.

    Args:
        sums: Sums of folds along the first axis.
        count: Number of folds that are left out, one at a time.

    Returns:
        Sums of 1 + `count` sets along the first axis.
    """
    whole = VectorSums(*(some.sum(0, keepdim=True) for some in _parts(sums)))
    without = whole - sums[:count]
    return VectorSums(
        *(torch.cat(pair) for pair in zip(_parts(whole), _parts(without), strict=True))
    )


def _parts(sums: VectorSums) -> tuple[Tensor, Tensor, Tensor]:
    return torch.as_tensor(sums.count), sums.total, sums.square


def vector_sums(vectors: Float[Tensor, "*item vector d"]) -> VectorSums:
    """Sum vectors and their outer products in float64.

    Args:
        vectors: One Gaussian per leading index.

    Returns:
        Count and sums.
    """
    # Squares of outputs are summed over thousands of tokens and then nearly cancel.
    exact = vectors.detach().to(torch.float64)
    return VectorSums(exact.shape[-2], exact.sum(-2), exact.mT @ exact)


def gaussian_divergence(
    of: VectorSums, to: VectorSums, shrinkage: float = 1e-4
) -> Float[Tensor, "*item"]:
    """Compute KL(N_of || N_to).

    Args:
        of: Sums over the vectors of the first Gaussian.
        to: Sums over the vectors of the second.
        shrinkage: Share of the mean variance of `to` that is added to both diagonals.

    Returns:
        Divergences in nats, float64.

    Raises:
        ValueError: Either Gaussian has fewer than 2 vectors.
    """
    if min(*of.counts, *to.counts) < 2:
        raise ValueError(f"a Gaussian needs at least 2 vectors; got {of.count} and {to.count}")
    width = of.total.shape[-1]
    first, second = of.covariance, to.covariance
    # The same amount on both diagonals, so that equal Gaussians keep a divergence of 0
    level = shrinkage * second.diagonal(0, -2, -1).mean(-1)[..., None, None]
    widening = level * torch.eye(width, dtype=torch.float64, device=of.total.device)
    first, second = first + widening, second + widening
    # One factorization serves the distance, the trace and the determinant.
    factor, apart = torch.linalg.cholesky(second), (to.mean - of.mean)[..., None]
    distance = (apart.mT @ torch.cholesky_solve(apart, factor))[..., 0, 0]
    spread = torch.cholesky_solve(first, factor).diagonal(0, -2, -1).sum(-1)
    # log det of the second from its factor: 2 sum log L_ii. The first has no factor yet.
    logarithms = (
        2 * factor.diagonal(0, -2, -1).log().sum(-1) - torch.linalg.slogdet(first).logabsdet
    )
    return (spread + distance - width + logarithms) / 2


def principal_plane(sums: VectorSums) -> tuple[Float[Tensor, "d 2"], Float[Tensor, "2"]]:
    """Find the two directions of largest variance (PCA).

    Args:
        sums: Sums over vectors.

    Returns:
        Directions, whose largest entries are positive, and their shares of the variance.
    """
    variances, directions = torch.linalg.eigh(sums.covariance)
    # eigh sorts variances upwards, so the largest two are last.
    plane, shares = directions[:, [-1, -2]], variances[[-1, -2]] / variances.sum()
    # eigh leaves signs open; without a rule the picture could be flipped on another machine.
    largest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return plane * largest.sign(), shares
