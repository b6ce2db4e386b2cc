"""HoPE, high-frequency rotary position encoding, and its ablations (Chen et al. 2025, sec. 4.1, 5,
eq. 6-7).

With training length L, a rotary component of frequency theta (radians per position) turns within L

    high        theta >= 2 pi / L             at least once
    activated   pi / L < theta < 2 pi / L     more than half a turn: the "U shape" that the paper blames
    low         theta <= pi / L               at most half a turn

    HoPE      high ones rotated; the others position-independent: theta = 0, q_l . k_l stays         (eq. 7)
    AB1       activated ones position-independent, low ones still rotated                            (table 3)
    AB2       low ones position-independent, activated ones still rotated
    AB3       activated and low ones replaced by high-frequency ones: none is position-independent
    removed   activated and low ones taken out of the dot product, nothing put in their place

The paper does not say which high frequencies AB3 takes: here the kept ones are repeated in order,
from the fastest.

Knows nothing about scaling: interpolate or stretch (scaling.py) the frequencies that come out; 0
stays 0.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def high_components(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Bool[Tensor, "component"]:
    """Which components HoPE keeps rotated.

    ValueError where there is none: no position would be left.
    """
    high = frequencies >= 2.0 * math.pi / _at_least_one(training_length)
    if not bool(high.any()):
        raise ValueError(
            f"no frequency reaches 2 pi / {training_length}, the largest is "
            f"{float(frequencies.max()):.3g}: "
            "HoPE would keep no position; the training length must be longer"
        )
    return high


def activated_components(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Bool[Tensor, "component"]:
    """Which components are "activated": pi / L < theta < 2 pi / L."""
    return ~low_components(frequencies, training_length) & (
        frequencies < 2.0 * math.pi / training_length
    )


def low_components(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Bool[Tensor, "component"]:
    """Which components lie below the activated ones: theta <= pi / L."""
    return frequencies <= math.pi / _at_least_one(training_length)


def hope_frequencies(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """HoPE: the high frequencies as they are, 0 for all others. Radians per position."""
    return frequencies.where(high_components(frequencies, training_length), 0.0)


def without_activated(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """AB1: 0 for the activated components only."""
    return frequencies.where(~activated_components(frequencies, training_length), 0.0)


def without_low(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """AB2: 0 for the low components only."""
    return frequencies.where(~low_components(frequencies, training_length), 0.0)


def only_high(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """AB3: the activated and low components take the high frequencies, in their order and over
    again.
    """
    high = high_components(frequencies, training_length)
    fast = frequencies[high]
    replaced = frequencies.clone()
    replaced[~high] = fast[torch.arange(int((~high).sum()), device=fast.device) % len(fast)]
    return replaced


def keep_components(
    features: Float[Tensor, "... d_head"], kept: Bool[Tensor, "component"]
) -> Float[Tensor, "... d_head"]:
    """Features with both halves of the components not kept set to 0, which takes them out of the
    dot product.

    One of queries and keys is enough. `logit_scale` is left alone: 1/sqrt(d_head) of the full head.
    """
    if features.shape[-1] != 2 * len(kept):
        raise ValueError(
            f"{len(kept)} components need features of width {2 * len(kept)}; got "
            f"{features.shape[-1]}"
        )
    return features * torch.cat((kept, kept)).to(features.dtype)


def _at_least_one(training_length: int) -> int:
    if training_length < 1:
        raise ValueError(f"a training length of at least 1 token was wanted; got {training_length}")
    return training_length
