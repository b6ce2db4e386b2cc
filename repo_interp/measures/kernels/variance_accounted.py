"""How much of the logits' variance rotary components account for (HoPE, eq. 5), alone or in bands.

    VAF = 100 (1 - var(y - C) / var(y)),   C a component, or the sum of a band's components, y the sum of all
    VAF as printed = 100 (1 - sum(y - C) / sum(y)) = 100 sum(C) / sum(y)

The first is the standard definition; the second is the formula in the paper: unbounded, and ill-conditioned where
sum(y) is near 0. Both over seen pairs (from the components' mean and covariance) or on curves over distances.
Per cent. NaN where the logits do not vary, or sum to exactly 0.

Knows nothing about how moments and curves were made.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def variance_accounted(
    covariance: Float[Tensor, "... component component"],
) -> Float[Tensor, "... component"]:
    """VAF of each component alone, in per cent."""
    logits = covariance.sum((-1, -2))
    with_logits, own = covariance.sum(-1), covariance.diagonal(dim1=-2, dim2=-1)
    return _share(2 * with_logits - own, logits[..., None])


def band_variance_accounted(
    covariance: Float[Tensor, "... component component"], bands: Bool[Tensor, "... band component"]
) -> Float[Tensor, "... band"]:
    """VAF of each band's components taken together, in per cent: 0 for an empty band, 100 for all components."""
    outside = (~bands).to(covariance.dtype)
    left = torch.einsum("...br,...rs,...bs->...b", outside, covariance, outside)
    logits = covariance.sum((-1, -2))[..., None]
    return _share(logits - left, logits)


def variance_accounted_as_printed(sums: Float[Tensor, "... component"]) -> Float[Tensor, "... component"]:
    """The printed formula, from sums or means of each component over the same pairs or distances. Per cent."""
    return _share(sums, sums.sum(-1, keepdim=True))


def curve_covariance(
    curves: Float[Tensor, "... component distance"], distances: Bool[Tensor, "... distance"]
) -> Float[Tensor, "... component component"]:
    """Covariance of the components' curves over the `distances` chosen, each counted once."""
    chosen = curves.masked_fill(~distances[..., None, :], 0)
    count = distances.sum(-1)[..., None, None]
    mean = chosen.sum(-1, keepdim=True) / count
    return chosen @ chosen.transpose(-1, -2) / count - mean @ mean.transpose(-1, -2)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, torch.nan, 100 * part / whole)
