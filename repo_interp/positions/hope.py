"""HoPE, high-frequency rotary position encoding, and ablations (Chen et al. 2025, sec. 4.1, 5).

With training length L, a rotary component of frequency theta (radians per position) turns within L

    high         theta >= 2 pi / L              at least once
    activated    pi / L < theta < 2 pi / L      more than half a turn: the cause of the "U shape"
                                                according to the paper
    low          theta <= pi / L                at most half a turn

    HoPE      only high components rotate; others are position-independent: theta = 0,
              q_l . k_l stays                                                        (eq. 6-7)
    AB1       activated components position-independent, low ones still rotated      (table 3)
    AB2       low components position-independent, activated ones still rotated
    AB3       activated and low components replaced by high ones: none position-independent
    removed   activated and low components removed from the dot product

The paper does not say which high frequencies AB3 takes; this module repeats the kept ones in order,
starting with the fastest.

This module knows nothing about scaling: interpolate or stretch (scaling.py) the resulting
frequencies; 0 stays 0.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def high_components(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Bool[Tensor, "component"]:
    """Return the components that HoPE rotates.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        Mask [component]: theta >= 2 pi / L.

    Raises:
        ValueError: There is no such component, so HoPE would have no positions.
    """
    high = frequencies >= 2.0 * math.pi / _require_positive(training_length)
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
    """Return the "activated" components: pi / L < theta < 2 pi / L.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        [component].
    """
    # By exclusion of the low components, so that the three bands partition the components.
    return ~low_components(frequencies, training_length) & (
        frequencies < 2.0 * math.pi / training_length
    )


def low_components(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Bool[Tensor, "component"]:
    """Return the low components, below the activated ones: theta <= pi / L.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        [component].
    """
    return frequencies <= math.pi / _require_positive(training_length)


def hope_frequencies(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """HoPE: keep the high frequencies, and set all others to 0.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        Radians per position [component].
    """
    # With frequency 0 a pair does not rotate, but stays in the dot product.
    return frequencies.where(high_components(frequencies, training_length), 0.0)


def without_activated(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """AB1: set the activated components to 0.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        Radians per position [component].
    """
    return frequencies.where(~activated_components(frequencies, training_length), 0.0)


def without_low(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """AB2: set the low components to 0.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        Radians per position [component].
    """
    return frequencies.where(~low_components(frequencies, training_length), 0.0)


def only_high(
    frequencies: Float[Tensor, "component"], training_length: int
) -> Float[Tensor, "component"]:
    """AB3: replace activated and low frequencies by the high ones, in order and repeatedly.

    Args:
        frequencies: Radians per position [component].
        training_length: L, in tokens.

    Returns:
        Radians per position [component].
    """
    high = high_components(frequencies, training_length)
    # Repeated in order, since the paper does not say which frequencies to take.
    fast = frequencies[high]
    replaced = frequencies.clone()
    replaced[~high] = fast[torch.arange(int((~high).sum()), device=fast.device) % len(fast)]
    return replaced


def _require_positive(training_length: int) -> int:
    if training_length < 1:
        raise ValueError(f"a training length of at least 1 token was wanted; got {training_length}")
    return training_length
