"""Bands of rotary frequencies for a training length L (HoPE sec. 3.3.2).

    activated: pi / L < theta < 2 pi / L - from half a turn to a whole one over the training length
    low: theta <= pi / L,   high: theta >= 2 pi / L

Knows nothing about what components do.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BANDS = ("activated", "low", "high")


def frequency_bands(frequencies: Float[Tensor, "component"], training_length: int) -> Bool[Tensor, "band component"]:
    """Which components belong to which of `BANDS`, for a training length in tokens. NaN is in no band."""
    lowest, highest = math.pi / training_length, 2 * math.pi / training_length
    activated = (frequencies > lowest) & (frequencies < highest)
    return torch.stack((activated, frequencies <= lowest, frequencies >= highest))
