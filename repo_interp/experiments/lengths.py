"""Prompts of the training length and longer ones, for any task: what `extrapolation` is measured on.

    text           (every token a target)     the same windows, cut to every length
    other tasks    test sets as they are      the one that a model is trained on, and longer ones; a length is that of the longest prompt

Knows nothing about models but the length they were trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repo_interp.errors import InputError
from repo_interp.experiments.given import Answers, Windows
from repo_interp.tasks import Prompt, Task

MOST = 4
"""Longest default length, in training lengths."""
SETS = 4
"""Lengths of a task's test sets that are taken by default."""
LEAST = 4
"""Prompts of a length that are needed."""


def prompts_by_length(
    task: Task, prompts: Sequence[Prompt], training_length: int, lengths: Sequence[int], count: int, seed: int
) -> tuple[Task, dict[int, list[Prompt]]]:
    """Prompts by length in tokens, the shortest of the training length or - a task's - below it; and the task that judges them.

    `lengths` in tokens; empty: the training length and its doublings up to `MOST` times it, as far as there are prompts. `prompts` are
    taken where they were given and no task makes others. Raises InputError where nothing is longer than the training length.
    """
    if isinstance(task, Answers):
        windows = [prompt for prompt in prompts if len(prompt.tokens) > training_length]
        if len(windows) < LEAST:
            raise InputError(
                f"extrapolation needs at least {LEAST} prompts longer than the training length, {training_length} tokens; "
                f"{len(windows)} of the given prompts are. Give longer ones, or leave the experiment out"
            )
        judge = Windows(task.vocabulary, task.longest)
        shortest = min(len(prompt.tokens) for prompt in windows)
        wanted = _doublings(training_length, shortest) if not lengths else _wanted(lengths, training_length)
        return judge, cut(judge, windows[:count], wanted)
    if task.metric == "log perplexity":
        wanted = _wanted(lengths, training_length) if lengths else [training_length, *_longer_text(task, training_length)]
        return task, cut(task, task.prompts(count, seed, str(max(wanted))), wanted)
    return task, _test_sets(task, training_length, lengths, count, seed)


def cut(task: Task, prompts: Sequence[Prompt], lengths: Sequence[int]) -> dict[int, list[Prompt]]:
    """The first tokens of `prompts`, for every length. Raises InputError where a prompt is too short."""
    shortest = min(len(prompt.tokens) for prompt in prompts)
    if max(lengths) > shortest:
        raise InputError(f"a length of {max(lengths)} tokens was asked for, but a prompt has {shortest}; ask for longer prompts")
    return {length: [task.describe(prompt.tokens[:length]) for prompt in prompts] for length in lengths}


def _doublings(training_length: int, shortest: int) -> list[int]:
    """The training length, its doublings, and - where that is less than its double - what the shortest prompt has."""
    found = [training_length << power for power in range(MOST.bit_length()) if training_length << power <= shortest]
    return found if len(found) > 1 else [training_length, shortest]


def _wanted(lengths: Sequence[int], training_length: int) -> list[int]:
    if min(lengths) < 2 or max(lengths) <= training_length:
        raise InputError(f"lengths of extrapolation must reach beyond the training length, {training_length} tokens")
    return sorted({training_length, *lengths})


def _longer_text(task: Task, training_length: int) -> list[int]:
    """Doublings of the training length for which the task has text."""
    found = []
    for power in range(1, MOST.bit_length()):
        try:
            task.prompts(1, 0, str(training_length << power))
        except InputError:
            if not found:
                raise
            break
        found.append(training_length << power)
    return found


def _test_sets(task: Task, training_length: int, lengths: Sequence[int], count: int, seed: int) -> dict[int, list[Prompt]]:
    """Of the test sets of one length each the first: the longest within the training length, and some longer ones."""
    sizes: dict[int, str] = {}
    for name in (task.default_test_set, *task.test_sets):
        sizes.setdefault(max(len(prompt.tokens) for prompt in task.prompts(LEAST, seed, name)), name)
    within, beyond = [size for size in sizes if size <= training_length], sorted(size for size in sizes if size > training_length)
    if not within or not beyond:
        raise InputError(
            f"extrapolation needs test sets of task {task.name} within the training length, {training_length} tokens, and beyond it; "
            f"theirs have {min(sizes)} to {max(sizes)} tokens. Leave the experiment out"
        )
    if lengths:
        absent = [length for length in lengths if length not in sizes]
        if absent:
            known = ", ".join(map(str, sorted(sizes)))
            raise InputError(f"task {task.name} has no test set of {absent[0]} tokens; its test sets have {known}")
        beyond = sorted(length for length in lengths if length > training_length)
    chosen = [beyond[place] for place in np.unique(np.linspace(0, len(beyond) - 1, SETS - 1).round().astype(int))]
    found: dict[int, list[Prompt]] = {}
    for size in (max(within), *(beyond if lengths else chosen)):
        found[size] = task.prompts(count, seed, sizes[size])
    return found
