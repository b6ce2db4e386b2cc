"""How a checkpoint was trained, as the training.toml beside it says, and what goes into that file beside the configuration."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from repo_interp.models.checkpoints import identify
from repo_interp.models.configuration import tokens_of
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.tasks import Task, make_task
from repo_interp.training.configuration import TrainingConfiguration, read_toml, replaced


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
    return replaced(TrainingConfiguration(task=str(fields.get("task"))), fields)


def trained_task(path: str | os.PathLike[str]) -> Task | None:
    """The task that the checkpoint directory `path` was trained on, in its tokens; None where it lacks a training.toml."""
    configuration = trained_configuration(path)
    return None if configuration is None else in_tokens_of(configured_task(configuration), Path(path))


def configured_task(configuration: TrainingConfiguration) -> Task:
    """The task that `configuration` names. Raises InputError for an unknown one, and for options that it lacks."""
    return make_task(configuration.task, configuration.task_size, **configuration.task_options)


def puts_into_any_tokens(task: Task) -> bool:
    """Whether `task` can be put into the tokens of any tokenizer: it has the option `tokenizer_file`."""
    return "tokenizer_file" in task.options()


def in_tokens_of(task: Task, directory: Path) -> Task:
    """`task` in the tokens of the checkpoint in `directory`, where the task can be put into any tokens and names none itself."""
    if not puts_into_any_tokens(task) or task.options()["tokenizer_file"]:
        return task
    file = tokens_of(directory) / "tokenizer.json"
    return make_task(task.name, **task.options() | {"tokenizer_file": str(file)}) if file.is_file() else task
