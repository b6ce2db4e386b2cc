"""Prompts with named token spans, and how an answer is scored. Knows no model.

    prompts = niah(tokenizer, variant="multikey_1", length=4096)      RULER's needle in a haystack, for any tokenizer
    task    = make_task("reversal", longest=20)                       a task to train and score on: see task.Task
    prompts = task.prompts(20, test_set="25")

Tasks are imported when they are first made. Another package adds one by an entry point of the group `repo_interp.tasks`: a mapping
from names of sizes to tasks, with a size "small".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from repo_interp.entry_points import added, added_names
from repo_interp.errors import InputError
from repo_interp.tasks.niah import niah, niah_score, niah_scores
from repo_interp.tasks.prompts import Prompt, digest, prompt_from_text, read_prompts, write_prompts
from repo_interp.tasks.task import Batch, Response, Task

if TYPE_CHECKING:
    from repo_interp.tasks.copying import copying_prompts
    from repo_interp.tasks.few_shot_text import few_shot_prompts, following
    from repo_interp.tasks.random_tokens import random_token_prompts

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
    "task_names",
    "write_prompts",
]

_LATER = {
    "copying_prompts": "copying",
    "few_shot_prompts": "few_shot_text",
    "following": "few_shot_text",
    "random_token_prompts": "random_tokens",
}
_MODULES = {
    "reversal": "reversal",
    "niah": "niah_small",
    "copying": "copying",
    "few_shot": "few_shot",
    "flip_flop": "flip_flop",
    "selective_copy": "selective_copy",
    "counting": "counting",
    "random_tokens": "random_tokens",
    "language": "language",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def task_names() -> tuple[str, ...]:
    """Names that `make_task` takes: ours, then those of other packages."""
    return (*_MODULES, *(name for name in added_names("repo_interp.tasks") if name not in _MODULES))


def make_task(name: str, size: str = "small", **options: Any) -> Task:
    """The task `name` at a named size ("small", "paper"), with some of its options changed.

    Raises InputError for an unknown name, size or option, and for a value of another type or out of range.
    """
    sizes = _sizes(name)
    if size not in sizes:
        raise InputError(f"task {name}: wanted a size, one of {', '.join(sizes)}; got {size!r}")
    task = sizes[size]
    known = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    for option, value in options.items():
        if option not in known:
            raise InputError(f"task {name} has no option {option!r}; it has {', '.join(known)}")
        wanted = type(known[option])
        if wanted is float and type(value) is int:
            options[option] = float(value)
        elif type(value) is not wanted:
            raise InputError(f"task {name}: {option} is {value!r}; wanted a {wanted.__name__} like {known[option]!r}")
    return dataclasses.replace(task, **options)


def _sizes(name: str) -> Mapping[str, Task]:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}").SIZES
    sizes = added("repo_interp.tasks", name)
    if sizes is None:
        raise InputError(f"wanted a task, one of {', '.join(task_names())}; got {name!r}")
    if not (
        isinstance(sizes, Mapping) and sizes and all(isinstance(task, Task) and task.name == name for task in sizes.values())
    ):
        raise InputError(
            f"the task {name!r} of another package: wanted a mapping from sizes to tasks of that name, got {sizes!r:.80}"
        )
    return sizes
