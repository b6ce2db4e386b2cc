"""Scores of a model on a task, by test set and over the axes that the task names.

    score       mean over prompts of the score of the task; error = 1 - score if the score is a share
                of right answers
    log p       mean over all targets t of -log p(token_t | tokens before t), nats; perplexity =
                exp(log p)

Prompts of a test set depend only on the seed and the set. Depths are rounded to the nearest ten
percent for the map. This module knows nothing about the training of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from repo_interp.errors import InputError, quoted, renumber_prompts
from repo_interp.experiments.responses import forced_responses, generated_responses
from repo_interp.interventions.replacing import require_named_tokens
from repo_interp.measures.labels import described_group, with_attrs
from repo_interp.models.decoder import Decoder
from repo_interp.models.side_by_side import BatchSize, batches, by_prompt
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt, Response, Task
from repo_interp.tasks.task import PlainText

ANSWERS = ("forced", "generated")
"""Teacher-forced in one pass, or generated token by token; see `training.responses`."""


class Cost(NamedTuple):
    """The size of the work of scoring a model, known before the first forward pass."""

    prompts: int
    longest: int
    """Tokens of the longest prompt."""
    tokens: int
    """Tokens of all prompts."""
    passes: int
    """Forward passes: one per batch, or one per batch and generated token."""


def task_scores(
    decoder: Decoder,
    task: Task,
    test_sets: Sequence[str] | None = None,
    count: int = 200,
    seed: int = 0,
    answers: str = "forced",
    batch_size: BatchSize = 32,
    progress: Callable[[int, int], None] | None = None,
    store: Store = NOT_KEPT,
    announce: Callable[[Cost], None] | None = None,
) -> xr.Dataset:
    """Score a model on test sets of a task.

    Args:
        decoder: Decoder of the model.
        task: Makes prompts and scores answers.
        test_sets: Names; None: all sets of the task. Sets longer than a learned position table are
            then left out, and the attribute `left_out` lists them.
        count: Prompts of every test set.
        seed: Seed of the prompts.
        answers: "forced" or "generated".
        batch_size: Prompts side by side.
        progress: Called with prompts done and in all.
        store: Keeps the answers of finished batches.
        announce: Called with the cost before the first forward pass.

    Returns:
        The group `scores`: `score [test_set, prompt]`, `mean_score`, `standard_error`, `tokens` of
        the longest prompt [test_set]; with forced answers `log_perplexity [test_set]` in nats per
        target; `score_map` over the axes of the task if its prompts have them.

    Raises:
        InputError: A test set is unknown, the model cannot take a prompt, or answers cannot be
            generated.
    """
    if answers not in ANSWERS:
        raise InputError(
            f"answers {quoted(answers)} are unknown; wanted one of {', '.join(ANSWERS)}"
        )
    if answers == "generated" and isinstance(task, PlainText):
        raise InputError(
            f"{task.name} is scored by the log perplexity of its text, so nothing is "
            "generated; leave the answers out"
        )
    sets = list(task.test_sets) if test_sets is None else sets_named(test_sets)
    longest = decoder.longest_prompt
    asked = {test_set: task.prompts(count, seed, test_set) for test_set in sets}
    # Named sets are kept, and refused later if too long; by default, sets that are too long are
    # left out.
    if test_sets is None and longest is not None:
        asked = {
            test_set: prompts for test_set, prompts in asked.items() if _longest(prompts) <= longest
        }
    if not asked:
        raise InputError(
            f"every prompt of {task.name} is longer than the {longest} tokens that the "
            "model's learned table has"
        )
    # Before any pass: an intervention may name tokens that no prompt has.
    require_named_tokens(
        decoder, count, [len(prompt.tokens) for prompts in asked.values() for prompt in prompts]
    )
    answered = _responses(decoder, task, asked, answers, batch_size, store, progress, announce)
    options = {
        f"task_{name}": value if isinstance(value, str) else repr(value)
        for name, value in task.options().items()
    }
    drawn = {
        "test_sets_count": task.test_sets_count,
        "count": count,
        "seed": seed,
        "answers": answers,
    }
    # Recorded, so that a table with fewer rows does not look complete
    left_out = [test_set for test_set in sets if test_set not in asked]
    return _scored(task, asked, answered, answers).assign_attrs(
        task.attributes | drawn | options, left_out=left_out
    )


def _scored(
    task: Task,
    asked: Mapping[str, Sequence[Prompt]],
    answered: Mapping[str, Sequence[Response]],
    answers: str,
) -> xr.Dataset:
    """Label the scores of responses, with equally many prompts per test set."""
    # Every set has `count` prompts, so scores stack: [test_set, prompt]
    by_prompt = np.stack(
        [
            np.asarray(task.score(answered[test_set], asked[test_set]), dtype=np.float64)
            for test_set in asked
        ]
    )
    result = labelled_scores(asked, by_prompt, task.metric, task.units)
    # Generated answers have no log-probabilities of the reference.
    if answers == "forced":
        mean = xr.DataArray(
            [_log_perplexity(responses) for responses in answered.values()], dims="test_set"
        )
        result["log_perplexity"] = with_attrs(mean, "mean of -log p over all targets", "nat")
    mapped = score_map(
        [prompt for prompts in asked.values() for prompt in prompts], by_prompt.ravel(), task.axes
    )
    if mapped is not None:
        result["score_map"] = with_attrs(
            mapped, f"{task.metric} by {' and '.join(task.axes)}", task.units
        )
    return result


def labelled_scores(
    asked: Mapping[str, Sequence[Prompt]],
    scores: Float[np.ndarray, "test_set prompt"],
    metric: str,
    units: str,
) -> xr.Dataset:
    """Label scores with means, standard errors, axes, units and long names.

    Args:
        asked: Prompts by test set.
        scores: Score of every prompt.
        metric: Name of the score.
        units: Units of the score.

    Returns:
        `score`, `mean_score`, `standard_error` and `tokens`.
    """
    count = scores.shape[1]
    # One prompt has no deviation, and numpy would warn.
    deviation = scores.std(axis=1, ddof=1) if count > 1 else np.full(len(asked), np.nan)
    values = {
        "score": (("test_set", "prompt"), scores),
        "mean_score": ("test_set", scores.mean(axis=1)),
        "standard_error": ("test_set", deviation / np.sqrt(count)),
        "tokens": ("test_set", [_longest(prompts) for prompts in asked.values()]),
    }
    texts = {
        "score": f"{metric} of every prompt [{units}]",
        "mean_score": f"{metric}, mean over prompts [{units}]",
        "standard_error": f"standard error of the mean score [{units}]",
        "tokens": "tokens of the longest prompt [tokens]",
    }
    return described_group(values, texts, {"test_set": list(asked), "prompt": np.arange(count)})


def cost_of(prompts: Sequence[Prompt], passes: int) -> Cost:
    """Return the cost of prompts.

    Args:
        prompts: All prompts.
        passes: Forward passes.

    Returns:
        The cost.
    """
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    return Cost(len(prompts), _longest(prompts), tokens, passes)


def _longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.tokens) for prompt in prompts)


def _log_perplexity(responses: Sequence[Response]) -> float:
    """Mean of -log p over all targets; NaN if a response has no targets."""
    return -float(
        np.mean(
            # NaN makes the mean NaN, since a mean over other prompts is not comparable.
            [value for response in responses for value in response.log_probabilities or (np.nan,)]
        )
    )


def sets_named(test_sets: Sequence[str | int] | str | int) -> list[str]:
    """Read names of test sets.

    Args:
        test_sets: One or several names, which may be whole numbers.

    Returns:
        Names as text.

    Raises:
        InputError: No name is given, or a name is repeated.
    """
    several = [test_sets]
    if not isinstance(test_sets, str):
        with suppress(TypeError):  # a single number, also one of torch
            several = [*test_sets]  # pyright: ignore[reportGeneralTypeIssues]
    # Different forms of a number ("0512", 512) name the same set.
    names = [
        str(int(name)) if name.isascii() and name.isdecimal() else name
        for name in map(str, several)
    ]
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if not names or twice:
        wanted = (
            f"{twice[0]} was asked for twice; give each number or name once"
            if twice
            else "none was given; give a number or name"
        )
        raise InputError(f"test sets: {wanted}")
    return names


def score_map(
    prompts: Sequence[Prompt], scores: np.ndarray, axes: Sequence[str]
) -> xr.DataArray | None:
    """Average scores over combinations of attributes.

    Args:
        prompts: Prompts with attributes.
        scores: Score of every prompt.
        axes: Attributes; depths, which are real, are rounded to the nearest ten percent.

    Returns:
        Mean scores, NaN for combinations without prompts; None if a prompt lacks an attribute.
    """
    if not axes or not all(axis in prompt.attributes for prompt in prompts for axis in axes):
        return None
    labels = {axis: [_label(axis, prompt.attributes[axis]) for prompt in prompts] for axis in axes}
    known = {axis: sorted(set(of_prompts)) for axis, of_prompts in labels.items()}
    shape = tuple(len(values) for values in known.values())
    total, number = np.zeros(shape), np.zeros(shape)
    places = tuple(np.array([known[axis].index(label) for label in labels[axis]]) for axis in axes)
    # np.add.at, since prompts share cells: `total[places] += scores` would count one per cell.
    np.add.at(total, places, scores)
    np.add.at(number, places, 1.0)
    # 0 / 0 for combinations that no prompt has: NaN
    with np.errstate(invalid="ignore"):
        mean = total / number
    return xr.DataArray(mean, dims=list(axes), coords={axis: known[axis] for axis in axes})


def _responses(
    decoder: Decoder,
    task: Task,
    asked: Mapping[str, Sequence[Prompt]],
    answers: str,
    batch_size: BatchSize,
    store: Store,
    progress: Callable[[int, int], None] | None,
    announce: Callable[[Cost], None] | None,
) -> dict[str, list[Response]]:
    """Get responses to the prompts of all test sets, batch by batch, the longest prompts first."""
    cut: dict[str, tuple[str, list[int]]] = {}
    for row, (test_set, prompts) in enumerate(asked.items()):
        # Keys of the store have the index of the set, since its name may not fit into a file name.
        lengths = [len(prompt.tokens) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda number: lengths[number])
        cut |= {
            f"{row}-{place}": (test_set, some)
            for place, some in enumerate(batches(order, lengths, batch_size))
        }
    # Processes share the batches; short batches at the end keep the waiting short.
    longest_first = sorted(
        cut,
        key=lambda name: -max(len(asked[cut[name][0]][number].tokens) for number in cut[name][1]),
    )
    points = {
        name: partial(_respond, decoder, task, *cut[name], asked[cut[name][0]], answers)
        for name in longest_first
    }
    cuts = [cut[name][1] for name in longest_first]
    if announce is not None:
        prompts = [prompt for prompts in asked.values() for prompt in prompts]
        # Generation takes one pass per token of the longest answer in a batch.
        passes = [
            max(len(task.targets(asked[test_set][number])) for number in some)
            for test_set, some in cut.values()
        ]
        announce(cost_of(prompts, len(cut) if answers == "forced" else sum(passes)))
    found: dict[str, dict[int, Response]] = {test_set: {} for test_set in asked}
    for name, point in store.get_or_compute(points, by_prompt(progress, cuts)).items():
        test_set, numbers = cut[name]
        for number, predicted, known in zip(
            numbers, point["tokens"], point["log_probabilities"], strict=True
        ):
            found[test_set][number] = Response(tuple(predicted), tuple(known))
    return {
        test_set: [responses[number] for number in range(len(responses))]
        for test_set, responses in found.items()
    }


def _respond(
    decoder: Decoder,
    task: Task,
    test_set: str,
    numbers: Sequence[int],
    prompts: Sequence[Prompt],
    answers: str,
) -> dict[str, Any]:
    """Get responses to some of `prompts` in one pass, as values of a store."""
    make, some = (
        forced_responses if answers == "forced" else generated_responses,
        [prompts[number] for number in numbers],
    )
    try:
        with renumber_prompts(numbers, f"test set {test_set}"):
            responses = make(decoder.module, task, some, len(some))
    # InputError is a ValueError too, and its message is for the user already.
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"the model cannot take prompts of {_longest(some)} tokens of task {task.name}: {error}"
        ) from None
    return {
        "tokens": [response.tokens for response in responses],
        "log_probabilities": [response.log_probabilities for response in responses],
    }


def _label(axis: str, value: Any) -> Any:
    # Needles have many different depths; without rounding, few cells of the map would have two
    # prompts.
    return int(round(float(value), -1)) if axis == "depth" else value
