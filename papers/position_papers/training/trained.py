"""How a checkpoint was trained, as the training.toml beside it or the zoo's runs.jsonl says, and what goes into training.toml beside the
configuration.

    ZOO/TASK/runs.jsonl    a line per training run of the task: {"name", "seed", "loss", "seconds", "scores", "training"}, with what
                           scores.json and training.toml of the run say, and the loss of its last steps
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from position_papers.training.configuration import TrainingConfiguration, read_toml, replaced, to_toml
from position_papers.zoo_directory import recorded_at
from repo_interp.errors import InputError, Taken
from repo_interp.models.checkpoints import identify
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.shipped import RUNS
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
    """How the checkpoint directory `path` was trained; of one that the zoo has only records of, its first seed. None if nothing says it."""
    record = Path(path) / "training.toml"
    if not record.is_file():
        lines = zoo_runs(path)
        return configured(lines[0]["training"]) if lines else None
    try:
        return configured(read_toml(record))
    except InputError as error:
        raise InputError(f"{record} is not of a training run: {error}") from None


def configured(stated: Mapping[str, Any]) -> TrainingConfiguration:
    """The configuration whose fields, as training.toml has them, are `stated`. Raises InputError where they name no task, or do not fit."""
    fields = {name: value for name, value in stated.items() if name != "made_with"}
    if "task" not in fields:
        raise InputError("it names no task")
    return replaced(TrainingConfiguration(task=str(fields["task"])), fields)


def require_begun(path: str | os.PathLike[str], configuration: TrainingConfiguration) -> None:
    """Raise Taken where another run than that of `configuration` was begun in the directory `path`, or none."""
    begun = trained_configuration(path)
    if begun is None or to_toml(begun) != to_toml(configuration):
        raise Taken(f"{path} has another training run than the one to be trained there; give another --out")


def zoo_runs(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of TASK/NAME or TASK/NAME/seed-N in a zoo, by seed; none for another directory. The directory itself may be missing."""
    directory = recorded_at(Path(directory))
    seed = seed_of(directory)
    of_seeds = directory if seed is None else directory.parent
    lines = read_runs(of_seeds.parent / RUNS)
    return [line for line in lines if line["name"] == of_seeds.name and seed in (None, line["seed"])]


def read_runs(file: Path) -> list[dict[str, Any]]:
    """The lines of a runs.jsonl; none where there is no such file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def seed_of(directory: Path) -> int | None:
    """N of a directory seed-N; None for another name."""
    prefix, _, digits = directory.name.partition("seed-")
    return int(digits) if not prefix and digits.isdecimal() else None


def configured_task(configuration: TrainingConfiguration) -> Task:
    """The task that `configuration` names. Raises InputError for an unknown one, and for options that it lacks."""
    return make_task(configuration.task, configuration.task_size, **configuration.task_options)
