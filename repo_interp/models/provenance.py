"""Which checkpoint a model came from, and digests that identify it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.stated import Checkpoint, digested
from repo_interp.checkpoint_files.stored import digest_of, weight_files
from repo_interp.models.changes import changes, states, unchanged_weights
from repo_interp.models.decoder import Origin, as_decoder
from repo_interp.shipped import training_record

_DIGESTS: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], str]] = WeakKeyDictionary()
"""Of models that came from no checkpoint: the state of their weights, and its digest."""
TRAINED = "training.toml"
"""The file that `repo-interp train` writes into the directory of the weights."""


def origin(
    checkpoint: Checkpoint,
    asked_for: str | os.PathLike[str],
    rope_scaling: Mapping[str, Any] | None = None,
) -> Origin:
    """The origin of what is loaded from `checkpoint`, which the user called `asked_for`, with its
    rotation scaled by `rope_scaling`.
    """
    directory = Path(asked_for).resolve()
    if not directory.exists():
        name = os.fspath(asked_for)
    elif (directory / TRAINED).is_file() or training_record(directory):
        name = f"{directory.parent.name}/{directory.name}"
    else:
        name = directory.name
    scaling = (
        " ".join(
            str(rope_scaling[key]) for key in ("rope_type", "type", "factor") if key in rope_scaling
        )
        if rope_scaling
        else ""
    )
    digest, trained = checkpoint_digest(checkpoint.directory), training_length(checkpoint.config)
    return Origin(name, digest, trained, checkpoint.directory, scaling, checkpoint.remarks)


def mark(model: nn.Module, source: Origin) -> None:
    """Remember `source` on `model` (or bridge), whose weights are those of `source` now."""
    as_decoder(model).origin = source
    unchanged_weights(model)


def length_trained(model: nn.Module) -> int:
    """Longest prompts that a repositioned model or bridge was trained on, in tokens."""
    decoder = as_decoder(model)
    return (
        training_length(decoder.config)
        if decoder.origin is None
        else decoder.origin.training_length
    )


def positions_dtype(model: nn.Module) -> torch.dtype:
    """The precision of a model's learned positions; its own where it learns none."""
    decoder = as_decoder(model)
    return next(
        (parameter for assigner in decoder.assigners for parameter in assigner.parameters()),
        decoder.weight,
    ).dtype


def identity(model: nn.Module) -> dict[str, str | int]:
    """Names and digests of a repositioned model or bridge, for a run.

    No path is among them: a checkpoint may move.

    `positions_dtype` is there where learned positions have another precision than the model,
    `scaling` where its rotation was scaled when it was loaded, `changed` where it is no longer as
    it was loaded: the digest of the checkpoint then says where it began.
    """
    decoder, changed = as_decoder(model), changes(model)
    checkpoint = decoder.origin
    of_positions = positions_dtype(model)
    return {
        "layout": ",".join(decoder.schemes),
        "dtype": _named(decoder.dtype),
        **({} if of_positions == decoder.dtype else {"positions_dtype": _named(of_positions)}),
        "training_length": length_trained(model),
        **(
            {"scaling": checkpoint.scaling} if checkpoint is not None and checkpoint.scaling else {}
        ),
        **({"changed": changed} if changed else {}),
        "checkpoint": checkpoint.name if checkpoint is not None else "",
        "checkpoint_digest": checkpoint.digest if checkpoint is not None else weights_digest(model),
    }


def checkpoint_digest(directory: Path) -> str:
    """SHA-256 over config.json and the weight files of a checkpoint, in hexadecimal."""
    return digest_of(digested(directory), *weight_files(directory))


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names and values of a model's parameters, in hexadecimal: for models that came
    from no checkpoint.

    It is kept beside the model while nothing is written to a parameter.
    """
    named, running = dict(model.named_parameters()), hashlib.sha256()
    state = states({name: parameter for name, parameter in named.items() if not parameter.is_meta})
    known, digest = _DIGESTS.get(model, ({}, ""))
    if known == state:
        return digest
    for name, parameter in sorted(named.items()):
        running.update(name.encode())
        running.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    _DIGESTS[model] = state, running.hexdigest()
    return running.hexdigest()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
