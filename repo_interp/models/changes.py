"""What of a model is no longer as it was loaded: edited weights, attached hooks, exchanged
rotations.

    from loading or bridging on    of every weight where it lies, its version, sums of its bits by place, and their CRC-32 (on an
                                   accelerator that of their sums over each axis); of every layer's
                                   rotation the CRC-32; the number of the next hook
    later                          what differs, by name: a run says so, since the digest of a checkpoint's files would not
    ever                           layers that rotate otherwise than their configuration says, which digests of weights do not tell either

PyTorch counts edits of a weight as its version, but not those through `.data` and numpy; so a
weight that lies where it lay, with its version and its sums, is unchanged, and only of others the
CRC-32 is taken again. All run at the speed of memory. They tell an edit, also of rows or columns
that changed places; they are no protection against somebody who wants to deceive. Weights that are
offloaded (on "meta") are not looked at. Knows nothing about what a change is for.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from repo_interp.models.decoder import as_decoder

_RECORDING = ("transformers.", "transformer_lens.model_bridge.")
"""Modules of libraries whose hooks record outputs and change nothing."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of as many bytes."""
_NAMED = 3
"""Names of weights or modules that are listed."""


def unchanged_computation(model: nn.Module) -> None:
    """Remember on a bridge what is attached to it now, and how its layers rotate: whatever comes
    later is a change.
    """
    decoder = as_decoder(model)
    decoder.first_hook, decoder.rotations = RemovableHandle.next_id, _rotations(model)


def unchanged_weights(model: nn.Module) -> None:
    """Remember on a model or bridge the weights that it has now: others, later, are a change."""
    weights = _weights(model)
    as_decoder(model).weights = states(weights), _fingerprints(weights)


def states(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int, int]]:
    """Return the address, the version and a sum of the bits of each tensor; they stay equal until
    it is written to.

    The sum weighs rows and columns by their place, so that it changes when two of them change
    places.
    """
    sums = dict[torch.device, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        rows = (
            tensor.detach()
            .contiguous()
            .reshape(len(tensor) if tensor.ndim > 1 else 1, -1)
            .view(torch.uint8)
        )
        widest = next(
            size
            for size in (8, 4, 2, 1)
            if rows.shape[1] % size == rows.storage_offset() % size == 0
        )
        bits = rows.view(_WHOLE[widest])
        of_lines = [bits.sum(axis, dtype=torch.int64) for axis in (0, 1)]
        weighted = [
            (line * torch.arange(1, 2 * len(line), 2, device=line.device)).sum()
            for line in of_lines
        ]
        sums.setdefault(tensor.device, {})[name] = weighted[0] + weighted[1]
    added = {
        name: total
        for some in sums.values()
        for name, total in zip(some, torch.stack([*some.values()]).tolist(), strict=True)
    }
    return {
        name: (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, added[name])
        for name, tensor in tensors.items()
    }


def changes(model: nn.Module) -> str:
    """What of a model or bridge is not as it was loaded or bridged, in words; empty where all is,
    or nothing was remembered.
    """
    decoder = as_decoder(model)
    rotating = (each for each in decoder.layers if each.frequencies is not None)
    found = {
        "another rotation than the configuration's in": [
            f"layer {each.layer_idx}" for each in rotating if each.rotation.differs
        ]
    }
    if decoder.weights is not None:
        (before, checksums), weights = decoder.weights, _weights(model)
        now = states(weights)
        moved = [name for name, state in now.items() if before.get(name) != state]
        again = _fingerprints({name: weights[name] for name in moved})
        same = {name: checksums.get(name) for name in now}
        found["other weights in"] = _differing(checksums, same | again)
    if decoder.rotations is not None:
        found["other rotation in"] = _differing(decoder.rotations, _rotations(model))
        parts = {module: name for name, module in decoder.owner.named_modules()}
        for each in decoder.layers:  # of hook sites, those that are no part of a bridge
            parts = {
                site: f"layers.{each.layer_idx}.self_attn.{name}"
                for name, site in vars(each.sites).items()
            } | parts
        found["hooks at"] = [
            _short(name)
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
    return "; ".join(f"{what} {_listed(names)}" for what, names in found.items() if names)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    named = as_decoder(model).owner.named_parameters()
    return {
        _short(name): parameter.detach()
        for name, parameter in named
        if parameter.device.type != "meta"
    }


def _fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for the bits of each tensor: the CRC-32 of their sums over every axis, which leave
    an accelerator together; of one axis, or of an odd width on a processor, that of the bits.
    """
    found, sums = {}, dict[torch.device, list[tuple[str, Tensor]]]()
    for name, tensor in tensors.items():
        bits, width = tensor.contiguous(), tensor.element_size()
        if tensor.device.type == "cpu":
            if tensor.ndim < 2 or tensor.shape[-1] * width % 8:
                found[name] = zlib.crc32(bits.reshape(-1).view(torch.uint8).numpy().data)
                continue
            # sums at the speed of memory, three times that of a CRC
            whole = bits.view(torch.int64).numpy()
            found[name] = zlib.crc32(
                b"".join(whole.sum(axis).tobytes() for axis in range(whole.ndim))
            )
            continue
        bits = bits.view(_WHOLE[width])
        lines = [bits.sum(axis, dtype=torch.int64).reshape(-1) for axis in range(bits.ndim)]
        sums.setdefault(tensor.device, []).extend((name, line) for line in lines)
    for of_device in sums.values():
        names, lines = zip(*of_device, strict=True)
        parts = torch.cat(lines).cpu().split([len(line) for line in lines])
        for name, part in zip(names, parts, strict=True):
            found[name] = zlib.crc32(part.numpy().data, found.get(name, 0))
    return found


def _rotations(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        f"layer {each.layer_idx}": (
            *_fingerprints(
                {"frequencies": frequencies}
                if (frequencies := each.frequencies_at(1)) is not None
                else {}
            ).values(),
            *_fingerprints({"scaling": torch.as_tensor(each.attention_scaling)}).values(),
            each.attends_as_built,
        )
        for each in as_decoder(model).layers
    }


def _is_of_a_library(hook: Any) -> bool:
    """Whether a library put `hook` there to record outputs, when it ran first; what users hang on a
    hook point is not among these.
    """
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_RECORDING)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _short(name: str) -> str:
    """The name of a module or weight without what a bridge puts around it."""
    return (
        ".".join(part for part in name.split(".") if part != "_original_component").removeprefix(
            "model."
        )
        or "the model"
    )


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:_NAMED]) + (
        f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    )
