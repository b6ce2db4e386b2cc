"""Variances and differences that are more than rounding of a float32 pass.

    variance > ROUNDING mean square        else it is rounding, and counts as 0
    |x - y| > equal_within(row)            else two numbers of a row are equal

Tokens that are all equal have the same logits and positions wherever the index plays no part;
ratios of their rounding errors would be noise that looks like a result. This module knows nothing
about measures.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

RELATIVE = 64 * torch.finfo(torch.float32).eps
"""Relative error that the layers of a float32 pass may add to a number."""
RANGE = 4 * RELATIVE
"""Range of a row, relative to its largest size, up to which it varies by rounding alone."""
EQUAL = 1e-6
"""Difference, relative to the range of a row, up to which two of its numbers are equal."""
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
    variance = torch.addcmul(square, mean, mean, value=-1)
    return variance.masked_fill(variance <= ROUNDING * square, 0)


def equal_within(
    values: Float[Tensor, "*any number"], missing: Bool[Tensor, "*any number"] | None = None
) -> Float[Tensor, "*any 1"]:
    """Return the difference up to which numbers of a row are equal but for rounding.

    Args:
        values: Rows of numbers.
        missing: Mask of numbers that do not count; None: all count.

    Returns:
        `EQUAL` times the range of the row, or two steps of float32 at its largest number where
        that is more; the largest number where the row varies by rounding alone.
    """
    if missing is None:
        least, most = values.aminmax(dim=-1, keepdim=True)
    else:
        least = values.masked_fill(missing, torch.inf).amin(-1, keepdim=True)
        most = values.masked_fill(missing, -torch.inf).amax(-1, keepdim=True)
    size, extent = torch.maximum(most, -least), most - least
    equal = torch.maximum(EQUAL * extent, 2 * torch.finfo(torch.float32).eps * size)
    return equal.masked_fill(extent <= RANGE * size, torch.finfo(values.dtype).max)
