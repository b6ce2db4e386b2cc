"""Layers that rotate differently if a checkpoint is loaded with another scaling of frequencies.

Every layer is built twice with its weights: unchanged, and for a module with half the frequencies.
If frequencies, positions and added logits are equal, scaling changes nothing: the scheme does not
rotate, or has separate frequencies. This module knows no scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from repo_interp.checkpoint_files.options import scheme_options
from repo_interp.errors import Note
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.models.layer_probe import differ, draw_content
from repo_interp.models.repositioned_config import own_layout_of
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.positions.layouts import format_layout


class IdleScaling(Note):
    """A scaling of frequencies that does not affect some layers, or all."""


def scaling_remark(decoder: Decoder, scaling: str) -> str:
    """Name the layers that a scaling of the frequencies does not change.

    Args:
        decoder: Decoder of a model that was loaded with the scaling.
        scaling: The scaling in words (`Origin.scaling`); empty: none.

    Returns:
        The remark; empty if it changes all layers.
    """
    idle = unscaled_layers(decoder, scaling) if scaling else []
    if not idle:
        return ""
    if len(idle) == len(decoder.by_layer):
        return (
            f"scaling ({scaling}) changes nothing: no layer of the layout "
            f"{format_layout(decoder.schemes)} rotates by the checkpoint's frequencies"
        )
    named = ", ".join(f"{layer} ({decoder.schemes[layer]})" for layer in idle)
    return (
        f"scaling ({scaling}) changes nothing in layers {named}, which do not rotate by the "
        "checkpoint's frequencies"
    )


@torch.no_grad()
def acting_scaling(decoder: Decoder, scaling: str) -> str:
    """Return a scaling if it changes some layer.

    Args:
        decoder: Decoder of a model that was loaded with the scaling.
        scaling: The scaling in words; empty: none.

    Returns:
        The same words; empty if it changes no layer.
    """
    acts = scaling and len(unscaled_layers(decoder, scaling)) < len(decoder.by_layer)
    return scaling if acts else ""


def unscaled_layers(decoder: Decoder, scaling: str) -> list[int]:
    """List the layers that a scaling of the frequencies does not change.

    Args:
        decoder: Decoder of the model.
        scaling: The scaling in words; another base (default, theta) changes the frequencies before
            scaling too.

    Returns:
        Numbers of layers.
    """
    base = scaling.startswith(("default", "theta"))
    builder = SchemeBuilder(
        decoder.owner.config, scheme_options(own_layout_of(decoder.owner.config)[1])
    )
    return [
        layer
        for layer, attention in decoder.by_layer.items()
        if not _follows_rotation(builder, attention, base)
    ]


def _follows_rotation(builder: SchemeBuilder, attention: RepositionedAttention, base: bool) -> bool:
    """Whether a layer changes if its module rotates by half of the frequencies."""
    rotation = attention.rotation
    other = replace(
        rotation,
        frequencies=rotation.frequencies / 2,
        table_scaling=2 * rotation.table_scaling,
        unscaled=rotation.unscaled / 2 if base else rotation.unscaled,
    )
    # The layer's weights replace the initial ones, which thus need no memory and no random numbers
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        one, two = (
            builder.build(attention.scheme, turning, attention.d_head)
            for turning in (rotation, other)
        )
    if _turning(one).keys() != _turning(two).keys() or any(
        not torch.equal(part, _turning(two)[name]) for name, part in _turning(one).items()
    ):
        return True
    drawn = draw_content(attention)
    found = []
    for parts in (one, two):
        assigner, scheme = (
            _with_weights(part, of_layer)
            for part, of_layer in (
                (parts.assigner, attention.assigner),
                (parts.position_logits, attention.position_logits),
            )
        )
        positions = drawn.positions(assigner)
        found.append((positions, None if scheme is None else drawn.added(scheme, positions)))
    return any(part is not None and differ(part, like) for part, like in zip(*found, strict=True))


def _turning(parts: SchemeParts) -> Mapping[str, Tensor]:
    """Fixed numbers of a rotation; learned numbers stay as in the layer."""
    given = {"frequencies": parts.frequencies, "attention_scaling": parts.attention_scaling}
    return {
        name: torch.as_tensor(part)
        for name, part in given.items()
        # without frequencies nothing is scaled
        if parts.frequencies is not None and not isinstance(part, nn.Parameter)
    }


def _with_weights(part: Any, of_layer: nn.Module | None) -> Any:
    """A part of a scheme with the weights of a layer, on the layer's device."""
    if part is None or of_layer is None:
        return part
    part.load_state_dict(of_layer.state_dict(), assign=True)
    like = next((weight for weight in of_layer.parameters()), torch.zeros(1))
    return part.to(like.device)
