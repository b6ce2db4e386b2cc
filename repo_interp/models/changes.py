"""What of a model is no longer as it was loaded: edited weights, attached hooks, exchanged rotations.

    from loading or bridging on    CRC-32 of every weight, and of every layer's rotation; the number that the next hook will have
    later                          what differs, by name: a run says so, since the digest of a checkpoint's files would not
    ever                           layers that rotate otherwise than their configuration says, which digests of weights do not tell either

A checksum runs at the speed of memory and tells an edit, whatever made it; it is no protection against somebody who wants to deceive.
Weights that are offloaded (on "meta") are not looked at. Knows nothing about what a change is for.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from repo_interp.models.reposition import attentions
from repo_interp.models.wrapped import owner_of

_WEIGHTS, _HOOKS, _ROTATIONS = "repo_interp_weights", "repo_interp_first_hook", "repo_interp_rotations"
_RECORDING = ("transformers.", "transformer_lens.model_bridge.")
"""Modules of libraries whose hooks record outputs and change nothing."""
_NAMED = 3
"""Names of weights or modules that are listed."""


def unchanged_computation(model: nn.Module) -> None:
    """Remember on a bridge what is attached to it now, and how its layers rotate: whatever comes later is a change."""
    object.__setattr__(model, _HOOKS, RemovableHandle.next_id)
    object.__setattr__(model, _ROTATIONS, _rotations(model))


def unchanged_weights(model: nn.Module) -> None:
    """Remember on a model or bridge the weights that it has now: others, later, are a change."""
    object.__setattr__(model, _WEIGHTS, _checksums(model))


def changes(model: nn.Module) -> str:
    """What of a model or bridge is not as it was loaded or bridged, in words; empty where all is, or nothing was remembered."""
    remembered = vars(model)
    rotating = (each for each in attentions(model) if each.frequencies is not None)
    found = {
        "another rotation than the configuration's in": [f"layer {each.layer_idx}" for each in rotating if each.rotation.differs]
    }
    if _WEIGHTS in remembered:
        found["other weights in"] = _differing(remembered[_WEIGHTS], _checksums(model))
    if _ROTATIONS in remembered:
        found["other rotation in"] = _differing(remembered[_ROTATIONS], _rotations(model))
        parts = {module: _short(name) for name, module in _original(model).named_modules()}
        for each in attentions(model):  # of hook sites, those that are no part of a bridge
            parts = {site: f"layers.{each.layer_idx}.self_attn.{name}" for name, site in vars(each.sites).items()} | parts
        found["hooks at"] = [
            name
            for module, name in parts.items()
            if any(
                number >= remembered[_HOOKS] and not _is_of_a_library(hook)
                for number, hook in (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
            )
        ]
    return "; ".join(f"{what} {_listed(names)}" for what, names in found.items() if names)


def _checksums(model: nn.Module) -> dict[str, int]:
    return {
        _short(name): _checksum(parameter)
        for name, parameter in _original(model).named_parameters()
        if parameter.device.type != "meta"
    }


def _rotations(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        f"layer {each.layer_idx}": (
            None if (frequencies := each.frequencies_at(1)) is None else _checksum(frequencies),
            _checksum(torch.as_tensor(each.attention_scaling)),
            each.attends_as_built,
        )
        for each in attentions(model)
    }


def _is_of_a_library(hook: Any) -> bool:
    """Whether a library put `hook` there to record outputs, when it ran first; what users hang on a hook point is not among these."""
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_RECORDING)


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _original(model: Any) -> nn.Module:
    return owner_of(model)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _short(name: str) -> str:
    """The name of a module or weight without what a bridge puts around it."""
    return ".".join(part for part in name.split(".") if part != "_original_component").removeprefix("model.") or "the model"


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:_NAMED]) + (f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")
