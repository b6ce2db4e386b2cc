"""The places of a checkpoint's weights, from the headers of its safetensors files.

The files are chosen as in Hugging Face: `model.safetensors` before `model.safetensors.index.json`.
This module loads no torch and reads no values (`weights` does), and knows nothing about layouts
and configurations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from repo_interp.errors import InputError, one_line
from repo_interp.storage.files import digest_of, regular
from repo_interp.storage.records import read_json, validate
from repo_interp.values import shortened

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by supported type of weights."""
# torch.compile and DataParallel put these before every name.
_WRAPPERS = ("_orig_mod.", "module.")

_INTEGERS = (".num_batches_tracked", ".summary_idxs")
"""Ends of the names of integers (I64) of encoders of images and sound, which are no weights."""
ADAPTER = "adapter_model.safetensors"
"""The file of an adapter, which replaces whole weights (see `plugins.adapters`)."""


def _beside(name: str) -> str:
    # A path in an index could name any file of the machine.
    if (
        os.path.basename(name) != name
        or not name.endswith(".safetensors")
        or len(name) > 255
        or not name.isprintable()
    ):
        raise ValueError(f"{shortened(repr(name))} is not a safetensors file next to it")
    return name


class _Index(BaseModel):
    """model.safetensors.index.json."""

    model_config = ConfigDict(strict=True)
    weight_map: dict[str, Annotated[str, AfterValidator(_beside)]]


@dataclass(frozen=True)
class StoredWeight:
    """Location of a stored weight, from the header of its file."""

    key: str
    """Its name in the file."""
    file: Path
    offset: int
    """Its first byte in the file."""
    shape: tuple[int, ...]
    stored_as: str
    """One of `BYTES`."""


def file_key(name: str) -> str:
    """Return a parameter's name in files: weights of schemes are directly under self_attn.

    Args:
        name: Name of the parameter in the model.

    Returns:
        Name in the file, of the released format.
    """
    return name.replace(".self_attn.assigner.", ".self_attn.").replace(
        ".self_attn.position_logits.", ".self_attn."
    )


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a checkpoint.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        Files, all present.

    Raises:
        InputError: A file is missing.
    """
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    # Without either file the missing one is named as model.safetensors below.
    files = [whole]
    if index.is_file() and not whole.is_file():
        named = validate(
            read_json(index, "the index that save_pretrained writes"), _Index, str(index)
        ).weight_map
        files = sorted(directory / name for name in set(named.values()))
    if files == [whole] and not whole.is_file() and (directory / ADAPTER).is_file():
        files = [directory / ADAPTER]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{directory} has no {file.name}; weights are read from safetensors only"
            )
    return files


def stored_weights(directory: Path) -> Iterator[StoredWeight]:
    """Iterate over the weights in the files of a checkpoint, by headers alone.

    Args:
        directory: Directory of the checkpoint.

    Yields:
        Name, place, shape and type of a weight.

    Raises:
        InputError: A file cannot be read, or holds other than floating point.
    """
    for file in weight_files(directory):
        try:
            # checks that header and file fit together
            with safe_open(regular(file), "np") as weights:
                with file.open("rb") as stream:
                    # A file begins with the length of its header: 8 bytes, little-endian.
                    offset = 8 + int.from_bytes(stream.read(8), "little")
                # In the order of the values, so that offsets add up without
                # reading the header again
                for key in weights.offset_keys():
                    if key.startswith(_WRAPPERS):
                        raise InputError(
                            f"{file} holds {key}, a name as torch.compile and DataParallel "
                            "make them; save the model inside "
                            "(model._orig_mod, model.module), or take "
                            f"{key.partition('.')[0]}. off every name"
                        )
                    part = weights.get_slice(key)
                    shape, stored = tuple(part.get_shape()), part.get_dtype()
                    # Skipped, but their 8 bytes a number lie between the weights.
                    if key.endswith(_INTEGERS):
                        offset += 8 * math.prod(shape)
                        continue
                    if stored not in BYTES:
                        raise InputError(
                            f"{file}: {key} is stored as {stored}; wanted floating point, "
                            f"one of {', '.join(BYTES)}: "
                            "convert or dequantise the checkpoint"
                        )
                    yield StoredWeight(key, file, offset, shape, stored)
                    offset += math.prod(shape) * BYTES[stored]
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{file} cannot be read as safetensors: {' '.join(str(error).split())[:300]}"
            ) from None


def require_fit(
    source: object,
    described: str,
    misshaped: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
    **faults: Sequence[str],
) -> None:
    """Refuse weights that do not fit.

    Args:
        source: File or directory of the weights, for the message.
        described: The model in words.
        misshaped: Names of weights with the shapes that they have and should have.
        **faults: Names of weights by fault, such as `missing`.

    Raises:
        InputError: There is a fault.
    """
    for name, found, wanted in misshaped:
        raise InputError(
            f"{source}: {name} has shape {list(found)}, {described} wants {list(wanted)}"
        )
    named = [
        f"{len(names)} {fault} (first: {one_line(names[0], 100)})"
        for fault, names in faults.items()
        if names
    ]
    if named:
        raise InputError(
            f"{source}: the weights do not fit {described}: {', '.join(named)}; nothing was loaded"
        )


def stored_digest(directory: Path) -> str:
    """Digest the weight files alone: versions of transformers write different config.json.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        SHA-256 in hexadecimal.
    """
    # Size and time are part of the cache's key, so that rewritten files are read again.
    return _digest_of_files(
        tuple(
            (file, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(directory)
        )
    )


@lru_cache
def _digest_of_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    return digest_of(*(file for file, _, _ in files))


def is_complete(directory: Path) -> bool:
    """Tell whether a converted checkpoint still has its configuration and weights.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        Whether headers announce weights that the files hold.
    """
    try:
        # Opening the weights checks that header and length fit,
        # which a copy that was cut off fails.
        return (directory / "config.json").is_file() and sum(
            1 for _ in stored_weights(directory)
        ) > 0
    except InputError:
        return False
