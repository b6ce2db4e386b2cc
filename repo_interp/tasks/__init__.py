"""Prompts with named token spans, and how an answer is scored. Knows no model.

    prompts = niah(tokenizer, variant="multikey_1", length=4096)      RULER's needle in a haystack, for any tokenizer
    task    = make_task("reversal", longest=20)                       a task to train and score on: see task.Task
    prompts = task.prompts(20, test_set="25")

A task is imported when it is first made, and found by its entry point, ours (`entry_points.OWN`) as those of other packages: the group
`repo_interp.tasks` has, by name, mappings from names of sizes to tasks, with a size "small".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from repo_interp.entry_points import TASKS, called, find, names, require_names
from repo_interp.errors import InputError, one_line
from repo_interp.stub_names import stub_names
from repo_interp.tasks.niah import niah  # noqa: F401  # now: once its module is loaded, the name would be that of the module
from repo_interp.tasks.task import Task
from repo_interp.values import checked

__getattr__, __dir__, __all__ = stub_names(__name__, "make_task", "task_names")


def task_names() -> tuple[str, ...]:
    """Names that `make_task` takes: ours, then those of other packages."""
    return names(TASKS)


def make_task(name: str, size: str = "small", **options: Any) -> Task:
    """The task `name` at a named size ("small", "paper"), with some of its options changed.

    Raises InputError for an unknown name, size or option, and for a value of another type or out of range.
    """
    sizes = _sizes(name)
    if size not in sizes:
        raise InputError(f"task {name}: wanted a size, one of {', '.join(sizes)}; got {size!r}")
    task = sizes[size]
    known, kinds = task.options(), get_type_hints(type(task), include_extras=True)
    for option in options:
        if option not in known:
            raise InputError(f"task {name} has no option {option!r}; it has {', '.join(known)}")
    return dataclasses.replace(
        task, **{option: checked(value, kinds[option], f"task {name}.{option}") for option, value in options.items()}
    )


def _sizes(name: str) -> Mapping[str, Task]:
    require_names(TASKS, [name])
    sizes = find(TASKS, name)
    tasks = sizes.values() if isinstance(sizes, Mapping) else ()
    if not tasks or not all(isinstance(task, Task) and task.name == name for task in tasks):
        raise InputError(
            f"{called(TASKS, name)}: wanted a mapping from sizes to tasks of that name, got {one_line(repr(sizes), 80)}"
        )
    return sizes
