"""Find the token whose key a slot of a cache holds.

    d(s, j) = | x_s / |x_s| - k_j / |k_j| |       of features that no rotation changes: the lengths of
                                                  the pairs of all heads

Slot s may hold token j if d(s, j) is the smallest distance of the slot, within the rounding of the
cache. Equal tokens have equal keys in a first layer. Among them a slot takes the token with the
longest run: slots s, s + 1, ... with tokens j, j + 1, ... whose positions continue too. This module
knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FARTHEST = 0.25
"""Distance of unit vectors at which two keys always count as different."""
_STEPS = (-1, 0, 1, 2)
"""Differences of positions of neighbors within a run: turned back, not turned, as usual, twice."""
_LONG = 3
"""Least length of two runs between which other slots count as misplaced."""
_BLOCK = 256
"""Number of slots that are compared with all tokens at once."""


@dataclass(frozen=True)
class Match:
    """Distances of cached keys from keys of the tokens."""

    nearest: Int[Tensor, "slot"]
    distance: Float[Tensor, "slot"]
    """Distance to the nearest token."""
    compatible: Bool[Tensor, "slot token"]

    @property
    def known(self) -> Bool[Tensor, "slot"]:
        """Slots that hold the key of one of the tokens."""
        return self.compatible.any(1)


def match_tokens(
    cached: Float[Tensor, "slot feature"], plain: Float[Tensor, "token feature"], step: float
) -> Match:
    """Compare the keys of all slots with the keys of all tokens.

    Args:
        cached: Features of cached keys.
        plain: Features of the tokens' keys.
        step: Distance due to the rounding of keys.

    Returns:
        The match; a cache with coarser rounding, such as a quantized one, has a wider tolerance.
    """
    # A token of padding has a key of zeros, which has no direction
    empty = (cached == 0).all(1)[:, None] & (plain == 0).all(1)
    cached, plain = (
        part / part.norm(dim=1, keepdim=True).clamp_min(1e-30) for part in (cached, plain)
    )
    blocks = [
        (2 - 2 * block @ plain.T).clamp_min(0).sqrt().float() for block in cached.split(_BLOCK)
    ]
    distances = torch.cat(blocks).masked_fill(empty, 0.0)
    least, nearest = distances.min(1)
    typical = float(least.median())
    allowed = min(max(3 * typical, step), FARTHEST)
    spread = max(typical, step)
    compatible = (distances <= allowed) & (distances <= least[:, None] + spread)
    return Match(nearest, least, compatible)


def choose_tokens(
    compatible: Bool[Tensor, "slot token"],
    positions: Int[Tensor, "slot"] | None,
    told: Bool[Tensor, "slot"] | None,
) -> Int[np.ndarray, "slot"]:
    """Choose a token for every slot.

    Args:
        compatible: True for a slot and a token whose key it may hold.
        positions: Positions of the keys; None if unknown.
        told: Slots with known positions.

    Returns:
        Index of the token, -1 if no token is compatible.
    """
    may = compatible.numpy()
    slots, tokens = may.shape
    steps = None
    if positions is not None and told is not None:
        clear = told.numpy()
        steps = np.isin(np.diff(positions.numpy()), _STEPS) | ~(clear[1:] & clear[:-1])
    length = np.zeros((slots + 1, tokens + 1), dtype=np.int32)
    for slot in range(slots - 1, -1, -1):
        goes_on = steps is None or slot == slots - 1 or bool(steps[slot])
        length[slot, :-1] = np.where(may[slot], 1 + length[slot + 1, 1:] * goes_on, 0)
    runs: list[tuple[int, int, int]] = []
    slot, last = 0, -1
    while slot < slots:
        longest = int(length[slot].max())
        if longest == 0:
            slot += 1
            continue
        starts = np.flatnonzero(length[slot] == longest)
        own = -1 if positions is None else int(positions[slot])
        start = next(
            (
                int(starts[places][0])
                for places in (starts == own, starts == slot, starts > last)
                if places.any()
            ),
            int(starts[0]),
        )
        runs.append((slot, start, longest))
        slot, last = slot + longest, start + longest - 1
    chosen = np.full(slots, -1)
    for slot, start, longest in runs:
        chosen[slot : slot + longest] = np.arange(start, start + longest)
    if any(longest >= _LONG for *_, longest in runs):
        at = None if positions is None else positions.numpy()
        for first, last in _between(runs, slots, tokens, at):
            chosen[first:last] = -1
    return chosen


def _between(
    runs: Sequence[tuple[int, int, int]], slots: int, tokens: int, positions: np.ndarray | None
) -> Iterator[tuple[int, int]]:
    """Find slots between two long runs of one line: their keys belong elsewhere in the text."""
    ends = [(0, 0, 0), *(run for run in runs if run[2] >= _LONG)]
    ends += [(slots, tokens, 0)] if slots == tokens else []
    for before, after in pairwise(ends):
        first, last, token = before[0] + before[2], after[0], after[1] - after[0]
        if last <= first or token != before[1] - before[0]:
            continue
        # The positions of these slots count on, as for the tokens between the runs.
        line = None if positions is None else positions[max(first - 1, 0) : last + 1]
        if line is None or bool((np.diff(line) == 1).all()):
            yield first, last
