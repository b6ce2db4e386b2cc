"""Which checkpoint a model came from, and digests that identify it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.shipped import training_record
from repo_interp.checkpoint_files.stated import Checkpoint, digested
from repo_interp.checkpoint_files.stored import digest_of, weight_files
from repo_interp.checkpoint_files.weights import tied_parameters
from repo_interp.errors import InputError
from repo_interp.models.changes import changes, fingerprints, remember_weights
from repo_interp.models.decoder import Decoder, Origin
from repo_interp.models.offloading import parameter_value
from repo_interp.models.rescaling import acting_scaling
from repo_interp.storage.files import cache_directory, write_text

TRAINED = "training.toml"
"""The file that `repo-interp train` writes into the directory of the weights."""
KEPT = 2**26
"""Bytes of weights from which on a digest is kept: hashing them takes a twentieth of a second."""
SETTLED = 2 * 10**9
"""Nanoseconds since a file was last written to, from which on its digest is kept."""


def origin(
    checkpoint: Checkpoint,
    asked_for: str | os.PathLike[str],
    rope_scaling: Mapping[str, Any] | None = None,
) -> Origin:
    """Return the origin of a model that is loaded from a checkpoint.

    Args:
        checkpoint: The checkpoint.
        asked_for: Path or name that the user gave.
        rope_scaling: Scaling that replaces the configured one; None: none.

    Returns:
        Name, digest, training length, directory, scaling and remarks.
    """
    directory = Path(asked_for).resolve()
    if not directory.exists():
        name = os.fspath(asked_for)
    # A seed such as "seed-0" is no name.
    elif (directory / TRAINED).is_file() or training_record(directory):
        name = f"{directory.parent.name}/{directory.name}"
    else:
        name = directory.name
    scaled = rope_scaling or {}
    shown = ("rope_type", "type", "factor", "rope_theta")
    scaling = " ".join(str(scaled[key]) for key in shown if key in scaled)
    digest, trained = checkpoint_digest(checkpoint.directory), training_length(checkpoint.config)
    return Origin(name, digest, trained, checkpoint.directory, scaling, checkpoint.remarks)


def remember_origin(decoder: Decoder, source: Origin) -> None:
    """Store the origin of a model, and checksums of its weights as the checkpoint's.

    Args:
        decoder: Decoder of the model.
        source: The origin.
    """
    decoder.origin = source
    remember_weights(decoder)


def identity(decoder: Decoder) -> dict[str, str | int]:
    """Return names and digests of a model, for a run; paths are left out, since checkpoints move.

    Args:
        decoder: Decoder of the model.

    Returns:
        Attributes of a run. `positions_dtype` exists if learned positions have another precision
        than the model; `functions` if a scheme is not from a package (name and SHA-256 of its
        source, JSON); `scaling` if loading scaled the rotation of a layer; `changed` if the model
        changed since then: the digest of the checkpoint then describes its origin.
    """
    checkpoint = decoder.origin
    stated: dict[str, str | int] = {
        "layout": ",".join(decoder.schemes),
        "dtype": _dtype_name(decoder.dtype),
        "positions_dtype": _dtype_name(decoder.positions_dtype),
        "training_length": decoder.training_length,
        "functions": json.dumps(_functions(decoder)),
        "scaling": acting_scaling(decoder, checkpoint.scaling) if checkpoint else "",
        "changed": changes(decoder),
        "checkpoint": checkpoint.name if checkpoint else "",
        "checkpoint_digest": checkpoint.digest if checkpoint else weights_digest(decoder),
    }
    usual = {
        "positions_dtype": stated["dtype"],
        "functions": "{}",
        "scaling": "",
        "changed": "",
    }
    return {name: value for name, value in stated.items() if usual.get(name) != value}


def _functions(decoder: Decoder) -> Mapping[str, Any]:
    """The functions that built the model's schemes, even if their names are now used again."""
    return getattr(decoder.owner.config, "position_layout", {}).get("functions", {})


def checkpoint_digest(directory: Path) -> str:
    """Return the SHA-256 over config.json and the weight files of a checkpoint.

    That of large files is kept in the cache directory, and taken again where a file was written
    to: where its inode, size, or time of a change differs.

    Args:
        directory: Of the checkpoint.

    Returns:
        Hexadecimal digits.
    """
    config, files = digested(directory), weight_files(directory)
    before = _states(files)
    # A write within the resolution of the clock would leave the times as they are.
    settled = max(max(times) for _, _, _, *times in before) < time.time_ns() - SETTLED
    if sum(size for _, _, size, *_ in before) < KEPT or not settled:
        return digest_of(config, *files)
    try:
        kept = cache_directory() / "digests" / digest_of(config, repr(before).encode())
    except InputError:  # no home
        return digest_of(config, *files)
    with suppress(OSError, ValueError):
        found = kept.read_text(encoding="ascii")
        if re.fullmatch("[0-9a-f]{64}", found):
            return found
    digest = digest_of(config, *files)
    if _states(files) == before:
        with suppress(OSError):  # a full or read-only disk
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, digest)
    return digest


def _states(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Path, inode, size, and times of the last writing and change of files."""
    stated = [(str(file.resolve()), file.stat()) for file in files]
    return [(path, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns) for path, it in stated]


def weights_digest(decoder: Decoder) -> str:
    """Return the SHA-256 over names and values of parameters, for models without a checkpoint.

    It is kept on the `Decoder` while the parameters keep their checksums.

    Args:
        decoder: Decoder of the model.

    Returns:
        Hexadecimal digits.
    """
    named = dict(decoder.module.named_parameters())
    # Hashing takes far longer than the sums that tell whether a weight was edited.
    state = fingerprints({name: weight for name, weight in named.items() if not weight.is_meta})
    if decoder.hashed is None or decoder.hashed[0] != state:
        digest = hashlib.sha256()
        # Offloading splits a tied parameter into two
        twice = tied_parameters(decoder.owner)[1:]
        for name, parameter in sorted(named.items()):
            if parameter.is_meta and name in twice:
                continue
            digest.update(name.encode())
            value = parameter_value(decoder.module, name, parameter).detach().cpu().contiguous()
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        decoder.hashed = state, digest.hexdigest()
    return decoder.hashed[1]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
