"""How well a model answers the questions of a data set: greedily generated, scored by the data set's own metrics, part by part.

    score       mean over questions of a metric from 0 to 1; error = standard deviation over questions / sqrt(questions)
    output      tokens up to the model's end of text, without special tokens; what of it counts is the data set's to say

Questions whose middle was cut out for want of room are counted (`cut`). Knows nothing about files and how prompts are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import xarray as xr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.errors import InputError
from repo_interp.models.generation import continue_greedily
from repo_interp.models.reposition import longest_prompt
from repo_interp.tasks import Prompt
from repo_interp.tasks.data_sets import data_set_scores


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    batch_size: int = 8,
    context: AbstractContextManager[None] | None = None,
) -> xr.Dataset:
    """Scores of `prompts` (`tasks.data_sets.data_set_prompts`, without answers), a row a part and metric.

    `score [test_set, prompt]` (NaN beyond the questions of a part), `mean_score`, `standard_error`, `questions`, `cut` (share of them that
    lost their middle) [test_set]; coordinates `subset` and `metric` along test_set. `context`: what the model runs in, such as
    `extrapolation.extended`. Raises InputError where the model cannot take prompts as long as these.
    """
    longest, needed = longest_prompt(model), max(len(prompt.tokens) + prompt.attributes["new_tokens"] for prompt in prompts)
    if longest is not None and needed > longest:
        raise InputError(
            f"the longest prompt and its answer have {needed} tokens, the model's learned table {longest}; give a smaller length"
        )
    with context or nullcontext():
        outputs = generated_texts(model, tokenizer, prompts, batch_size)
    by_metric = data_set_scores(prompts, outputs)
    subsets = np.array([prompt.attributes["subset"] for prompt in prompts])
    cut = np.array([prompt.attributes["dropped_tokens"] > 0 for prompt in prompts])
    parts = [
        (subset, metric, (subsets == subset) & np.isfinite(values))
        for subset in dict.fromkeys(subsets.tolist())
        for metric, values in by_metric.items()
    ]
    parts = [part for part in parts if part[2].any()]
    scores = np.full((len(parts), max(int(here.sum()) for _, _, here in parts)), np.nan)
    for row, (_, metric, here) in enumerate(parts):
        scores[row, : here.sum()] = by_metric[metric][here]
    counts = np.isfinite(scores).sum(axis=1)
    deviation = [row[:n].std(ddof=1) if n > 1 else np.nan for row, n in zip(scores, counts, strict=True)]
    return xr.Dataset(
        {
            "score": _described(("test_set", "prompt"), scores, "score of every question"),
            "mean_score": _described(("test_set",), np.nanmean(scores, axis=1), "score, mean over questions"),
            "standard_error": _described(("test_set",), deviation / np.sqrt(counts), "standard error of the mean score"),
            "questions": _described(("test_set",), counts, "questions asked"),
            "cut": _described(
                ("test_set",), [cut[here].mean() for _, _, here in parts], "share of questions that lost their middle"
            ),
        },
        {
            "test_set": [f"{subset}: {metric}" for subset, metric, _ in parts],
            "subset": ("test_set", [subset for subset, _, _ in parts]),
            "metric": ("test_set", [metric for _, metric, _ in parts]),
            "prompt": np.arange(scores.shape[1]),
        },
    )


def generated_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], batch_size: int = 8
) -> list[str]:
    """What the model says after each prompt, greedily, in as many tokens as the prompt's attribute `new_tokens` allows."""
    counts = [int(prompt.attributes["new_tokens"]) for prompt in prompts]
    made = continue_greedily(model, [prompt.tokens for prompt in prompts], counts, batch_size)
    ends = _ends(model, tokenizer)
    return [str(tokenizer.decode(_until(tokens, ends), skip_special_tokens=True)) for tokens in made]


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a text."""
    known = [getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id]
    return {token for one in known for token in (one if isinstance(one, list) else [one]) if token is not None}


def _until(tokens: Sequence[int], ends: set[int]) -> list[int]:
    return list(tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))])


def _described(axes: tuple[str, ...], values: object, long_name: str) -> tuple:
    return axes, np.asarray(values), {"long_name": long_name, "units": "1"}
