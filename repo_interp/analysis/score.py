"""Scores of a model as a run with one group, `scores`.

On a task (`score`), on needles in a haystack or few-shot prompts in its tokens (`score_needles`,
`score_few_shot`), or on a task of lm-evaluation-harness (`score_harness`).

    model, task -> prompts of every test set -> answers -> score [test_set, prompt] -> run ->
    figures, page, run.nc

A run of scores is written, read, drawn and shown like a run of `analyze`. This module combines
models, tasks and `experiments`; it knows nothing about how an answer is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr
from torch import nn

from repo_interp.analysis.computed import store_of
from repo_interp.analysis.memory_needed import require_memory_for_pass
from repo_interp.analysis.notes import run_notes
from repo_interp.analysis.trained_task import task_of
from repo_interp.analysis.training_record import puts_into_any_tokens
from repo_interp.errors import InputError
from repo_interp.experiments.generated_scores import answer_scores
from repo_interp.experiments.test_set_scores import Cost, sets_named, task_scores
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.provenance import identity
from repo_interp.models.side_by_side import BatchSize
from repo_interp.run import make_run, versions
from repo_interp.tasks import Prompt, Task
from repo_interp.tasks.few_shot_text import few_shot_prompts, few_shot_questions, following
from repo_interp.tasks.harness import harness_documents
from repo_interp.tasks.niah import niah, niah_scores
from repo_interp.tasks.prompt import digest as prompts_digest
from repo_interp.tasks.task import require_drawable, whole_number


class _Execution(NamedTuple):
    """Arguments of `score` about batches, progress and stored answers."""

    batch_size: BatchSize | Literal["auto"]
    progress: Callable[[int, int], None] | None
    store: str | Path | None
    store_every: float
    announce: Callable[[Cost], None] | None


def score(
    bridge: nn.Module,
    task: str | Task | None = None,
    test_sets: Sequence[str | int] | str | int | None = None,
    count: int = 200,
    seed: int = 0,
    answers: str = "forced",
    batch_size: BatchSize | Literal["auto"] = 32,
    progress: Callable[[int, int], None] | None = None,
    store: str | Path | None = None,
    store_every: float = 0.0,
    announce: Callable[[Cost], None] | None = None,
) -> xr.DataTree:
    """Score a model on a task, by test set and over the axes that the task names.

    Group `scores`: `score [test_set, prompt]`, `mean_score`, `standard_error`, `prompts_digest`,
    with `answers` "forced" `log_perplexity` [test_set]; `score_map` over the axes of the task, such
    as depth and length. Hooks on the bridge take part, so that the cost of an intervention can be
    scored.

    Args:
        bridge: Bridge or Hugging Face model.
        task: A task or its name: the task of the training with its options in training, or another
            task at its small size; None: the task of the training.
        test_sets: Names of test sets; None: all that fit the model.
        count: Prompts of every test set.
        seed: Seed of the prompts.
        answers: "forced": from one teacher-forced pass; "generated": token by token.
        batch_size: Prompts or tokens of a batch, or "auto".
        progress: Function of prompts done and in all.
        store: Directory that keeps the answers of finished batches, as that of `analyze`.
        store_every: Least number of seconds between two writes to `store`.
        announce: Function of the cost, called before the first forward pass.

    Returns:
        A run with the group `scores`.

    Raises:
        InputError: The task is unknown or has other tokens than the model, or `task_scores` refuses
            an argument.
    """
    if task == "ruler":
        raise InputError("ruler is scored by ri.score_needles(bridge), which takes lengths")
    decoder = as_decoder(bridge)
    present, origin = decoder.vocabulary_size, decoder.origin
    require_drawable(count, seed)
    chosen = (
        task
        if isinstance(task, Task)
        else task_of(None if origin is None else origin.directory, task)
    )
    wanted = chosen.vocabulary_size
    # embeddings are often padded
    if wanted != present and not (wanted < present and puts_into_any_tokens(chosen)):
        raise InputError(
            f"the task {chosen.name} has {wanted} tokens, the checkpoint {present}; wanted a "
            "checkpoint trained on it"
        )
    size = batch_limit(decoder, batch_size)
    test_sets = None if test_sets is None else sets_named(test_sets)
    for name in test_sets or ():
        longest = max(len(prompt.tokens) for prompt in chosen.prompts(1, seed, name))
        require_memory_for_pass(decoder, longest, min(count, size.of_length(longest)))
    asked = {
        "task": chosen.name,
        **chosen.options(),
        "test_sets": test_sets,
        "count": count,
        "seed": seed,
        "answers": answers,
    }
    first = chosen.prompts(1, seed, str((test_sets or chosen.test_sets)[0]))
    # The digest of the question needs a pass of the model over one prompt.
    kept = store_of(decoder, first[0], {**asked, "batch_size": size}, store, store_every)
    scores = task_scores(
        decoder, chosen, test_sets, count, seed, answers, size, progress, kept, announce
    )
    return _run(
        decoder,
        scores,
        [chosen.prompts(count, seed, str(name)) for name in scores["test_set"].values],
        chosen.origin,
    )


def score_needles(
    bridge: Any,
    lengths: Sequence[int] | int | None = None,
    variant: str = "multikey_1",
    count: int = 20,
    seed: int = 0,
    batch_size: BatchSize | Literal["auto"] = 8,
    progress: Callable[[int, int], None] | None = None,
    store: str | Path | None = None,
    store_every: float = 0.0,
    announce: Callable[[Cost], None] | None = None,
    **options: Any,
) -> xr.DataTree:
    """Score a model on needles in a haystack in its tokens, by length and depth.

    Group `scores` as by `score`; answers are generated (`tasks.niah`).

    Args:
        bridge: Bridge, or model with a tokenizer.
        lengths: Tokens of a prompt with its answer; None: the training length, twice and four times
            it.
        variant: Variant of the task.
        count: Prompts of every length.
        seed: Seed of the prompts.
        batch_size: Prompts or tokens of a batch, or "auto".
        progress: Function of prompts done and in all.
        store: Directory that keeps the answers of finished batches, as that of `analyze`.
        store_every: Least number of seconds between two writes to `store`.
        announce: Function of the cost, called before the first forward pass.
        **options: Further options of `tasks.niah` (dialect, essay, depth).

    Returns:
        A run with the group `scores`.

    Raises:
        InputError: The bridge has no tokenizer, a prompt is longer than the model takes, or
            `tasks.niah` refuses an argument.
    """
    decoder = as_decoder(bridge)
    tokenizer = _tokenizer(decoder)
    lengths = _lengths(decoder, lengths)
    # Before prompts are made: haystacks of millions of tokens take minutes.
    side_by_side = batch_limit(decoder, batch_size).of_length(max(lengths))
    require_memory_for_pass(decoder, max(lengths), min(count, side_by_side))
    asked = {
        str(length): niah(tokenizer, variant, length, count, seed, answer="none", **options)
        for length in lengths
    }
    one = all(
        prompt.attributes.get("depth") is not None
        for test_set in asked.values()
        for prompt in test_set
    )
    return _score_answers(
        decoder,
        asked,
        # RULER scores in percent
        lambda name, texts: niah_scores(texts, asked[name]) / 100,
        "share of the needles found",
        ("depth", "length") if one else (),
        "the task ruler",
        {"task": "ruler", "seed": seed, "variant": variant, **options},
        _Execution(batch_size, progress, store, store_every, announce),
    )


def score_harness(
    bridge: Any,
    task: str | Any,
    lengths: Sequence[int] | int | None = None,
    count: int = 20,
    seed: int = 0,
    batch_size: BatchSize | Literal["auto"] = 8,
    progress: Callable[[int, int], None] | None = None,
    store: str | Path | None = None,
    store_every: float = 0.0,
    announce: Callable[[Cost], None] | None = None,
) -> xr.DataTree:
    """Score a model on a task of lm-evaluation-harness that generates text.

    Group `scores` as by `score_needles`; the harness makes the documents and scores the answers
    (`tasks.harness`).

    Args:
        bridge: Bridge, or model with a tokenizer.
        task: Name of the task, such as "ruler_vt", or a `Task` of the harness.
        lengths: Tokens of RULER's documents, each a test set; None: the task's own documents.
        count: Documents of every test set.
        seed: Seed of tasks that draw documents.
        batch_size: Prompts or tokens of a batch, or "auto".
        progress: Function of prompts done and in all.
        store: Directory that keeps the answers of finished batches, as that of `analyze`.
        store_every: Least number of seconds between two writes to `store`.
        announce: Function of the cost, called before the first forward pass.

    Returns:
        A run with the group `scores`.

    Raises:
        InputError: The bridge has no tokenizer, a document is longer than the model takes, or
            `harness_documents` refuses an argument.
    """
    decoder = as_decoder(bridge)
    tokenizer = _tokenizer(decoder)
    called = task if isinstance(task, str) else str(task.config.task)
    documents = {
        str(length or called): harness_documents(tokenizer, task, length, count, seed)
        for length in ([None] if lengths is None else _lengths(decoder, lengths))
    }
    first = next(iter(documents.values()))
    better = first.task.higher_is_better().get(first.metric, True)
    return _score_answers(
        decoder,
        {name: of_set.prompts for name, of_set in documents.items()},
        lambda name, texts: documents[name].scores(texts),
        # RULER names its metric by the length in tokens, which is an axis here
        "score" if first.metric.isdecimal() else first.metric,
        (),
        f"the task {called} of lm-evaluation-harness",
        {"higher_is_better": str(bool(better)), "seed": seed},
        _Execution(batch_size, progress, store, store_every, announce),
    )


def score_few_shot(
    bridge: Any,
    lengths: Sequence[int] | int | None = None,
    shots: Sequence[int] = (5,),
    rows: str | Path | None = None,
    count: int = 20,
    seed: int = 0,
    batch_size: BatchSize | Literal["auto"] = 8,
    progress: Callable[[int, int], None] | None = None,
    store: str | Path | None = None,
    store_every: float = 0.0,
    announce: Callable[[Cost], None] | None = None,
) -> xr.DataTree:
    """Score how well a model follows the labels of examples, by length and number of examples.

    Group `scores` as from `score_needles`. The score of a prompt is 1 if the answer begins with one
    of the labels of its examples (`tasks.few_shot_text`, HoPE, table 2).

    Args:
        bridge: Bridge, or model with a tokenizer.
        lengths: Tokens of a prompt with its answer, each a test set; None: the training length,
            twice and four times it.
        shots: Numbers of examples, each with as many prompts.
        rows: Table of labeled rows, such as GLUE's; None: built-in sentences.
        count: Prompts of every length and number of examples.
        seed: Seed of the prompts.
        batch_size: Prompts or tokens of a batch, or "auto".
        progress: Function of prompts done and in all.
        store: Directory that keeps the answers of finished batches, as that of `analyze`.
        store_every: Least number of seconds between two writes to `store`.
        announce: Function of the cost, called before the first forward pass.

    Returns:
        A run with the group `scores`.

    Raises:
        InputError: The bridge has no tokenizer, a prompt is longer than the model takes, or
            `few_shot_prompts` refuses an argument.
    """
    decoder = as_decoder(bridge)
    tokenizer = _tokenizer(decoder)
    require_drawable(count, seed)
    if not shots:
        raise InputError("wanted at least one number of shots, got none; give some, such as 1,5")
    asked = {
        str(length): few_shot_questions(
            [
                prompt
                for number in shots
                for prompt in few_shot_prompts(tokenizer, rows, length, count, number, seed)
            ],
            tokenizer,
        )
        for length in _lengths(decoder, lengths)
    }
    return _score_answers(
        decoder,
        asked,
        lambda name, texts: following(texts, asked[name]),
        "follow ability",
        ("shots", "length"),
        "the task few_shot",
        {"seed": seed, "rows": "" if rows is None else Path(rows).name},
        _Execution(batch_size, progress, store, store_every, announce),
    )


def _score_answers(
    decoder: Decoder,
    asked: Mapping[str, Sequence[Prompt]],
    judge: Callable[[str, list[str]], np.ndarray],
    metric: str,
    axes: Sequence[str],
    origin: str,
    attributes: Mapping[str, Any],
    execution: _Execution,
) -> xr.DataTree:
    """Score generated answers to prompts that fit the model and its memory."""
    flat = [prompt for prompts in asked.values() for prompt in prompts]
    # The last generated token needs a position too
    longest = max(len(prompt.tokens) + int(prompt.attributes["new_tokens"]) for prompt in flat)
    most, task = decoder.longest_prompt, flat[0].attributes["task"]
    if most is not None and longest > most:
        raise InputError(
            f"a prompt of {task} with its answer has {longest} tokens, the model's learned "
            f"table {most}; give shorter lengths"
        )
    size = batch_limit(decoder, execution.batch_size)
    count = max(map(len, asked.values()))
    require_memory_for_pass(decoder, longest, min(count, size.of_length(longest)))
    question = {"task": task, "prompts": prompts_digest(flat), "batch_size": size}
    kept = store_of(decoder, flat[0], question, execution.store, execution.store_every)
    scores = answer_scores(
        decoder,
        _tokenizer(decoder),
        asked,
        judge,
        metric,
        axes,
        size,
        kept,
        execution.progress,
        execution.announce,
    )
    return _run(decoder, scores.assign_attrs(attributes), list(asked.values()), origin)


def _lengths(decoder: Decoder, given: Sequence[int] | int | None) -> list[int]:
    """The lengths that were given; None: the training length, twice and four times it."""
    if given is None:
        given = [multiple * decoder.training_length for multiple in (1, 2, 4)]
    return [whole_number(name, "the number of tokens", 1 << 22) for name in sets_named(given)]


def _tokenizer(decoder: Decoder) -> Any:
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise InputError(
            "this checkpoint has no tokenizer to make prompts with; put its tokenizer there"
        )
    return tokenizer


def _run(
    decoder: Decoder, scores: xr.Dataset, prompts: Sequence[Sequence[Prompt]], origin: str
) -> xr.DataTree:
    """Return the run of `scores`, with a digest of the prompts per test set.

    A comparison pairs runs by these digests. Of files only the names are kept.
    """
    digests = np.array([prompts_digest(of_set) for of_set in prompts])
    described = {"long_name": "SHA-256 over the prompts", "units": "1"}
    # A run may be passed on, and paths of this machine would tell others nothing or too much
    options = {
        name: Path(value).name if _is_path(value) else value for name, value in scores.attrs.items()
    }
    scores = scores.assign(prompts_digest=("test_set", digests, described)).assign_attrs(options)
    of_model = identity(decoder)
    lines = run_notes(decoder, (), (), str(of_model.get("changed", "")))
    notes = {"notes": "\n".join(lines)} if lines else {}
    known = {
        "prompts_from": origin,
        **{f"version_{name}": number for name, number in versions().items()},
    }
    return make_run({"scores": scores}, {**of_model, **known, **notes})


def _is_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute())
