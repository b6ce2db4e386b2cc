"""The place - a head, or a head and a kind of segment - that stands out most on even prompts, judged on odd ones.

    chosen   argmax over places of the mean, over even prompts, of observed - control
    judged   observed, control and chance of that place, means over odd prompts: the best of many is no finding where it was chosen

Knows arrays only; nothing about what is observed, checkpoints or claims.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Chosen(NamedTuple):
    """What stands out on one half of the prompts, as it is on the other half."""

    place: tuple[int, ...]
    """Where it is: layer, head, and kind where there are kinds."""
    observed: float
    """Mean over the other half."""
    control: float
    """The same for random separators or shuffled segments."""
    chance: float
    """Share of their draws that are at least as high, mean over the other half."""
    by_prompt: Float[np.ndarray, " prompt"]

    @property
    def ratio(self) -> float:
        """Over its control; 0 where the control is 0."""
        return self.observed / self.control if self.control > 0 else 0.0

    @property
    def margin(self) -> float:
        """Above its control."""
        return self.observed - self.control


def stands_out(
    observed: Float[np.ndarray, "prompt *place"],
    control: Float[np.ndarray, "prompt *place"],
    chance: Float[np.ndarray, "prompt *place"],
) -> Chosen | None:
    """The place whose observed value is furthest above its control on even prompts, measured on odd ones.

    A prompt without separators or segments has NaN; a place needs two prompts with values in each half. None where no place has them.
    """
    margins = observed - control
    enough = np.isfinite(margins[::2]).sum(0) >= 2
    enough &= np.isfinite(margins[1::2]).sum(0) >= 2
    if not enough.any():
        return None
    means = np.where(np.isfinite(margins[::2]), margins[::2], 0.0).sum(0) / np.maximum(np.isfinite(margins[::2]).sum(0), 1)
    place = np.unravel_index(np.where(enough, means, -np.inf).argmax(), enough.shape)
    other = [array[(slice(1, None, 2), *place)] for array in (observed, control, chance)]
    known = np.isfinite(other[0])
    value, expected, reached = (float(array[known].mean()) for array in other)
    return Chosen(tuple(int(index) for index in place), value, expected, reached, other[0][known])
