"""The task that a checkpoint was trained on, from the training.toml beside its weights, or from the record of one that ships.

task = "reversal"        the name of the task           task_size = "small"       the size that has the defaults
[task_options]           what differs from that size
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from repo_interp.checkpoint_files.stated import tokens_of
from repo_interp.errors import InputError, one_line
from repo_interp.shipped import training_record
from repo_interp.tasks import Task, make_task

RECORD = "training.toml"


def trained_task(path: str | os.PathLike[str]) -> Task | None:
    """The task that the checkpoint directory `path` was trained on, in its tokens; None if it has no record of its training.

    Raises InputError for a training.toml that is no TOML file, and for a task that is not known, or lacks an option.
    """
    record = Path(path) / RECORD
    try:
        fields = tomllib.loads(record.read_text(encoding="utf-8")) if record.is_file() else training_record(Path(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{record} is no TOML file: {one_line(error)}") from None
    if fields is None:
        return None
    options = fields.get("task_options", {})
    if not isinstance(options, dict):
        raise InputError(f"{record}: task_options is {options!r:.80}; wanted a table of options")
    task = make_task(str(fields.get("task")), str(fields.get("task_size", "small")), **options)
    return in_tokens_of(task, Path(path))


def puts_into_any_tokens(task: Task) -> bool:
    """Whether `task` can be put into the tokens of any tokenizer: it has the option `tokenizer_file`."""
    return "tokenizer_file" in task.options()


def in_tokens_of(task: Task, directory: Path) -> Task:
    """`task` in the tokens of the checkpoint in `directory`, where the task can be put into any tokens and names none itself."""
    if not puts_into_any_tokens(task) or task.options()["tokenizer_file"]:
        return task
    file = tokens_of(directory) / "tokenizer.json"
    return make_task(task.name, **task.options() | {"tokenizer_file": str(file)}) if file.is_file() else task
