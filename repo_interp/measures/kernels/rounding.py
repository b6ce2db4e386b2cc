"""What varies, and what only seems to: float32 passes round equal quantities to slightly different numbers.

    varies(v, s)    v > ROUNDING s        v: a variance, or a sum of squares about a mean; s: the same about 0

Tokens that are all equal have the same logits and positions wherever the index plays no part; ratios of what rounding leaves of
their variance would be noise that looks like a result. Knows nothing about what is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE = 64 * torch.finfo(torch.float32).eps
"""Of the size of a number: what the layers of a float32 pass may add to it."""
ROUNDING = RELATIVE**2


def varies(scatter: Tensor, square: Tensor) -> Tensor:
    """Whether `scatter` is more than the rounding of what has the sum of squares `square`."""
    return scatter > ROUNDING * square
