"""State of a model at loading: checksums of its weights and rotations, and its next hook.

    checksum = CRC-32 of sums over the words of a weight, at the speed of memory

A checksum detects an edit, also through `.data` or numpy, and permuted rows or columns; it does not
protect against deliberate deception. Offloaded weights (on "meta") are left out. `changes` compares
later.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from repo_interp.models.decoder import Decoder
from repo_interp.models.scheme_parts import PARTS
from repo_interp.models.tables import TABLE
from repo_interp.runtime.memory import SHARED, memory_for

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of as many bytes."""
_SUMMED, _APART = 32, 509
"""Words of one sum, and how far apart they are: a prime, so that no two of them are a head, row or
column apart.
"""


def remember_computation(decoder: Decoder) -> None:
    """Remember the hooks and rotations that a model has now, so that later ones count as changes.

    Args:
        decoder: Decoder of the model.
    """
    decoder.first_hook = RemovableHandle.next_id
    decoder.rotations = rotation_states(decoder, fingerprints(rotation_tensors(decoder)))


def remember_scheme(decoder: Decoder) -> None:
    """Store checksums of new schemes, if checksums of the model were stored.

    Args:
        decoder: Decoder of the model.
    """
    if decoder.rotations is not None:
        decoder.rotations = rotation_states(decoder, fingerprints(rotation_tensors(decoder)))
    if decoder.weights is not None:
        now, before = loaded_weights(decoder), decoder.weights
        added = {name: now[name] for name in now if _is_of_scheme(name)}
        kept = {name: value for name, value in before.items() if not _is_of_scheme(name)}
        decoder.weights = kept | fingerprints(added)


def remember_weights(decoder: Decoder) -> None:
    """Remember the weights that a model has now, so that later edits count as changes.

    Args:
        decoder: Decoder of the model.
    """
    decoder.weights = fingerprints(loaded_weights(decoder))


def loaded_weights(decoder: Decoder) -> dict[str, Tensor]:
    """List the weights of a model that are in memory.

    Args:
        decoder: Decoder of the model.

    Returns:
        Parameters by short name, without offloaded ones.
    """
    named = decoder.owner.named_parameters()
    return {
        short_name(name): parameter for name, parameter in named if parameter.device.type != "meta"
    }


@torch.no_grad()
def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the bits of every tensor.

    The checksum is the CRC-32 of sums s over the words of a tensor, w[block, i, j] with 32 rows i
    of 509 words j in a block: sum_block s[block, j] and sum_j s[block, j] of s = sum_i w, and the
    words that fill no block. Memory is read once. It is the same on every device.

    Args:
        tensors: Tensors by name, none on "meta".

    Returns:
        Checksums by name.
    """
    # Tensors of one shape are stacked, so an accelerator computes few sums
    alike: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        # Eight bytes at an offset may not be aligned to a word.
        begins = tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8
        alike.setdefault((tensor.device, tensor.dtype, tensor.shape, begins), {})[name] = tensor
    lines: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
    for (device, _, shape, _), some in alike.items():
        at_once = max(1, memory_for(device, SHARED) * _SUMMED // (8 * max(1, shape.numel())))
        for start in range(0, len(some), at_once):
            names = list(some)[start : start + at_once]
            lines.setdefault(device, []).append((names, _lines([some[name] for name in names])))
    found = {}
    for of_device in lines.values():
        # One transfer for all tensors of an accelerator.
        joined = torch.cat([of_names.view(-1) for _, of_names in of_device]).cpu()
        parts = joined.split([of_names.numel() for _, of_names in of_device])
        for (names, _), part in zip(of_device, parts, strict=True):
            rows = part.view(len(names), -1).numpy()
            found |= {name: zlib.crc32(row.data) for name, row in zip(names, rows, strict=True)}
    return {name: found[name] for name in tensors}


def _words(tensors: Tensor) -> Int[Tensor, "tensor word"]:
    """The bits of stacked tensors as integers, of eight bytes each if the size allows it."""
    width, size = tensors.element_size(), tensors.nbytes // len(tensors)
    flat = tensors.contiguous().view(-1)
    wide = size % 8 == 0 and flat.storage_offset() * width % 8 == 0
    word = 8 if wide else width
    return flat.view(_WHOLE[word]).view(len(tensors), size // word)


def _lines(tensors: Sequence[Tensor]) -> Int[Tensor, "tensor number"]:
    """Sums, and the words beyond the last full block, of tensors of one shape."""
    size = _SUMMED * _APART
    if tensors[0].numel() < size:
        return torch.nn.functional.pad(_words(torch.stack([*tensors])).long(), (_APART, 0))
    # Large tensors are read without a copy.
    all_words = [_words(tensor[None])[0] for tensor in tensors]
    blocks = len(all_words[0]) // size
    rest = torch.stack([words[blocks * size :] for words in all_words]).long()
    new = {"dtype": torch.int64, "device": rest.device}
    sums = torch.empty(len(tensors), blocks, _APART, **new)
    for of_tensor, words in zip(sums, all_words, strict=True):
        # A sum runs at the speed of memory, three times that of a CRC.
        of_blocks = words[: blocks * size].view(blocks, _SUMMED, _APART)
        if words.is_cpu:  # numpy adds rows of a block in half of torch's time
            np.add.reduce(of_blocks.numpy(), axis=1, dtype=np.int64, out=of_tensor.numpy())
        else:
            torch.sum(of_blocks, 1, dtype=torch.int64, out=of_tensor)
    return torch.cat([sums.sum(1), sums.sum(2), rest], 1)


def rotation_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """List the numbers of the rotation of every layer.

    Args:
        decoder: Decoder of the model.

    Returns:
        Frequencies and scalings by names that no weight has.
    """
    return {
        f"{name} {layer}": tensor
        for layer, attention in decoder.by_layer.items()
        for name, tensor in (
            ("frequencies", attention.frequencies_at(1)),
            ("scaling", torch.as_tensor(attention.attention_scaling)),
        )
        if tensor is not None
    }


def rotation_states(decoder: Decoder, sums: Mapping[str, int]) -> dict[str, tuple[Any, ...]]:
    """Describe the rotation of every layer.

    Args:
        decoder: Decoder of the model.
        sums: Checksums of `rotation_tensors`.

    Returns:
        By layer, checksums of its numbers, and whether its attention is unchanged.
    """
    return {
        f"layer {layer}": (
            sums.get(f"frequencies {layer}"),
            sums[f"scaling {layer}"],
            attention.attends_unchanged,
        )
        for layer, attention in decoder.by_layer.items()
    }


def _is_of_scheme(name: str) -> bool:
    """Whether a weight is one that a position scheme brought."""
    parts = {*PARTS, "rotation_parameters", TABLE}
    return not parts.isdisjoint(name.split("."))


def short_name(name: str) -> str:
    """Return the name of a module or weight without the parts that a bridge adds.

    Args:
        name: Name in the model.

    Returns:
        The name.
    """
    return (
        ".".join(part for part in name.split(".") if part != "_original_component").removeprefix(
            "model."
        )
        or "the model"
    )
