"""One training run from Python, like `repo-interp train` for one seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from position_papers.training.configuration import (
    TrainingConfiguration,
    joined,
    replaced,
    to_toml,
)
from position_papers.training.folder import TrainingFolder
from position_papers.training.loop import Record
from position_papers.training.loop import train as train_steps
from position_papers.training.plan import recipe
from position_papers.training.preparation import prepare
from position_papers.training.trained import made_with, require_begun


def train(
    scheme: str,
    task: str,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    on_record: Callable[[Record], object] = lambda record: None,
    **fields: Any,
) -> Path:
    """Train a scheme on a task by the task's recipe; continue an interrupted call.

    Args:
        scheme: Layout, with names of schemes of packages or of `repo_interp.register_scheme`.
        task: Name of the task.
        out: Directory of the checkpoint.
        seed: Seed of weights and data.
        on_record: Called with every record of the log.
        **fields: Further fields of a `TrainingConfiguration`, over those of the recipe.

    Returns:
        The directory. `position_papers.training.trained.recorded_scores` reads its scores.

    Raises:
        InputError: A field is unknown, or the run cannot be trained.
        Taken: The directory has another run, or a run with another function of the scheme.
    """
    own = {"scheme": scheme, "seed": seed}
    stated = joined(recipe(task, bool(fields.get("continue_from"))), joined(fields, own))
    configuration = replaced(TrainingConfiguration(task=task), stated)
    command = f"position_papers.training.train({scheme!r}, {task!r}, seed={seed})"
    complete(configuration, Path(out), command, on_record=on_record)
    return Path(out)


def complete(
    configuration: TrainingConfiguration,
    directory: Path,
    command: str,
    stop: Callable[[], bool] = lambda: False,
    on_record: Callable[[Record], object] = lambda record: None,
    scoring: Callable[[int, int], object] = lambda done, total: None,
) -> bool:
    """Begin or continue a run, until its end or until a request to stop.

    Args:
        configuration: Configuration of the run.
        directory: Directory of the run.
        command: Command for training.toml.
        stop: Called after every step; True: stop.
        on_record: Called with every record of the log.
        scoring: Called with the number of answered prompts and of all prompts.

    Returns:
        True if the run is finished.

    Raises:
        InputError: The run cannot be trained.
        Taken: The directory has another run, or a run with another function of the scheme.
    """
    folder = TrainingFolder(directory)
    if folder.is_begun:
        require_begun(directory, configuration)
        if folder.is_finished:
            return True
    else:
        folder.require_free()
    prepared = prepare(configuration)
    with folder.claimed():
        if not folder.is_begun:
            folder.begin(to_toml(configuration, made_with(configuration, command)))
        for record in train_steps(prepared, folder, stop, scoring=scoring):
            on_record(record)
    return folder.is_finished
