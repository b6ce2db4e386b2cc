"""Prompts side by side: batches padded on the right with the masks of their spans, and what a run says about its prompts.

Prompts of similar length share a batch, the longest come first. Brings together prompts and what measures ask of them; knows nothing
about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from repo_interp.errors import InputError
from repo_interp.inputs import Spans
from repo_interp.measures.labels import described
from repo_interp.measures.statistics import Measure
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.structure import prompt_structure


@dataclass(frozen=True)
class Batch:
    """Prompts side by side, padded on the right."""

    numbers: tuple[int, ...]
    tokens: Tensor
    valid: Bool[Tensor, "prompt token"]
    spans: Spans
    structure: Spans = field(default_factory=dict)
    """Separators and segments, for the measures that name `segment_kinds`."""


def make_batches(
    prompts: Sequence[Prompt],
    batch_size: int,
    device: torch.device | str = "cpu",
    structure: Sequence[Mapping[str, Sequence[int]]] | None = None,
) -> list[Batch]:
    """Batches of at most `batch_size` prompts, longest first - so that what does not fit fails at once - padded on the right.

    `structure`: for every prompt, named token indices that are no spans of it.
    """
    if batch_size < 1:
        raise InputError(f"a batch has at least one prompt, not {batch_size}")
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].tokens), number))
    names = sorted({name for prompt in prompts for name in prompt.spans} | {"generated", "rest"})
    batches = []
    for start in range(0, len(order), batch_size):
        numbers = tuple(order[start : start + batch_size])
        longest = len(prompts[numbers[0]].tokens)
        tokens = torch.zeros(len(numbers), longest, dtype=torch.long)
        for row, number in enumerate(numbers):
            tokens[row, : len(prompts[number].tokens)] = torch.tensor(prompts[number].tokens)
        parts = [] if structure is None else [structure[number] for number in numbers]
        further = sorted({name for part in parts for name in part})
        lengths = torch.tensor([len(prompts[number].tokens) for number in numbers])
        valid = torch.arange(longest) < lengths[:, None]
        batches.append(
            Batch(
                numbers,
                tokens.to(device),
                valid.to(device),
                _masks(names, [prompts[number].all_spans() for number in numbers], longest, device),
                _masks(further, parts, longest, device),
            )
        )
    return batches


def _masks(names: Sequence[str], places: Sequence[Mapping[str, Sequence[int]]], tokens: int, device: torch.device | str) -> Spans:
    masks = {name: torch.zeros(len(places), tokens, dtype=torch.bool) for name in names}
    for row, found in enumerate(places):
        for name, where in found.items():
            masks[name][row, list(where)] = True
    return {name: mask.to(device) for name, mask in masks.items()}


def structure_for(
    prompts: Sequence[Prompt], measures: Sequence[Measure], tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[str, tuple[int, ...]]] | None:
    """Separators and segments of every prompt, where one of `measures` asks for them (`segment_kinds`); None where none does."""
    asking = [measure for measure in measures if hasattr(measure, "segment_kinds")]
    if not asking:
        return None
    kinds = sorted({kind for measure in asking for kind in getattr(measure, "segment_kinds")})  # noqa: B009
    return [prompt_structure(kinds, len(one.tokens), one.spans, _texts(one, tokenizer)) for one in prompts]


def describe_prompts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None = None) -> xr.Dataset:
    """What the prompts are, beside the positions: tokens, which span they belong to, and their texts - their own, or the tokenizer's."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    names = sorted({name for prompt in prompts for name in prompt.all_spans()})
    ids = np.full((len(prompts), longest), -1, dtype=np.int64)
    texts = np.full((len(prompts), longest), "", dtype=object)
    masks = np.zeros((len(names), len(prompts), longest), dtype=np.int8)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.tokens)] = prompt.tokens
        texts[row, : len(prompt.tokens)] = _texts(prompt, tokenizer)
        masks[:, row, len(prompt.tokens) :] = -1
        for name, where in prompt.all_spans().items():
            masks[names.index(name), row, list(where)] = 1
    coords = {"prompt": np.arange(len(prompts)), "token": np.arange(longest)}
    described_arrays = {
        "token_id": described(xr.DataArray(ids, coords, ("prompt", "token")), "token, -1 for padding", "1"),
        "token_count": described(
            xr.DataArray([len(prompt.tokens) for prompt in prompts], {"prompt": coords["prompt"]}, ("prompt",)),
            "tokens of each prompt",
            "tokens",
        ),
        "span_mask": described(
            xr.DataArray(masks, {"span": names, **coords}, ("span", "prompt", "token")),
            "1 where a token belongs to a span, -1 for padding",
            "1",
        ),
    }
    if texts.any():
        described_arrays["token_text"] = described(xr.DataArray(texts, coords, ("prompt", "token")), "text of each token", "1")
    return xr.Dataset(described_arrays)


def _texts(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[str]:
    if prompt.token_text is not None:
        return prompt.token_text
    if tokenizer is None:
        return [""] * len(prompt.tokens)
    return [str(tokenizer.decode([token])) for token in prompt.tokens]
