"""Which checkpoint a model came from, and digests that say it without doubt."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from repo_interp.models.checkpoints import Checkpoint, weight_files
from repo_interp.models.families import training_length
from repo_interp.models.reposition import attentions


@dataclass(frozen=True)
class Origin:
    """Where a loaded model came from."""

    name: str
    """The directory's or hub repository's name, without the path to it."""
    digest: str
    """SHA-256 over config.json and the weight files."""
    training_length: int
    """Longest prompts it was trained on, in tokens."""


def origin(checkpoint: Checkpoint, asked_for: str | os.PathLike[str]) -> Origin:
    """The origin of what is loaded from `checkpoint`, which the user called `asked_for`."""
    name = Path(asked_for).resolve().name if Path(asked_for).exists() else os.fspath(asked_for)
    return Origin(name, checkpoint_digest(checkpoint.directory), training_length(checkpoint.config))


def mark(model: nn.Module, source: Origin) -> None:
    """Remember `source` on `model` (or bridge)."""
    object.__setattr__(model, "repo_interp_origin", source)


def loaded_from(model: nn.Module) -> Origin | None:
    """The origin that `mark` left on `model`; None for a model made in memory."""
    return model.__dict__.get("repo_interp_origin")


def length_trained(model: nn.Module) -> int:
    """Longest prompts that a repositioned model or bridge was trained on, in tokens."""
    found = loaded_from(model)
    return training_length(next(attentions(model)).config) if found is None else found.training_length


def checkpoint_digest(directory: Path) -> str:
    """SHA-256 over config.json and the weight files of a checkpoint, in hexadecimal."""
    running = hashlib.sha256()
    for file in (directory / "config.json", *weight_files(directory)):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                running.update(block)
    return running.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names and values of a model's parameters, in hexadecimal: for models that came from no checkpoint."""
    running = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        running.update(name.encode())
        running.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return running.hexdigest()
