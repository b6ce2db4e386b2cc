"""Variances that are more than rounding of a float32 pass.

    variance > ROUNDING mean square        else it is rounding, and counts as 0

Tokens that are all equal have the same logits and positions wherever the index plays no part;
ratios of their rounding errors would be noise that looks like a result. Knows nothing about
measures.
"""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE = 64 * torch.finfo(torch.float32).eps
"""Relative error that the layers of a float32 pass may add to a number."""
# Squared, since it is held against mean squares
ROUNDING = RELATIVE**2


def variance_of(square: Tensor, mean: Tensor) -> Tensor:
    """Return a variance from a mean square and a mean.

    Args:
        square: Mean square.
        mean: Mean, of the same shape.

    Returns:
        `square` - `mean`^2; 0 where the difference is at most `ROUNDING` times `square`.
    """
    variance = square - mean**2
    return variance.masked_fill(variance <= ROUNDING * square, 0)
