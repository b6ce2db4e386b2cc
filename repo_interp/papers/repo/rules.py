"""When the claims of the RePo paper hold: thresholds and the functions that decide, written before anything was looked at.

    mirror    mean |z_copy - z_word| over mean |z_copy - z_other word| <= 1/4, over |z_copy - z_same word elsewhere| <= 1/2, r >= 0.9
    flat      range of the instruction's tokens over that of equally many consecutive words <= 1/4

A position that depends on the word alone is the same for a copy and its source, but for the same word elsewhere too: the second ratio
tells a mirror from that. Knows arrays only; nothing about claims, checkpoints or figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from repo_interp.papers.kit.lead import Lead

NEAR_PERFECT = 0.95
"""Exact match, mean over the lengths trained on."""
CEILING = 0.99
"""Score from which two checkpoints cannot be told apart. (For lengths beyond training and start layers this was added when YaRN had
brought every checkpoint of the zoo to 1.)"""
MIRROR_RANDOM, MIRROR_WORD, MIRROR_CORRELATION = 0.25, 0.5, 0.9
FLAT = 0.25
FAR_BELOW = 0.5
"""Largest range of positions over the context length."""
UNEVEN = 0.25
"""Standard deviation over the mean of the heads' ranges."""
HYBRID, RARE = 0.5, 0.1
"""Least share of hybrid chunks, and most of mono ones."""
PARAMETERS = 0.01
"""Most parameters that may be added, as a share, at the paper's size."""
SLOWER = 1.10
"""Most time a token, RePo over RoPE."""
ROBUST = 0.05
"""Most that the score may differ over starting layers."""


class Mirror(NamedTuple):
    """Distances of positions over the generated words of one prompt, in positions, and a correlation."""

    copies: float
    """Mean |z_copy - z_source|."""
    random: float
    """Mean |z_copy - z| over places of other words."""
    elsewhere: float
    """Mean |z_copy - z| over other places of the same word; NaN where no word is there twice."""
    correlation: float
    """Of z_copy with z_source; NaN where either is constant."""


def mirror(
    positions: Float[np.ndarray, " token"], words: Sequence[str | int], source: Sequence[int], copy: Sequence[int]
) -> Mirror:
    """How near each copy's position is to its source's; `words` says which token is which word, `source[k]` is what `copy[k]` copies.

    Every place of `source` is a place a copy could have come from.
    """
    z, named = np.asarray(positions, dtype=float), np.asarray(words)
    places, copies = np.asarray(source), np.asarray(copy)
    distance = np.abs(z[copies][:, None] - z[places][None])
    same = named[copies][:, None] == named[places][None]
    own = np.eye(len(places), dtype=bool)
    pairs = np.stack((z[copies], z[places]))
    varied = bool((np.ptp(pairs, axis=1) > 1e-9).all())
    return Mirror(
        float(distance[own].mean()),
        float(distance[~same].mean()) if (~same).any() else np.nan,
        float(distance[same & ~own].mean()) if (same & ~own).any() else np.nan,
        float(np.corrcoef(pairs)[0, 1]) if varied else np.nan,
    )


def is_mirror(copies: float, random: float, elsewhere: float, correlation: float) -> bool:
    """Whether means over prompts show a mirror that is more than a position a word. NaN never does."""
    return bool(copies <= MIRROR_RANDOM * random and copies <= MIRROR_WORD * elsewhere and correlation >= MIRROR_CORRELATION)


def flatness(positions: Float[np.ndarray, " token"], instruction: Sequence[int], words: Sequence[int]) -> float:
    """Range over the instruction's tokens over the mean range of windows of equally many consecutive words; NaN for constant words."""
    z = np.asarray(positions, dtype=float)
    width = min(len(instruction), len(words))
    windows = np.lib.stride_tricks.sliding_window_view(z[list(words)], width)
    of_words = float(np.ptp(windows, axis=1).mean())
    return float(np.ptp(z[list(instruction)])) / of_words if of_words > 0 else np.nan


class Spreading(NamedTuple):
    """Whether positions spread as the paper says (R5)."""

    grows: bool
    below: bool
    uneven: bool
    growth: Lead
    largest: float
    """Largest range over the context length."""
    variation: float
    """Standard deviation over mean of the heads' ranges."""

    @property
    def holds(self) -> bool:
        """All three."""
        return self.grows and self.below and self.uneven


def spreading(
    short: Float[np.ndarray, "prompt head"], long: Float[np.ndarray, "prompt head"], short_length: int, long_length: int
) -> Spreading:
    """Judge ranges of the learned heads on prompts of two lengths. The prompts differ, so errors add."""
    means = short.mean(axis=1), long.mean(axis=1)
    error = np.sqrt(sum(values.var(ddof=1) / len(values) for values in means)) if min(map(len, means)) > 1 else np.inf
    growth = Lead(float(means[1].mean() - means[0].mean()), float(error), f"{len(means[1])} prompts of each length")
    largest = max(float(short.max()) / short_length, float(long.max()) / long_length)
    heads = long.mean(axis=0)
    variation = float(heads.std() / heads.mean()) if heads.mean() > 0 else 0.0
    return Spreading(growth.holds, largest <= FAR_BELOW, variation >= UNEVEN, growth, largest, variation)


def hybrid_dominates(constant: float, mono: float, hybrid: float) -> bool:
    """Whether most chunks are hybrid, mono ones rare, and constant ones more frequent than mono ones."""
    return hybrid >= HYBRID and mono <= RARE and constant > mono


def grid_agreement(shares: Float[np.ndarray, "cell pattern"]) -> Bool[np.ndarray, " cell"]:
    """For each cell of a grid of (constant, mono, hybrid) shares, whether the same is seen there."""
    return np.array([hybrid_dominates(*map(float, cell)) for cell in shares])
