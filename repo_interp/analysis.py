"""The main job: prompts through a model, every attention layer observed once, each measure's results in a run.

    prompts -> batches -> capture -> observe -> merge -> conclude -> run

A batch holds prompts of similar length, padded on the right. Statistics of a finished batch may be kept on disk, so that an
interrupted analysis goes on where it stopped and ends with the same run.

Brings together models, tasks and measures; knows nothing about how any of them works.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from repo_interp.batch_store import BatchStore
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans, select_heads
from repo_interp.measures.catalogue import for_training_length, measure_named
from repo_interp.measures.labels import described
from repo_interp.measures.statistics import Measure, Statistics, merge
from repo_interp.models.capture import capture
from repo_interp.models.provenance import length_trained, loaded_from, weights_digest
from repo_interp.models.reposition import attentions, layout
from repo_interp.run import make_run, versions, with_schemes
from repo_interp.tasks.prompts import Prompt
from repo_interp.tasks.prompts import digest as prompts_digest

Progress = Callable[[int, int], None]
"""Called with layers observed so far and in all."""


@dataclass(frozen=True)
class Batch:
    """Prompts side by side, padded on the right."""

    numbers: tuple[int, ...]
    tokens: Tensor
    valid: Bool[Tensor, "prompt token"]
    spans: Spans


def analyze(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    measures: Sequence[str | Measure] = ("positions", "patterns", "attention_mass"),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: int = 1,
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> xr.DataTree:
    """Measure `prompts` on a repositioned model or bridge; the run has one node a measure.

    `measures` are names of the catalogue or objects that follow the protocol `Measure`. `layers` and `heads` (numbers; None: all)
    restrict what is measured. `store`, a directory, keeps finished batches so that a repeated call goes on after an interruption;
    it is emptied at the end. Raises InputError where prompts, layers or heads do not fit the model or the measures.
    """
    named = [measure_named(measure) if isinstance(measure, str) else measure for measure in measures]
    chosen = [for_training_length(measure, length_trained(bridge)) for measure in named]
    schemes = layout(bridge)
    layers = _within(layers, len(schemes), "layer")
    heads = None if heads is None else _within(heads, next(attentions(bridge)).config.num_attention_heads, "head")
    _require_prompts(prompts, chosen, _vocabulary(bridge))
    batches = make_batches(prompts, batch_size, next(bridge.parameters()).device)
    kept = BatchStore(store, _fingerprint(bridge, prompts, chosen, layers, heads, batch_size))
    gathered = {measure.name: Gathered() for measure in chosen}
    for number, batch in enumerate(batches):
        found = kept.read(number)
        if found is None:
            found = observe_batch(bridge, batch, chosen, layers, heads, _advance(progress, number, len(batches), len(layers)))
            kept.write(number, found)
        for name, statistics in found.items():
            gathered[name].add(statistics)
        if progress is not None:
            progress((number + 1) * len(layers), len(batches) * len(layers))
    groups = {measure.name: _group(measure, gathered[measure.name].whole(), schemes) for measure in chosen}
    if "positions" in groups:
        groups["positions"] = groups["positions"].merge(describe_prompts(prompts, getattr(bridge, "tokenizer", None)))
    kept.clear()
    return make_run(groups, _provenance(bridge, prompts, schemes))


class Gathered:
    """What a measure has kept so far: sums added up as they come, so that they take the memory of one batch; prompts side by side."""

    def __init__(self) -> None:
        self._per_prompt: list[xr.Dataset] = []
        self._sums = xr.Dataset()

    def add(self, statistics: Statistics) -> None:
        """Take in the statistics of one more batch."""
        self._per_prompt.append(statistics.per_prompt)
        self._sums = merge([Statistics(sums=self._sums), Statistics(sums=statistics.sums)]).sums

    def whole(self) -> Statistics:
        """All batches merged."""
        return merge([*(Statistics(per_prompt=one) for one in self._per_prompt), Statistics(sums=self._sums)])


def observe_batch(
    bridge: nn.Module,
    batch: Batch,
    measures: Sequence[Measure],
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Statistics]:
    """What each measure keeps of one batch: one forward pass. `advance` is called with the number of layers observed."""
    parts: dict[str, list[Statistics]] = {measure.name: [] for measure in measures}

    def receive(inputs: AttentionInputs) -> None:
        if heads is not None:
            inputs = select_heads(inputs, heads)
        for measure in measures:
            parts[measure.name].append(_with_head_numbers(measure.observe(inputs, batch.spans), heads))
        if advance is not None:
            advance(len(parts[measures[0].name]))

    capture(bridge, batch.tokens, batch.valid, torch.as_tensor(batch.numbers), receive, layers)
    return {name: merge(found) for name, found in parts.items()}


def make_batches(prompts: Sequence[Prompt], batch_size: int, device: torch.device | str = "cpu") -> list[Batch]:
    """Batches of at most `batch_size` prompts, longest first - so that what does not fit fails at once - padded on the right."""
    if batch_size < 1:
        raise InputError(f"a batch has at least one prompt, not {batch_size}")
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].tokens), number))
    names = sorted({name for prompt in prompts for name in prompt.spans} | {"generated", "rest"})
    batches = []
    for start in range(0, len(order), batch_size):
        numbers = tuple(order[start : start + batch_size])
        longest = len(prompts[numbers[0]].tokens)
        tokens = torch.zeros(len(numbers), longest, dtype=torch.long)
        masks = {name: torch.zeros(len(numbers), longest, dtype=torch.bool) for name in names}
        for row, number in enumerate(numbers):
            prompt = prompts[number]
            tokens[row, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
            for name, where in prompt.all_spans().items():
                masks[name][row, list(where)] = True
        lengths = torch.tensor([len(prompts[number].tokens) for number in numbers])
        valid = torch.arange(longest) < lengths[:, None]
        batches.append(
            Batch(
                numbers,
                tokens.to(device),
                valid.to(device),
                {name: mask.to(device) for name, mask in masks.items()},
            )
        )
    return batches


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


def _group(measure: Measure, statistics: Statistics, schemes: Sequence[str]) -> xr.Dataset:
    group = with_schemes(measure.conclude(statistics), schemes)
    return group.assign_attrs({name: _plain(value) for name, value in measure.parameters.items()})


def _with_head_numbers(statistics: Statistics, heads: Sequence[int] | None) -> Statistics:
    if heads is None:
        return statistics
    numbered = [
        dataset.assign_coords(head=list(heads)) if "head" in dataset.dims else dataset
        for dataset in (statistics.per_prompt, statistics.sums)
    ]
    return Statistics(*numbered)


def _advance(progress: Progress | None, batch: int, batches: int, layers: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda observed: progress(batch * layers + observed, batches * layers)


def _within(chosen: Sequence[int] | None, count: int, what: str) -> list[int]:
    if chosen is None:
        return list(range(count))
    for number in chosen:
        if not 0 <= number < count:
            raise InputError(f"{what} {number} was asked for; the model's are 0 to {count - 1}")
    if not chosen:
        raise InputError(f"no {what} was asked for; the model's are 0 to {count - 1}")
    return sorted(set(chosen))


def _require_prompts(prompts: Sequence[Prompt], measures: Sequence[Measure], vocabulary: int) -> None:
    if not prompts:
        raise InputError("there are no prompts to analyse")
    for number, prompt in enumerate(prompts):
        if max(prompt.tokens) >= vocabulary:
            raise InputError(f"prompt {number} has token {max(prompt.tokens)}; the model's tokens are 0 to {vocabulary - 1}")
        for measure in measures:
            absent = [name for name in measure.required_spans if not prompt.all_spans().get(name)]
            if absent:
                raise InputError(
                    f"prompt {number} has no span {absent[0]!r}, which the measure {measure.name!r} needs; "
                    f"mark it in the prompt or leave the measure out"
                )


def _vocabulary(bridge: nn.Module) -> int:
    return int(next(attentions(bridge)).config.vocab_size)


def _provenance(bridge: nn.Module, prompts: Sequence[Prompt], schemes: Sequence[str]) -> dict[str, Any]:
    checkpoint = loaded_from(bridge)
    return {
        "layout": ",".join(schemes),
        "dtype": str(next(bridge.parameters()).dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "prompts_digest": prompts_digest(prompts),
        "training_length": length_trained(bridge),
        "checkpoint": checkpoint.name if checkpoint is not None else "",
        "checkpoint_digest": checkpoint.digest if checkpoint is not None else weights_digest(bridge),
        **{f"version_{name}": number for name, number in versions().items()},
    }


def _fingerprint(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    layers: Sequence[int],
    heads: Sequence[int] | None,
    batch_size: int,
) -> str:
    stated = {
        "provenance": _provenance(bridge, prompts, layout(bridge)),
        "measures": {measure.name: {name: _plain(value) for name, value in measure.parameters.items()} for measure in measures},
        "layers": list(layers),
        "heads": None if heads is None else list(heads),
        "batch_size": batch_size,
    }
    return hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


__all__ = ["Batch", "analyze", "describe_prompts", "make_batches", "observe_batch"]
