"""Changes of a model since it was loaded: edited weights, attached hooks, exchanged rotations.

    compared    names of parts that differ from what `remembered` stored at loading: a run states
                them, since the digest of a checkpoint's files does not change
    always      layers with a rotation that differs from the configuration, which digests of weights
                do not show either

This module knows nothing about the purpose of a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from repo_interp.models.decoder import Decoder
from repo_interp.models.remembered import (
    fingerprints,
    loaded_weights,
    rotation_states,
    rotation_tensors,
    short_name,
)

_RECORDING = (
    *("transformers.", "transformer_lens.model_bridge."),
    *("repo_interp.models.attention", "repo_interp.models.reposition"),
)
"""Modules with hooks that only record outputs, or that belong to a layer's scheme."""
_NAMED = 3
"""Names of weights or modules that are listed."""


def changes(decoder: Decoder) -> str:
    """Describe the changes of a model since it was loaded or bridged.

    Args:
        decoder: Decoder of the model.

    Returns:
        Text that names changed layers, weights and hooks; empty without changes, or if nothing
        was remembered.
    """
    rotating = (attention for attention in decoder.layers if attention.frequencies is not None)
    found = {
        "another rotation than the configuration's in": [
            f"layer {attention.layer_idx}" for attention in rotating if attention.rotation.differs
        ]
    }
    found["keys hidden in"] = [
        f"layer {layer}"
        for layer, attention in decoder.by_layer.items()
        if "mask_of" in vars(attention)
    ]
    weights = {} if decoder.weights is None else loaded_weights(decoder)
    turns = {} if decoder.rotations is None else rotation_tensors(decoder)
    sums = fingerprints(weights | turns)  # together, so that an accelerator is waited for once
    if decoder.weights is not None:
        now = {name: sums[name] for name in weights}
        found["other weights in"] = _different_names(decoder.weights, now)
    if decoder.rotations is not None:
        found["other rotation in"] = _different_names(
            decoder.rotations, rotation_states(decoder, sums)
        )
        # A hook changes results as an edited weight does, and no digest shows it.
        # Hook sites that are not part of a bridge, then modules
        parts = {
            site: f"layers.{attention.layer_idx}.self_attn.{name}"
            for attention in reversed(decoder.layers)
            for name, site in vars(attention.sites).items()
        } | {module: name for name, module in decoder.owner.named_modules()}
        found["hooks at"] = [
            short_name(name)
            for module, name in parts.items()
            if (module._forward_hooks or module._forward_pre_hooks)
            and any(
                number >= decoder.first_hook and not _is_of_a_library(hook)
                for number, hook in (
                    *module._forward_hooks.items(),
                    *module._forward_pre_hooks.items(),
                )
            )
        ]
    return "; ".join(f"{change} {_join_names(names)}" for change, names in found.items() if names)


def _is_of_a_library(hook: Any) -> bool:
    """Whether a library attached `hook` to record outputs at its first run."""
    # Libraries wrap their hooks in partials.
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_RECORDING)


def _different_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _join_names(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:_NAMED]) + (
        f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    )
