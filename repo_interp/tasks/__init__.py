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
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

from repo_interp.entry_points import TASKS, called, find, names
from repo_interp.errors import InputError, one_line
from repo_interp.tasks.niah import niah, niah_score, niah_scores
from repo_interp.tasks.prompt import Prompt, digest
from repo_interp.tasks.prompt.jsonl import read_prompts, write_prompts
from repo_interp.tasks.prompt.text import prompt_from_text
from repo_interp.tasks.task import Batch, Response, Task
from repo_interp.values import checked

if TYPE_CHECKING:
    from repo_interp.tasks.copying import copying_prompts
    from repo_interp.tasks.few_shot_text import few_shot_prompts, following
    from repo_interp.tasks.random_tokens import random_token_prompts
    from repo_interp.tasks.reversal import reversal_prompts

__all__ = [
    "Batch",
    "Prompt",
    "Response",
    "Task",
    "copying_prompts",
    "digest",
    "few_shot_prompts",
    "following",
    "make_task",
    "niah",
    "niah_score",
    "niah_scores",
    "prompt_from_text",
    "random_token_prompts",
    "read_prompts",
    "reversal_prompts",
    "task_names",
    "write_prompts",
]

_LATER = {
    "copying_prompts": "copying",
    "few_shot_prompts": "few_shot_text",
    "following": "few_shot_text",
    "random_token_prompts": "random_tokens",
    "reversal_prompts": "reversal",
}
"""Names of this module that are imported when they are first asked for, with the modules they stand in."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


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
    sizes = find(TASKS, name)
    if sizes is None:
        raise InputError(f"wanted a task, one of {', '.join(task_names())}; got {name!r}")
    tasks = sizes.values() if isinstance(sizes, Mapping) else ()
    if not tasks or not all(isinstance(task, Task) and task.name == name for task in tasks):
        raise InputError(
            f"{called(TASKS, name)}: wanted a mapping from sizes to tasks of that name, got {one_line(repr(sizes), 80)}"
        )
    return sizes
