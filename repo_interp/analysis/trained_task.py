"""The task that a checkpoint was trained on, from the training.toml beside its weights, or from the
record of one that ships.

task = "reversal"        the name of the task           task_size = "small"       the size that has the defaults
[task_options]           what differs from that size: numbers, and names that the task knows, never a path (`tasks.recorded_task`)
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from repo_interp.checkpoint_files.stated import tokens_of
from repo_interp.errors import InputError, one_line
from repo_interp.shipped import training_record
from repo_interp.tasks import Task, make_task, recorded_task

RECORD = "training.toml"


def trained_task(path: str | os.PathLike[str], **given: Any) -> Task | None:
    """Return the task that the checkpoint directory `path` was trained on, in its tokens; None if
    it has no record of its training.

    Args:
        path: Directory of the checkpoint.
        **given: Options of the user, which go before the recorded ones.

    Raises:
        InputError: For a training.toml that is no TOML file, a task that is not known or lacks an
            option, and for a recorded path.
    """
    fields = _record(Path(path))
    if fields is None:
        return None
    source, options = str(Path(path) / RECORD), fields.get("task_options", {})
    if not isinstance(options, dict):
        raise InputError(f"{source}: task_options is {options!r:.80}; wanted a table of options")
    name, size = str(fields.get("task")), str(fields.get("task_size", "small"))
    # its own tokens are read, not those that it names
    if puts_into_any_tokens(make_task(name, size)):
        own = tokens_of(Path(path)) / "tokenizer.json"
        given = {"tokenizer_file": str(own)} | given if own.is_file() else given
    return recorded_task(source, name, size, options, given)


def trained_name(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the task that the checkpoint directory `path` was trained on; None if it
    has no record of its training.
    """
    fields = _record(Path(path))
    return None if fields is None else str(fields.get("task"))


def _record(directory: Path) -> dict[str, Any] | None:
    """The fields of the record of training; None where there is none."""
    record = directory / RECORD
    try:
        return (
            tomllib.loads(record.read_text(encoding="utf-8"))
            if record.is_file()
            else training_record(directory)
        )
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{record} is no TOML file: {one_line(error)}") from None


def puts_into_any_tokens(task: Task) -> bool:
    """Whether `task` can be put into the tokens of any tokenizer: it has the option
    `tokenizer_file`.
    """
    return "tokenizer_file" in task.options()


def in_tokens_of(task: Task, directory: Path) -> Task:
    """`task` in the tokens of the checkpoint in `directory`, where the task can be put into any
    tokens and names none itself.
    """
    if not puts_into_any_tokens(task) or task.options()["tokenizer_file"]:
        return task
    file = tokens_of(directory) / "tokenizer.json"
    return (
        make_task(task.name, **task.options() | {"tokenizer_file": str(file)})
        if file.is_file()
        else task
    )
