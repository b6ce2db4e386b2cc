"""Schemes that rotate by the token index, by some components of it, or not at all.

    rope                 theta_r, by the token index
    nope, learned        no rotation (learned: vectors are added at the model's input)
    hope, hope_ab1..3    theta_r of some components                       (HoPE sec. 4.1, table 3)
    rope_high            theta_r; some components leave the dot product   (HoPE table 3, "removed")

Each is a function of a builder, a layer's rotation and the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.models.rotation import Rotation, of_chosen
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.hope import (
    high_components,
    hope_frequencies,
    only_high,
    without_activated,
    without_low,
)

Choice = Callable[[Tensor, int], Tensor]
"""Function of the frequencies of training and the training length that returns frequencies."""


def _still(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> SchemeParts:
    return SchemeParts("", None, None)


def _rotating(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> SchemeParts:
    return SchemeParts("", TokenIndex(), rotation.frequencies, rotation.attention_scaling)


def _rotating_some(
    choose: Choice, builder: SchemeBuilder, rotation: Rotation, d_head: int
) -> SchemeParts:
    chosen = _chosen(choose, builder, rotation)
    frequencies = of_chosen(chosen, rotation.unscaled, rotation.frequencies)
    return SchemeParts("", TokenIndex(), frequencies, rotation.attention_scaling)


def _without_slow(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> SchemeParts:
    kept = _chosen(high_components, builder, rotation)
    return SchemeParts(
        *("", TokenIndex(), rotation.frequencies, rotation.attention_scaling), components=kept
    )


def _chosen(choose: Choice, builder: SchemeBuilder, rotation: Rotation) -> Tensor:
    # Components are chosen by the frequencies of training, before their scaling.
    try:
        return choose(rotation.unscaled, builder.length)
    # `positions` imports nothing of ours, so it raises plain errors.
    except ValueError as error:
        raise InputError(str(error)) from None


rope, rope_high = _rotating, _without_slow
nope = learned = _still
hope = partial(_rotating_some, hope_frequencies)
hope_ab1 = partial(_rotating_some, without_activated)
hope_ab2 = partial(_rotating_some, without_low)
hope_ab3 = partial(_rotating_some, only_high)
