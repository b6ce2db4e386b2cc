"""Sizes and training lengths of models: the papers' models as stated, and ours from their files.

This module knows nothing about claims and measurements.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from position_papers.training.trained import configured_task, trained_configuration
from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.models.checkpoints import identify


@dataclass(frozen=True)
class Scale:
    """Size and training of one model. None: not stated."""

    layers: int | None = None
    width: int | None = None
    length: int | None = None
    """Longest training sequences, in tokens."""
    training: str | None = None
    """Steps, sequences per step, or tokens."""


def scale_of(directory: str | os.PathLike[str]) -> Scale:
    """Read the scale of a checkpoint, or of a training record without weights, from config.json and
    training.toml.
    """
    directory = Path(directory)
    trained = trained_configuration(directory)
    scale = Scale()
    if trained is not None:
        batch = trained.batch * trained.accumulation
        continued = ", continuing another" if trained.continue_from else ""
        training = (
            f"{trained.steps:,} steps of {batch} "
            f"{'sequence' if batch == 1 else 'sequences'}{continued}"
        )
        size = (None, None) if trained.continue_from else (trained.layers, trained.width)
        scale = Scale(*size, configured_task(trained).training_length, training)
    if (directory / "config.json").is_file() or (trained is None and not directory.exists()):
        config = identify(directory).config
        scale = Scale(
            config.num_hidden_layers, config.hidden_size, training_length(config), scale.training
        )
    return scale


def ours_and_theirs(ours: Scale, theirs: Scale) -> str:
    """Format one line: our scale, then the paper's, as layers × width, length of sequences,
    training; values that are not stated are left out.
    """
    return "; paper: ".join(filter(None, (_in_words(ours), _in_words(theirs))))


def _in_words(scale: Scale) -> str:
    layers = f"{scale.layers} layers" if scale.layers else ""
    width = f"width {scale.width}" if scale.width else ""
    length = f"{scale.length} tokens" if scale.length else ""
    size = " × ".join(filter(None, (layers, width)))
    return ", ".join(filter(None, (size, length, scale.training)))


def scale_beside(paper: Scale, checkpoint: str, paths: Mapping[str, str]) -> str:
    """Describe the difference in scale between the models of a verdict, called `checkpoint`, and
    the model of the paper's claim.

    `checkpoint` is one name, several names in one text, or a common prefix ("niah" of niah/repo and
    niah/rope).
    """
    words = re.split(r"[\s,;]+", checkpoint)
    names = [name for name in paths if name == checkpoint]
    names = names or [name for name in paths if name in words]
    names = names or [name for name in paths if name.split("/")[0] in words]
    lines: dict[str, list[str]] = {}
    for name in names:
        lines.setdefault(ours_and_theirs(scale_of(paths[name]), paper), []).append(name)
    if len(lines) == 1:
        return next(iter(lines))
    return " / ".join(f"{', '.join(named)}: {line}" for line, named in lines.items())
