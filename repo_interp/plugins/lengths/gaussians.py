"""Gaussians fitted to feature vectors, and the divergence between two.

Position Generalization, sec. 4.2 and table 2, in nats:

    KL(N_0 || N_1) = 1/2 (tr(C_1^-1 C_0) + (m_1 - m_0)^T C_1^-1 (m_1 - m_0) - d
                          + ln det C_1 - ln det C_0)

m, C: mean and covariance of the vectors, both from sums of x and x x^T, so that fits of two batches
add up. To C is added `shrinkage` times its mean variance on the diagonal: heads whose outputs fill
fewer than d dimensions would give an infinite divergence. A fit to n independent vectors is off by
about d^2 / 4n nats for each of the two - and tokens of one document are far from independent - so
compare only fits to equally many. Several Gaussians at once, along leading axes. Float64.

Knows nothing about where vectors come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class VectorSums:
    """Sums over vectors.

    The sum of two is over the vectors of both; the difference takes vectors away again.
    """

    count: int
    total: Float[Tensor, "*item d"]
    square: Float[Tensor, "*item d d"]

    # Sums instead of fits, so that batches add up and a group can be taken away exactly
    def __add__(self, other: VectorSums) -> VectorSums:
        return VectorSums(
            self.count + other.count, self.total + other.total, self.square + other.square
        )

    def __sub__(self, other: VectorSums) -> VectorSums:
        return VectorSums(
            self.count - other.count, self.total - other.total, self.square - other.square
        )

    @property
    def mean(self) -> Float[Tensor, "*item d"]:
        """Mean vector."""
        return self.total / self.count

    @property
    def covariance(self) -> Float[Tensor, "*item d d"]:
        """Covariance, divided by the number of vectors."""
        # Divided by n, as in the maximum-likelihood fit of the divergence, not by n - 1
        return self.square / self.count - self.mean[..., None] * self.mean[..., None, :]


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
    if min(of.count, to.count) < 2:
        raise ValueError(f"a Gaussian needs at least 2 vectors; got {of.count} and {to.count}")
    width = of.total.shape[-1]
    # The same amount on both diagonals, so that equal Gaussians keep a divergence of 0
    level = shrinkage * to.covariance.diagonal(0, -2, -1).mean(-1)[..., None, None]
    widening = level * torch.eye(width, dtype=torch.float64, device=of.total.device)
    first, second = of.covariance + widening, to.covariance + widening
    # One factorization serves the distance, the trace and the determinant.
    factor, apart = torch.linalg.cholesky(second), (to.mean - of.mean)[..., None]
    distance = (apart.mT @ torch.cholesky_solve(apart, factor))[..., 0, 0]
    spread = torch.cholesky_solve(first, factor).diagonal(0, -2, -1).sum(-1)
    # log det of the second from its factor: 2 sum log L_ii. Of the first no factor is at hand.
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
    # eigh sorts variances upwards, so the largest two stand last.
    plane, shares = directions[:, [-1, -2]], variances[[-1, -2]] / variances.sum()
    # eigh leaves signs open; without a rule the picture would flip from one machine to another.
    largest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return plane * largest.sign(), shares
