"""Order that rows of numbers tell by distance, and the least distance from which they tell it.

    order(d) = 2 share(z_{i+d} > z_i) - 1 over i        equal numbers (rounding.equal_within) half
    resolution = least d from which |mean of order over texts| is ORDERED and more, in one direction
                 in all texts, up to the reach

A text tells the order at d where it has 3 d tokens or more: a single step tells none. The reach is
the largest d at which the texts together hold `SPANS` spans of d tokens side by side. A walk
without drift moves one way over all of them with a probability of 2^(1 - SPANS), under 1 %, so it
has no resolution. Distances are all up to `DENSE`, then `PER_OCTAVE` of an octave up to `LONGEST`.
This module knows nothing about positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.measures.kernels.seen_pairs import once
from repo_interp.runtime.memory import memory_for

COUNTS = 4
"""Resolution in tokens up to which a row counts them."""
ORDERED = 0.8
"""Value of the order at which 90 % of pairs have one order."""
SPANS = 8
"""Spans of d tokens that the texts hold side by side, at least, where d is judged."""
FEWEST = 3
"""Distances that a text holds, at least, where it tells the order."""
DENSE, PER_OCTAVE, LONGEST = 32, 16, 4096
AT_ONCE, _PER_PAIR = 2**24, 64
"""Pairs that are compared at a time on a processor, and bytes that each takes."""
_OCTAVES = range(PER_OCTAVE * 7 + 1)
DISTANCES = np.array(
    sorted({*range(1, DENSE + 1), *(round(DENSE * 2 ** (step / PER_OCTAVE)) for step in _OCTAVES)})
)
"""Distances in tokens at which a resolution is looked for."""
DOUBLING = 2 ** np.arange(int(np.log2(LONGEST)) + 1)
"""Powers of two as distances in tokens."""


def order_by_distance(
    values: Float[Tensor, "*any token"],
    present: Bool[Tensor, "*any token"],
    distances: Int[np.ndarray, " distance"],
    equal: Float[Tensor, "*any 1"],
) -> Float[Tensor, "*any distance"]:
    """Return 2 share(later > earlier) - 1 over pairs of present numbers, by distance.

    Args:
        values: Rows of numbers.
        present: Numbers that count; they stand first.
        distances: Places between the numbers of a pair, ascending.
        equal: Difference up to which two numbers are equal; they count half.

    Returns:
        Orders from -1 to 1, float64; NaN without a pair at the distance.
    """
    count = values.shape[-1]
    values, _, _ = torch.broadcast_tensors(values, present, equal)
    held = distances[: int(np.searchsorted(distances, count))]
    found = values.new_full((*values.shape[:-1], len(distances)), torch.nan, dtype=torch.float64)
    # All distances of a short text in one step: an accelerator waits for every small one
    memory = memory_for(values.device, _PER_PAIR * AT_ONCE)
    at_once = max(1, memory // (_PER_PAIR * max(1, values.numel())))
    for first in range(0, len(held), at_once):
        some = held[first : first + at_once]
        # All layers of a pass share the mask, so it is copied to a device once
        later = once(
            ("later", *some), lambda some=some: _later(count, some, values.device), present
        )
        places = later.clamp_max(count - 1)
        # Present numbers come first, so if the later one is present, the earlier one is too
        pairs = present[..., places] & (later < count)
        step = values[..., places] - values[..., None, :]
        told = (step > equal[..., None]).double() - (step < -equal[..., None]).double()
        # No number, no order; beyond the present numbers nothing counts
        told = told.masked_fill_(step != step, torch.nan).masked_fill_(~pairs, 0)
        found[..., first : first + len(some)] = told.sum(-1) / pairs.sum(-1)
    return found


def _later(
    count: int, distances: Int[np.ndarray, " distance"], device: torch.device
) -> Int[Tensor, "distance token"]:
    """The places at each distance after each place."""
    apart = torch.as_tensor(distances, device=device)[:, None]
    return torch.arange(count, device=device) + apart


@dataclass(frozen=True)
class OrderSums:
    """Orders at `DISTANCES`, summed over texts; they add."""

    total: Float[np.ndarray, "*row distance"]
    """Sum of orders over texts that tell it."""
    rising: Float[np.ndarray, "*row distance"]
    """Number of texts with an order above 0."""
    texts: Float[np.ndarray, "*row distance"]
    """Texts that tell the order."""
    spans: Float[np.ndarray, "*row distance"]
    """Spans of the distance that these hold side by side."""

    @cached_property
    def resolution(self) -> Float[np.ndarray, "*row"]:
        """Least distance in tokens from which pairs have one order; NaN without such a distance."""
        holds = self._tail >= ORDERED
        return np.where(holds.any(-1), DISTANCES[holds.argmax(-1)], np.nan)

    @cached_property
    def told(self) -> Float[np.ndarray, "*row"]:
        """Largest order from 0 to 1 that holds from some distance on; NaN where none is judged."""
        return np.where(self._judged.any(-1), self._tail.max(-1).clip(0), np.nan)

    @property
    def _judged(self) -> Bool[np.ndarray, "*row distance"]:
        return (self.spans >= SPANS) & (self.texts > 0)

    @cached_property
    def _tail(self) -> Float[np.ndarray, "*row distance"]:
        """Least order from a distance up to the reach; -1 beyond, and where texts disagree."""
        mean, judged = self.total / np.maximum(self.texts, 1), self._judged
        ways = []
        for agree, signed in ((self.rising == self.texts, mean), (self.rising == 0, -mean)):
            size = np.where(judged, np.where(agree, signed, -1.0), np.inf)
            ways.append(np.minimum.accumulate(size[..., ::-1], axis=-1)[..., ::-1])
        return np.where(judged, np.maximum(*ways), -1.0)


PARTS = ("total", "rising", "texts", "spans")


def told_by(
    values: Float[Tensor, "*layer text row token"],
    present: Bool[Tensor, " text #row token"],
    tokens: Int[np.ndarray, " text"],
    equal: Float[Tensor, "*any 1"],
) -> tuple[Float[Tensor, "*layer text row distance"], Float[Tensor, "*layer part row lag"]]:
    """Return the orders of texts by distance, and their sums.

    Args:
        values: Numbers of every text and row, perhaps of several layers.
        present: Numbers that count; they stand first.
        tokens: How many are present, by text.
        equal: Difference up to which two numbers are equal.

    Returns:
        Orders at those of `DOUBLING` that some text holds; and by `PARTS` the sums of `OrderSums`
        at `DISTANCES`. A row that is NaN has the order NaN, and no text tells its sums.
    """
    longest = int(max(tokens))
    # Beyond a third of the longest text no sum needs an order
    held = (longest > DISTANCES) & ((longest >= FEWEST * DISTANCES) | np.isin(DISTANCES, DOUBLING))
    order = order_by_distance(values, present, DISTANCES[held], equal)
    lengths = np.asarray(tokens)[:, None, None]

    def told_by() -> tuple[Tensor, ...]:
        """What follows from the lengths of texts, in one copy to a device."""
        told = (
            lengths >= FEWEST * DISTANCES[held],
            (lengths - 1) // DISTANCES[held],
            np.flatnonzero(held),
            np.flatnonzero(np.isin(DISTANCES[held], DOUBLING)),
        )
        together = torch.as_tensor(np.concatenate([*map(np.ravel, told)]), device=order.device)
        tells, spans, places, doubling = together.split([array.size for array in told])
        shape = told[0].shape
        return tells.view(shape) != 0, spans.view(shape), places, doubling

    tells, spans, places, doubling = once(("told_by", *tokens), told_by, present)
    known = tells & (order == order)
    parts = [order.nan_to_num() * known, (order > 0) & known, known, spans * known]
    sums = order.new_zeros((*order.shape[:-3], len(parts), order.shape[-2], len(DISTANCES)))
    sums[..., places] = torch.stack([part.double() for part in parts], -4).sum(-3)
    return order[..., doubling], sums
