"""How a checkpoint was trained, as the training.toml beside it says, and what goes into that file beside the configuration."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from position_papers.training.configuration import TrainingConfiguration, read_toml, replaced, to_toml
from repo_interp.errors import InputError, Taken
from repo_interp.models.checkpoints import identify
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.tasks import Task, make_task


def made_with(configuration: TrainingConfiguration, command: str) -> dict[str, str]:
    """The table `made_with` of training.toml: the command, versions, and the digest of the checkpoint that the run went on from."""
    origin = {"command": command, "python": platform.python_version()}
    origin |= {name: version(name) for name in ("torch", "transformers", "numpy")}
    origin |= configured_task(configuration).sources()
    if configuration.adapter:
        origin["peft"] = version("peft")
    if configuration.continue_from:
        origin["continued_from"] = checkpoint_digest(identify(configuration.continue_from).directory)
    return origin


def trained_configuration(path: str | os.PathLike[str]) -> TrainingConfiguration | None:
    """How the checkpoint directory `path` was trained; None where it lacks a training.toml."""
    record = Path(path) / "training.toml"
    if not record.is_file():
        return None
    fields = read_toml(record)
    try:
        if "task" not in fields:
            raise InputError("it names no task")
        return replaced(TrainingConfiguration(task=str(fields["task"])), fields)
    except InputError as error:
        raise InputError(f"{record} is not of a training run: {error}") from None


def require_begun(path: str | os.PathLike[str], configuration: TrainingConfiguration) -> None:
    """Raise Taken where another run than that of `configuration` was begun in the directory `path`, or none."""
    begun = trained_configuration(path)
    if begun is None or to_toml(begun) != to_toml(configuration):
        raise Taken(f"{path} has another training run than the one to be trained there; give another --out")


def configured_task(configuration: TrainingConfiguration) -> Task:
    """The task that `configuration` names. Raises InputError for an unknown one, and for options that it lacks."""
    return make_task(configuration.task, configuration.task_size, **configuration.task_options)
