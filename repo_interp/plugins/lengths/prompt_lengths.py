"""Prompts of the training length and beyond, for `extrapolation`.

    text           (every token a target)     the same windows, cut to every length
    other tasks    test sets as they are      the one that a model is trained on, and longer ones; a
                                              length is that of the longest prompt

Of a model, this module knows only the training length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from repo_interp.errors import InputError
from repo_interp.experiments.prompt_sets import Windows
from repo_interp.tasks import Prompt, Task
from repo_interp.tasks.task import Scoring

MOST = 4
"""Longest default length, in training lengths."""
SETS = 4
"""Default number of lengths of a task's test sets."""
LEAST = 4
"""Least number of prompts of a length."""


def prompts_by_length(
    scoring: Scoring,
    prompts: Sequence[Prompt],
    training_length: int,
    lengths: Sequence[int],
    count: int,
    seed: int,
) -> tuple[Scoring, dict[int, list[Prompt]]]:
    """Make prompts of the training length and beyond.

    Args:
        scoring: A task, which makes prompts, or the scoring of given prompts.
        prompts: Given prompts; they are cut to length if `scoring` is not a task.
        training_length: Tokens of the longest training sequence.
        lengths: Lengths in tokens; empty: the training length and its doublings up to `MOST` times
            it, as far as there are prompts.
        count: Prompts of a length.
        seed: Seed of the prompts of a task.

    Returns:
        How they are scored, and prompts by length in tokens. The shortest length is the training
        length, or below it where a task has no such test set.

    Raises:
        InputError: Nothing is longer than the training length, or a length is not available.
    """
    # Given prompts cannot be made longer, only cut; a task makes longer ones.
    if not isinstance(scoring, Task):
        # no text twice: half of them are compared with the other half
        windows = list(
            {
                prompt.tokens: prompt for prompt in prompts if len(prompt.tokens) > training_length
            }.values()
        )
        if len(windows) < LEAST:
            raise InputError(
                f"extrapolation needs at least {LEAST} different prompts longer than the "
                f"training length, {training_length} tokens; "
                f"{len(windows)} of the given prompts are. Give longer ones, or leave the "
                "experiment out"
            )
        shortest = min(len(prompt.tokens) for prompt in windows)
        wanted = (
            _doublings(training_length, shortest)
            if not lengths
            else _wanted(lengths, training_length)
        )
        return Windows(), cut(Prompt, windows[:count], wanted)
    # Every token of text is a target, so a prompt may be cut anywhere.
    if scoring.metric == "log perplexity":
        wanted = (
            _wanted(lengths, training_length)
            if lengths
            else [training_length, *_longer_text(scoring, training_length)]
        )
        # Made at the largest length once, so that all lengths are of the same texts
        return scoring, cut(
            scoring.describe, scoring.prompts(count, seed, str(max(wanted))), wanted
        )
    return scoring, _test_sets(scoring, training_length, lengths, count, seed)


def cut(
    describe: Callable[[tuple[int, ...]], Prompt], prompts: Sequence[Prompt], lengths: Sequence[int]
) -> dict[int, list[Prompt]]:
    """Cut prompts to several lengths.

    Args:
        describe: Makes a prompt of tokens (`Task.describe`, or `Prompt` itself).
        prompts: Long prompts.
        lengths: Lengths in tokens.

    Returns:
        For every length the first tokens of all prompts.

    Raises:
        InputError: A prompt is too short.
    """
    shortest = min(len(prompt.tokens) for prompt in prompts)
    if max(lengths) > shortest:
        raise InputError(
            f"a length of {max(lengths)} tokens was asked for, but a prompt has {shortest}; "
            "ask for longer prompts"
        )
    return {length: [describe(prompt.tokens[:length]) for prompt in prompts] for length in lengths}


def _doublings(training_length: int, shortest: int) -> list[int]:
    """The training length and its doublings; without one, the length of the shortest prompt."""
    lengths = [
        training_length << power
        # MOST as the number of doublings and one: 1, 2 and 4 training lengths
        for power in range(MOST.bit_length())
        if training_length << power <= shortest
    ]
    # Without room for a doubling, at least one length lies beyond the training length.
    return lengths if len(lengths) > 1 else [training_length, shortest]


def _wanted(lengths: Sequence[int], training_length: int) -> list[int]:
    if min(lengths) < 2 or max(lengths) <= training_length:
        raise InputError(
            "lengths of extrapolation must reach beyond the training length, "
            f"{training_length} tokens"
        )
    # The training length is always measured: all others are compared with it.
    return sorted({training_length, *lengths})


def _longer_text(task: Task, training_length: int) -> list[int]:
    """Doublings of the training length for which the task has text."""
    lengths = []
    for power in range(1, MOST.bit_length()):
        try:
            # One prompt tells whether the task has as much text; the
            # prompts themselves follow later.
            task.prompts(1, 0, str(training_length << power))
        except InputError:
            # No longer prompts at all: the task's error says why.
            if not lengths:
                raise
            break
        lengths.append(training_length << power)
    return lengths


def _test_sets(
    task: Task, training_length: int, lengths: Sequence[int], count: int, seed: int
) -> dict[int, list[Prompt]]:
    """Prompts of the longest test set within the training length, and of some longer ones."""
    sizes: dict[int, str] = {}
    for name in (task.default_test_set, *task.test_sets):
        # The default set comes first and keeps its place among sets of equal length.
        sizes.setdefault(
            max(len(prompt.tokens) for prompt in task.prompts(LEAST, seed, name)), name
        )
    within, beyond = (
        [size for size in sizes if size <= training_length],
        sorted(size for size in sizes if size > training_length),
    )
    if not within or not beyond:
        raise InputError(
            f"extrapolation needs test sets of task {task.name} within the training length, "
            f"{training_length} tokens, and beyond it; "
            f"theirs have {min(sizes)} to {max(sizes)} tokens. Leave the experiment out"
        )
    if lengths:
        absent = [length for length in lengths if length not in sizes]
        if absent:
            known = ", ".join(map(str, sorted(sizes)))
            raise InputError(
                f"task {task.name} has no test set of {absent[0]} tokens; its test sets have "
                f"{known}"
            )
        beyond = sorted(length for length in lengths if length > training_length)
    # At equal steps over the sets; rounding may choose one twice where there are few.
    chosen = [
        beyond[place]
        for place in np.unique(np.linspace(0, len(beyond) - 1, SETS - 1).round().astype(int))
    ]
    # The longest set within training represents the training length.
    return {
        size: task.prompts(count, seed, sizes[size])
        for size in (max(within), *(beyond if lengths else chosen))
    }
