"""Pieces of a cache: runs of slots with consecutive tokens at evenly spaced positions.

A piece has tokens j, j + 1, ... at positions that change by a constant step: 1 counts (from p = j on,
or moved by p - j), 0 is not turned, 2 turned twice, -1 turned back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

_STEPS = (-1, 0, 1, 2)


@dataclass(frozen=True)
class Piece:
    """A run of slots with consecutive tokens at evenly spaced positions."""

    tokens: tuple[int, int]
    """First and last."""
    positions: tuple[int, int]

    @property
    def step(self) -> int:
        """Difference of positions of neighbors; 1 for a single slot."""
        count = self.tokens[1] - self.tokens[0]
        return (self.positions[1] - self.positions[0]) // count if count else 1

    @property
    def moved(self) -> int:
        """Position of the first token minus its index."""
        return self.positions[0] - self.tokens[0]


def pieces_of(
    tokens: Int[np.ndarray, "slot"], positions: Float[np.ndarray, "slot"]
) -> Iterator[Piece]:
    """Divide the slots of a head into pieces.

    Args:
        tokens: Index of each slot's token, -1 for a slot without one.
        positions: Positions of the slots, NaN where unknown.

    Yields:
        Pieces in the order of slots.
    """
    known = np.flatnonzero((tokens >= 0) & ~np.isnan(positions))
    at = [(int(tokens[slot]), int(positions[slot])) for slot in known]
    begin = 0
    while begin < len(at):
        end, step = begin, None
        for (token, place), (after, there) in pairwise(at[begin:]):
            if after != token + 1 or step not in (None, there - place):
                break
            if step is None and there - place not in _STEPS:
                break
            step, end = there - place, end + 1
        yield Piece((at[begin][0], at[end][0]), (at[begin][1], at[end][1]))
        begin = end + 1
