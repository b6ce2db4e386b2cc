"""Answers that are generated as text and scored: needles, few-shot prompts, lm-eval's documents.

    output      greedy tokens up to the model's end of text, without special tokens
    score       share of the reference values that the output contains (RULER, Hsieh et al. 2024;
                RePo fig. 1)

A test set is a length in tokens, including the answer. This module knows nothing about files,
checkpoints and the generation of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from transformers import PreTrainedTokenizerBase

from repo_interp.experiments.test_set_scores import Cost, cost_of, labelled_scores, score_map
from repo_interp.interventions.replacing import require_named_tokens
from repo_interp.measures.labels import with_attrs
from repo_interp.models.decoder import Decoder
from repo_interp.models.generation import continue_greedily, end_tokens
from repo_interp.models.side_by_side import BatchSize, batches, by_prompt, restore_order
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt, niah_scores


def answer_scores(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    asked: Mapping[str, Sequence[Prompt]],
    judge: Callable[[str, list[str]], Float[np.ndarray, " prompt"]],
    metric: str,
    axes: Sequence[str] = (),
    batch_size: BatchSize = 8,
    store: Store = NOT_KEPT,
    progress: Callable[[int, int], None] | None = None,
    announce: Callable[[Cost], None] | None = None,
) -> xr.Dataset:
    """Score greedy answers by test set.

    Args:
        decoder: Decoder of the model.
        tokenizer: Tokenizer of the prompts and the answers.
        asked: Prompts without answers, equally many for every test set.
        judge: Function of the name of a test set and its answers that returns scores.
        metric: Name of the score.
        axes: Attributes of prompts to tabulate scores by; (): no map.
        batch_size: Prompts side by side.
        store: Keeps the answers of finished batches.
        progress: Called with prompts done and in all.
        announce: Called with the cost before the first forward pass.

    Returns:
        `score [test_set, prompt]`, `mean_score`, `standard_error`, `tokens` [test_set], and
        `score_map` over the axes.

    Raises:
        InputError: The model cannot take a prompt, or `judge` refuses an answer.
    """
    flat = [prompt for prompts in asked.values() for prompt in prompts]
    # Consumed set by set below, in the order in which `flat` was made
    texts = iter(generated_texts(decoder, tokenizer, flat, batch_size, store, progress, announce))
    scores = np.stack(
        [judge(name, [next(texts) for _ in prompts]) for name, prompts in asked.items()]
    )
    result = labelled_scores(asked, scores, metric, "1")
    mapped = score_map(flat, scores.ravel(), axes)
    if mapped is not None:
        result["score_map"] = with_attrs(mapped, f"{metric}, by {' and '.join(axes)}", "1")
    return result.assign_attrs(
        task=flat[0].attributes["task"],
        metric=metric,
        test_sets_count="tokens",
        count=scores.shape[1],
        answers="generated",
        left_out=[],
        higher_is_better="True",
    )


def found_needles(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    batch_size: BatchSize = 8,
) -> np.ndarray:
    """Score greedy answers to prompts of `tasks.niah`.

    Args:
        decoder: Decoder of the model.
        tokenizer: Tokenizer of the prompts and the answers.
        prompts: Prompts without answers.
        batch_size: Prompts side by side.

    Returns:
        Share of the needles in every answer [prompt].
    """
    return niah_scores(generated_texts(decoder, tokenizer, prompts, batch_size), prompts) / 100


def generated_texts(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    batch_size: BatchSize = 8,
    store: Store = NOT_KEPT,
    progress: Callable[[int, int], None] | None = None,
    announce: Callable[[Cost], None] | None = None,
) -> list[str]:
    """Generate the greedy answer to every prompt as text.

    Args:
        decoder: Decoder of the model.
        tokenizer: Decodes the answers.
        prompts: Prompts; their attribute `new_tokens` limits the tokens of an answer.
        batch_size: Prompts side by side.
        store: Keeps the answers of finished batches.
        progress: Called with prompts done and in all.
        announce: Called with the cost before the first forward pass.

    Returns:
        One text per prompt, without special tokens.
    """
    counts = [int(prompt.attributes["new_tokens"]) for prompt in prompts]
    lengths = [len(prompt.tokens) + count for prompt, count in zip(prompts, counts, strict=True)]
    # Checked before minutes of generation: interventions may name tokens that no prompt has.
    require_named_tokens(decoder, len(prompts), lengths, counts)
    # Similar lengths waste no padding, and similar answers end at about the same step.
    order = sorted(
        range(len(prompts)), key=lambda number: (len(prompts[number].tokens), counts[number])
    )
    # Chat models may end with another token than their tokenizer names; both end a text.
    last: Any = tokenizer.eos_token_id
    ends = {*end_tokens(decoder), last} - {None}

    def answers(numbers: Sequence[int]) -> dict[str, Any]:
        asked = [prompts[number].tokens for number in numbers]
        made = continue_greedily(
            decoder, asked, [counts[number] for number in numbers], len(numbers)
        )
        said = [[*takewhile(lambda token: token not in ends, tokens)] for tokens in made]
        return {"texts": [str(tokenizer.decode(some, skip_special_tokens=True)) for some in said]}

    # The longest batch first: one that does not fit into memory fails at once, not at the end.
    cut = [*enumerate(batches(order, lengths, batch_size))][::-1]
    cut = {f"batch-{place}": some for place, some in cut}
    # Every generated token is a pass, and a batch runs until its longest answer ends.
    if announce is not None:
        passes = sum(max(counts[number] for number in some) for some in cut.values())
        announce(cost_of(prompts, passes))
    # the longest first
    found = store.get_or_compute(
        {name: partial(answers, some) for name, some in cut.items()},
        by_prompt(progress, list(cut.values())),
    )
    return restore_order(cut.values(), (point["texts"] for point in found.values()))
