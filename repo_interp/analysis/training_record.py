"""The task that a checkpoint was trained on, from its record.

From the training.toml in its directory, or from the record of a checkpoint of the package:

    task = "reversal"      the name of the task
    task_size = "small"    the size that has the defaults
    [task_options]         differences from that size: numbers, and names that the task knows,
                           never a path (`tasks.recorded_task`)
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repo_interp.checkpoint_files.shipped import training_record
from repo_interp.errors import InputError, one_line
from repo_interp.tasks import Task, make_task, recorded_task

RECORD = "training.toml"


def task_of_record(
    directory: Path, tokenizer_file: Callable[[], Path | None], **given: Any
) -> Task | None:
    """Return the task that a checkpoint was trained on, in its tokens.

    Args:
        directory: Directory of the checkpoint.
        tokenizer_file: Finds its tokenizer.json; called for a task of any tokens.
        **given: Options of the user, which precede the recorded ones.

    Returns:
        The task; None if the checkpoint has no record of its training.

    Raises:
        InputError: training.toml is no TOML file or names a path, or the task or an option is
            unknown.
    """
    fields = read_record(directory)
    if fields is None:
        return None
    source, options = str(directory / RECORD), fields.get("task_options", {})
    if not isinstance(options, dict):
        raise InputError(f"{source}: task_options is {options!r:.80}; wanted a table of options")
    name, size = str(fields.get("task")), str(fields.get("task_size", "small"))
    # Tokens come from the checkpoint, not from the record
    if puts_into_any_tokens(make_task(name, size)):
        file = tokenizer_file()
        # As if the user had given it: recorded_task refuses files that a record chooses
        given = {"tokenizer_file": str(file)} | given if file and file.is_file() else given
    return recorded_task(source, name, size, options, given)


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read the record of a training.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        Its fields; None where there is none.

    Raises:
        InputError: training.toml is no TOML file.
    """
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
    """Return whether a task can use the tokens of any tokenizer.

    Args:
        task: Any task.

    Returns:
        True if it has the option `tokenizer_file`.
    """
    return "tokenizer_file" in task.options()
