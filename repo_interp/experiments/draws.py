"""Draw different random sets, as controls of a chosen set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import Any

import numpy as np


def drawn_sets(others: Sequence[Any], size: int, draws: int, seed: int) -> list[list[Any]]:
    """Draw different sets at random.

    Args:
        others: Items to draw from; their order is kept within a set.
        size: Items of a set.
        draws: Number of sets.
        seed: Seed of the draws.

    Returns:
        `draws` sets, or all sets if fewer exist.
    """
    generator = np.random.default_rng([seed, size])
    drawn = distinct(
        # As sorted places, so that one set in two orders is recognized as the same
        lambda: sorted(generator.permutation(len(others))[:size].tolist()),
        comb(len(others), size),
        draws,
    )
    return [[others[place] for place in places] for places in drawn]


def distinct(draw: Callable[[], Any], there_are: int, wanted: int) -> list[Any]:
    """Call a function until it has returned enough different results.

    Args:
        draw: Returns a random result.
        there_are: Number of different results that exist.
        wanted: Number of results.

    Returns:
        Different results in the order in which they were drawn.
    """
    found = []
    # No more than exist, else the loop would never end.
    while len(found) < min(there_are, wanted):
        drawn = draw()
        found += [] if drawn in found else [drawn]
    return found
