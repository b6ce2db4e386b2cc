"""Make prompts with named token spans, and score answers. This package knows no model.

    prompts = niah(tokenizer, variant="multikey_1", length=4096)    RULER, for any tokenizer
    task    = make_task("reversal", longest=20)                     a task to train and score on
    prompts = task.prompts(20, test_set="25")

A task is imported at its first use. Our tasks (`entry_points.OWN`) and tasks of other packages are
entry points of the group `repo_interp.tasks`: by name of the task, a mapping from names of sizes to
tasks, with at least the size "small".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from lazy_loader import attach_stub

from repo_interp.entry_points import TASKS, called, find, names, require_names
from repo_interp.errors import InputError, quoted
from repo_interp.tasks.task import Task
from repo_interp.values import checked

# Names resolve on first use, so that one task is imported without the others
__getattr__, _, __all__ = attach_stub(__name__, __file__)
__all__ += ["make_task", "task_names"]


def __dir__() -> list[str]:
    return sorted(__all__)


def task_names() -> tuple[str, ...]:
    """List the tasks that `make_task` knows.

    Returns:
        Our names, then names from other packages.
    """
    return names(TASKS)


def make_task(name: str, size: str = "small", **options: Any) -> Task:
    """Make a task.

    Args:
        name: One of `task_names`.
        size: Size that has the defaults: "small" or "paper".
        **options: Options that replace the defaults.

    Returns:
        The task.

    Raises:
        InputError: The name, the size or an option is unknown, or a value has another type or is
            out of range.
    """
    sizes = _sizes(name)
    if not isinstance(size, str) or size not in sizes:
        raise InputError(
            f"task {name}: wanted a size, one of {', '.join(sizes)}; got {quoted(size)}"
        )
    task = sizes[size]
    # With extras, since the annotations have ranges for the checks
    known, kinds = task.options(), get_type_hints(type(task), include_extras=True)
    for option in options:
        if option not in known:
            raise InputError(
                f"task {name} has no option {quoted(option)}; it has {', '.join(known)}"
            )
    return dataclasses.replace(
        task,
        **{
            option: checked(value, kinds[option], f"task {name}.{option}")
            for option, value in options.items()
        },
    )


def recorded_task(
    source: str, name: str, size: str, options: Mapping[str, Any], given: Mapping[str, Any]
) -> Task:
    """Return the task that a file from outside records.

    Options `given` by the user replace the recorded ones. A record may set numbers, and texts that
    are names of the task. It cannot choose a file to read.

    Args:
        source: The file, for messages.
        name: Name of the task.
        size: Size that has the defaults.
        options: Options that the file records.
        given: Options of the user.

    Returns:
        The task.

    Raises:
        InputError: As `make_task`, and for a recorded text that could name a file and is not
            `given`.
    """
    task = make_task(name, size)
    kinds = get_type_hints(type(task))
    # Options from the user are trusted, even names of files
    for option in options.keys() & kinds.keys() - given.keys():
        value, allowed = (
            options[option],
            # Allowed texts are not paths: empty, a name of the task, or a member of its Literal.
            ("", *task.named_texts.get(option, ()), *get_args(kinds[option])),
        )
        if not all(
            isinstance(item, int | float) or item in allowed
            for item in (value if isinstance(value, list) else [value])
        ):
            raise InputError(
                f"{source} sets {option} of the task {name} to {quoted(value)}; "
                "no file from outside chooses what is "
                f"read here, so if this is wanted, give --set {option}={option.upper()}, or "
                "other prompts by --prompts"
            )
    return make_task(name, size, **{**options, **given})


def _sizes(name: str) -> Mapping[str, Task]:
    # Unknown names are refused first, so that the message lists the existing tasks.
    require_names(TASKS, [name])
    sizes = find(TASKS, name)
    tasks = sizes.values() if isinstance(sizes, Mapping) else ()
    # Checkpoints record a task by its name, which must be the name of the entry point.
    if not tasks or not all(isinstance(task, Task) and task.name == name for task in tasks):
        raise InputError(
            f"{called(TASKS, name)}: wanted a mapping from sizes to tasks of that name, got "
            f"{quoted(sizes)}"
        )
    return sizes
