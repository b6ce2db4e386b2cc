"""What varies, and what only seems to: float32 passes round equal quantities to slightly different
numbers.

    variance > ROUNDING mean square        else it is rounding, and counts as 0

Tokens that are all equal have the same logits and positions wherever the index plays no part;
ratios of what rounding leaves of their variance would be noise that looks like a result. Knows
nothing about what is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE = 64 * torch.finfo(torch.float32).eps
"""Of the size of a number: what the layers of a float32 pass may add to it."""
ROUNDING = RELATIVE**2


def variance_of(square: Tensor, mean: Tensor) -> Tensor:
    """The variance of what has the mean square `square` and the mean `mean`; 0 where that is
    rounding.
    """
    variance = square - mean**2
    return variance.masked_fill(variance <= ROUNDING * square, 0)
