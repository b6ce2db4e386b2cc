"""Needles in a haystack as RULER asks for them (Hsieh et al. 2024; RePo fig. 1): generated greedily, scored by length and depth.

    score    share of the reference values that the output holds, of a prompt; its mean over prompts is the test set's

A test set is a length in tokens, the answer's among them. Knows nothing about checkpoints and training lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.errors import InputError
from repo_interp.experiments.data_set_scores import generated_texts
from repo_interp.experiments.task_scores import score_map
from repo_interp.measures.labels import described
from repo_interp.models.reposition import longest_prompt
from repo_interp.tasks import Prompt, niah, niah_scores


def needle_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    variant: str = "multikey_1",
    count: int = 20,
    seed: int = 0,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> xr.Dataset:
    """Score `count` prompts of every length. Variables as `task_scores` names them, with answers "generated":

    `score [test_set, prompt]`, `mean_score`, `standard_error`, `tokens` [test_set]; `score_map [depth, length]` for variants that ask for
    one needle. `options`: those of `tasks.niah` (dialect, essay, depth). `progress` is called with lengths done and in all. Raises
    InputError for what `tasks.niah` refuses, and for lengths beyond a learned table.
    """
    longest = longest_prompt(model)
    if longest is not None and max(lengths) > longest:
        raise InputError(f"{max(lengths)} tokens were asked for, the model's learned table has {longest}; give shorter lengths")
    asked: list[list[Prompt]] = [niah(tokenizer, variant, length, count, seed, answer="none", **options) for length in lengths]
    scores = np.empty((len(lengths), count))
    for row, prompts in enumerate(asked):
        scores[row] = found_needles(model, tokenizer, prompts, batch_size)
        if progress is not None:
            progress(row + 1, len(lengths))
    deviation = scores.std(axis=1, ddof=1) if count > 1 else np.full(len(lengths), np.nan)
    axes, label = {"test_set": [str(length) for length in lengths]}, "share of the needles found"
    result = xr.Dataset(
        {
            "score": described(
                xr.DataArray(scores, axes | {"prompt": np.arange(count)}, ("test_set", "prompt")),
                f"{label}, of every prompt",
                "1",
            ),
            "mean_score": described(xr.DataArray(scores.mean(axis=1), axes, ("test_set",)), f"{label}, mean over prompts", "1"),
            "standard_error": described(
                xr.DataArray(deviation / np.sqrt(count), axes, ("test_set",)), "standard error of the mean score", "1"
            ),
            "tokens": described(
                xr.DataArray([max(len(one.tokens) for one in prompts) for prompts in asked], axes, ("test_set",)),
                "tokens of the longest prompt",
                "tokens",
            ),
        }
    )
    flat = [prompt for prompts in asked for prompt in prompts]
    if all(prompt.attributes.get("depth") is not None for prompt in flat):
        mapped = score_map(flat, scores.ravel(), ("depth", "length"))
        assert mapped is not None  # every prompt has both
        result["score_map"] = described(mapped, f"{label}, by depth and length", "1")
    stated = {"task": "ruler", "metric": label, "test_sets_count": "tokens", "count": count, "seed": seed, "variant": variant}
    return result.assign_attrs(stated | options, answers="generated", left_out=[], higher_is_better="True")


def found_needles(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], batch_size: int = 8
) -> np.ndarray:
    """Share of the needles that the model's greedy answer to each of `prompts` (`tasks.niah`, without answers) holds."""
    return niah_scores(generated_texts(model, tokenizer, prompts, batch_size), prompts) / 100
