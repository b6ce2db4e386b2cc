"""The task of a checkpoint: one that is named, or the one that it was trained on (`training_record`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from repo_interp.analysis.training_record import puts_into_any_tokens, read_record, task_of_record
from repo_interp.checkpoint_files.stated import tokens_of
from repo_interp.errors import InputError
from repo_interp.tasks import Task, make_task


def task_of(
    directory: Path | None, name: str | None = None, size: str | None = None, **options: Any
) -> Task:
    """Return a task for a checkpoint: as in its training, or at a size.

    A task that works with any tokens, such as language, uses the checkpoint's tokens.

    Args:
        directory: Directory of the checkpoint; None: none.
        name: Name of the task; None: the task of the training.
        size: Size of the task; None: for the task of the training, its size in training; else
            "small".
        **options: Single options, which override those of the size.

    Returns:
        The task.

    Raises:
        InputError: No task is known, or the task, its size or an option is unknown.
    """
    name = task_name(directory, name)
    if directory is not None and name == trained_name(directory) and size is None:
        task = trained_task(directory, **options)
        assert task is not None
        return task
    made = make_task(name, size or "small", **options)
    return made if directory is None else in_tokens_of(made, directory)


def task_name(directory: Path | None, name: str | None = None) -> str:
    """Return a name, or the name of the task on which a checkpoint was trained.

    Args:
        directory: Directory of the checkpoint; None: none.
        name: Name to return; None: that of the training.

    Returns:
        The name.

    Raises:
        InputError: No name is given, and the checkpoint records none.
    """
    name = trained_name(directory) if name is None and directory else name
    if name is None:
        raise InputError(
            f"{directory.name if directory else 'the model'} does not say which task it was "
            "trained on; name one, or ruler"
        )
    return name


def trained_task(path: str | os.PathLike[str], **given: Any) -> Task | None:
    """Return the task that a checkpoint was trained on, in its tokens.

    Args:
        path: Directory of the checkpoint.
        **given: Options of the user, which precede the recorded ones.

    Returns:
        The task; None if the checkpoint has no record of its training.

    Raises:
        InputError: training.toml is no TOML file or names a path, or the task or an option is
            unknown.
    """
    directory = Path(path)
    return task_of_record(directory, lambda: tokens_of(directory) / "tokenizer.json", **given)


def trained_name(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the task that a checkpoint was trained on.

    Args:
        path: Directory of the checkpoint.

    Returns:
        The name; None if the checkpoint has no record of its training.
    """
    fields = read_record(Path(path))
    return None if fields is None else str(fields.get("task"))


def in_tokens_of(task: Task, directory: Path) -> Task:
    """Return a task in the tokens of a checkpoint.

    Args:
        task: Any task.
        directory: Directory of the checkpoint.

    Returns:
        A new task; or `task`, where it cannot use other tokens, names some, or the checkpoint has
        no tokenizer.
    """
    if not puts_into_any_tokens(task) or task.options()["tokenizer_file"]:
        return task
    file = tokens_of(directory) / "tokenizer.json"
    return (
        make_task(task.name, **task.options() | {"tokenizer_file": str(file)})
        if file.is_file()
        else task
    )
