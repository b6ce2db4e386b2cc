"""Batches of prompts, padded on the right, with masks of their spans.

Also the group of a run that describes its prompts.

Prompts of similar length share a batch, the longest come first.

Brings together prompts and the needs of measures; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from repo_interp.inputs import Spans
from repo_interp.measures.kernels.seen_pairs import known_on_host
from repo_interp.measures.labels import described_group, with_attrs
from repo_interp.measures.statistics import Measure
from repo_interp.models import side_by_side
from repo_interp.models.side_by_side import BatchSize
from repo_interp.tasks.prompt import Prompt, copies_next
from repo_interp.tasks.prompt.structure import prompt_structure

_TEXTS = {
    "token_id": ("token, -1 for padding", "1"),
    "token_count": ("tokens of each prompt", "tokens"),
    "span_mask": ("1 where a token belongs to a span, -1 for padding", "1"),
    "token_text": ("text of each token", "1"),
    "position_id": ("position that the model was given, -1 for padding", "positions"),
}


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts side by side, padded on the right."""

    numbers: tuple[int, ...]
    tokens: Tensor
    valid: Bool[Tensor, "prompt token"]
    spans: Spans
    structure: Spans = field(default_factory=dict)
    """Separators and segments, for the measures that need segments."""
    sources: Mapping[str, Int[Tensor, "prompt token"]] = field(default_factory=dict)
    """`source`: the token that every generated token copies, -1 elsewhere, if every token of an
    answer has a separate needle (`copies_next`). For measures that need sources.
    """
    position_ids: Int[Tensor, "*axis prompt token"] | None = None
    """Positions that the model is given, by axis where a prompt has several; None: the token index."""
    attention_mask: Int[Tensor, "prompt token"] | None = None
    """Mask for the model if positions jump within a text, since transformers without a mask reads
    jumps as documents; else None.
    """

    def marks(self, measure: Measure) -> Spans:
        """Collect the spans of the prompts, and other marks that the measure `needs`.

        Args:
            measure: Measure.

        Returns:
            Masks by name, and `source` where the measure needs sources and the batch has them.
        """
        needs = measure.needs
        return {
            **self.spans,
            **(self.structure if needs.segments else {}),
            **(self.sources if needs.sources else {}),
        }


def make_batches(
    prompts: Sequence[Prompt],
    batch_size: BatchSize,
    device: torch.device | str = "cpu",
    structure: Sequence[Mapping[str, Sequence[int]]] | None = None,
) -> list[PaddedBatch]:
    """Group prompts of similar length into batches, padded on the right.

    The longest prompts come first, so that a batch that does not fit fails at once.

    Args:
        prompts: Prompts.
        batch_size: Prompts, or tokens, per batch.
        device: Device of the tensors.
        structure: For every prompt, named token indices that are no spans of it; None: none.

    Returns:
        Batches.
    """
    lengths = [len(prompt.tokens) for prompt in prompts]
    # A pass has one mask for all its prompts, or no mask
    masked = [number for number, prompt in enumerate(prompts) if jumps_within(prompt)]
    others = sorted({*range(len(prompts))} - {*masked})
    batches = [
        numbers
        for some in (masked, others)
        for numbers in side_by_side.batches(
            sorted(some, key=lambda number: (-lengths[number], number)), lengths, batch_size
        )
    ]
    batches.sort(key=lambda numbers: (-lengths[numbers[0]], numbers[0]))
    shared = _names_of_spans(prompts), copies_next(prompts)
    return [
        _make_batch(prompts, numbers, lengths[numbers[0]], device, structure, *shared)
        for numbers in batches
    ]


def jumps_within(prompt: Prompt) -> bool:
    """Return whether position ids of a prompt jump within a text.

    Args:
        prompt: Prompt.

    Returns:
        True where they jump, and the jumps begin no documents.
    """
    return prompt.document_count == 1 and prompt.jumps != ()


def make_batch(
    prompts: Sequence[Prompt],
    numbers: Sequence[int],
    longest: int,
    device: torch.device | str = "cpu",
    structure: Sequence[Mapping[str, Sequence[int]]] | None = None,
) -> PaddedBatch:
    """Make a batch of prompts in the order of their numbers, padded on the right.

    Args:
        prompts: Prompts, whose spans the batch has.
        numbers: Numbers of the prompts of the batch.
        longest: Tokens of a row.
        device: Device of the tensors.
        structure: For every prompt, named token indices that are no spans of it; None: none.

    Returns:
        The batch.
    """
    shared = _names_of_spans(prompts), copies_next(prompts)
    return _make_batch(prompts, numbers, longest, device, structure, *shared)


def _names_of_spans(prompts: Sequence[Prompt]) -> list[str]:
    # Of all prompts, not of a batch: statistics of all batches must have the same spans
    return sorted({name for prompt in prompts for name in prompt.spans} | {"generated", "rest"})


def _make_batch(
    prompts: Sequence[Prompt],
    numbers: Sequence[int],
    longest: int,
    device: torch.device | str,
    structure: Sequence[Mapping[str, Sequence[int]]] | None,
    names: Sequence[str],
    copying: bool,
) -> PaddedBatch:
    """A batch with the spans `names`, and with sources if answers of the prompts are `copying`."""
    some = [prompts[number] for number in numbers]
    # 0 is a token of every vocabulary, and `valid` tells it from padding
    tokens = np.zeros((len(numbers), longest), dtype=np.int64)
    for row, prompt in enumerate(some):
        tokens[row, : len(prompt.tokens)] = prompt.tokens
    parts = [] if structure is None else [structure[number] for number in numbers]
    further = sorted({name for part in parts for name in part})
    valid = np.arange(longest) < np.array([[len(prompt.tokens)] for prompt in some])
    return PaddedBatch(
        tuple(numbers),
        known_on_host(torch.from_numpy(tokens).to(device), tokens),
        known_on_host(torch.from_numpy(valid).to(device), valid),
        _masks(names, [prompt.all_spans() for prompt in some], longest, device),
        _masks(further, parts, longest, device),
        {"source": _sources(some, longest).to(device)} if copying else {},
        _position_ids(some, longest, device),
        torch.from_numpy(valid).long().to(device) if any(map(jumps_within, some)) else None,
    )


def _position_ids(
    prompts: Sequence[Prompt], tokens: int, device: torch.device | str
) -> Int[Tensor, "*axis prompt token"] | None:
    """Positions of a batch; padding repeats the last one, which is in every table of vectors."""
    if all(prompt.position_ids is None for prompt in prompts):
        return None
    # A prompt without position ids may share a batch with one that has some: it gets its index
    given = [list(prompt.position_ids or range(len(prompt.tokens))) for prompt in prompts]
    rows = [torch.tensor(ids + ids[-1:] * (tokens - len(ids)), device=device) for ids in given]
    # Text in prompts with images has the same position on every axis.
    by_axis = torch.broadcast_tensors(*(row.reshape(tokens, -1) for row in rows))
    # [axis, prompt, token], or [prompt, token] where there is one axis
    return torch.stack(by_axis).permute(2, 0, 1).squeeze(0)


def _masks(
    names: Sequence[str],
    places: Sequence[Mapping[str, Sequence[int]]],
    tokens: int,
    device: torch.device | str,
) -> Spans:
    # In numpy, which writes a few entries in a fraction of torch's time; one copy to a device
    masks = np.zeros((len(names), len(places), tokens), dtype=np.bool_)
    for mask, name in zip(masks, names, strict=True):
        of_rows = [named.get(name, ()) for named in places]
        rows = np.repeat(np.arange(len(places)), [*map(len, of_rows)])
        mask[rows, [*chain.from_iterable(of_rows)]] = True
    sent = torch.from_numpy(masks).to(device)
    return {
        name: known_on_host(mask, array)
        for name, mask, array in zip(names, sent, masks, strict=True)
    }


def _sources(prompts: Sequence[Prompt], tokens: int) -> Int[Tensor, "prompt token"]:
    copied = np.full((len(prompts), tokens), -1)
    for row, prompt in enumerate(prompts):
        if prompt.sources is not None:
            copied[row, list(prompt.generated)] = prompt.sources
    return torch.from_numpy(copied)


def structure_for(
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[dict[str, tuple[int, ...]]] | None:
    """Return separators and segments of every prompt, of the kinds that measures declare.

    Args:
        prompts: Prompts.
        measures: Measures.
        tokenizer: Source of texts for prompts that hold none; None: none.

    Returns:
        For every prompt, token indices by name; None where no measure declares a kind.
    """
    kinds = sorted({kind for measure in measures for kind in measure.needs.segments})
    if not kinds:
        return None
    return [
        prompt_structure(kinds, len(prompt.tokens), prompt.spans, texts)
        for prompt, texts in zip(prompts, texts_of(prompts, tokenizer), strict=True)
    ]


def describe_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None = None
) -> xr.Dataset:
    """Make the group of a run that describes its prompts.

    Args:
        prompts: Prompts.
        tokenizer: Source of token texts for prompts that hold none; None: none.

    Returns:
        Token ids and counts, masks of spans, and the texts of tokens where they are known.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    batch = make_batch(prompts, range(len(prompts)), longest)
    spans = {name: mask for name, mask in batch.spans.items() if mask.any()}
    # int8 with -1 for padding: a boolean would not tell padding from a token outside the span
    masks = torch.stack([*spans.values()]).to(torch.int8)
    texts = np.full(batch.tokens.shape, "", dtype=object)
    for row, of_tokens in enumerate(texts_of(prompts, tokenizer)):
        texts[row, : len(of_tokens)] = of_tokens
    axes, padding = ("prompt", "token"), ~batch.valid
    values: dict[str, Any] = {
        "token_id": (axes, batch.tokens.masked_fill(padding, -1).numpy()),
        "token_count": ("prompt", batch.valid.sum(1).numpy()),
        "span_mask": (("span", *axes), masks.masked_fill(padding, -1).numpy()),
    }
    values |= {"token_text": (axes, texts)} if texts.any() else {}
    if batch.position_ids is not None:
        places = batch.position_ids.masked_fill(padding, -1).numpy()
        values["position_id"] = (("axis", *axes)[-places.ndim :], places)
    return described_group(
        values,
        _TEXTS,
        {"prompt": np.arange(len(prompts)), "token": np.arange(longest), "span": [*spans]},
    )


@dataclass(frozen=True)
class LabelledPrompts:
    """Tokens of the prompts of an analysis, as groups of a run show them."""

    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase | None = None
    """Source of token texts for prompts that hold none."""

    def of_prompts(self, count: int | None = None) -> xr.Dataset:
        """Return `describe_prompts` of the first `count` prompts; None: of all."""
        return describe_prompts(self.prompts[:count], self.tokenizer)

    def of_next(self, group: xr.Dataset) -> xr.Dataset:
        """Return a group with the texts of its variable `next_token`, of the first prompt."""
        return describe_predictions(group, self.prompts[0], self.tokenizer)


def describe_predictions(
    group: xr.Dataset, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None = None
) -> xr.Dataset:
    """Add texts of next tokens to a group.

    Args:
        group: Group with the variable `next_token`.
        prompt: Prompt whose token texts come first.
        tokenizer: Source of other token texts; None: none.

    Returns:
        The group with `next_text`, or as it is where no text is known.
    """
    known = (
        dict(zip(prompt.tokens, prompt.token_text, strict=True))
        if prompt.token_text is not None
        else {}
    )
    if tokenizer is None and not known:
        return group
    ids = group["next_token"]
    named = {
        # The prompt's texts first, so that a token has one text in all figures
        token: known.get(token) or ("" if tokenizer is None else str(tokenizer.decode([token])))
        # Likeliest tokens repeat all the time: every id is decoded once
        for token in np.unique(ids)
    }
    texts = np.array([named[token] for token in ids.values.flat], dtype=object).reshape(ids.shape)
    return group.assign(next_text=with_attrs(ids.copy(data=texts), "text of the next token", "1"))


def texts_of(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None
) -> list[Sequence[str]]:
    """Return the texts of the tokens of prompts.

    Args:
        prompts: Prompts.
        tokenizer: Source of texts for prompts that hold none; None: none.

    Returns:
        One text per token, by prompt; empty texts where none is known.
    """
    wanted = {token for one in prompts if one.token_text is None for token in one.tokens}
    # A tokenizer takes some 20 microseconds for a token, and a text repeats most of them
    known = {token: "" if tokenizer is None else str(tokenizer.decode([token])) for token in wanted}
    return [
        [known[token] for token in one.tokens] if one.token_text is None else one.token_text
        for one in prompts
    ]
