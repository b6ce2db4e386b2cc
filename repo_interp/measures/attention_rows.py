"""Where tokens look: the strongest keys of rows of attention, of every head over the first prompts.

    A_ij = softmax_j W_ij        of row i the largest A_ij are kept, and the j that they stand at;
                                 the rest holds 1 - their sum
    W_ij = ln A_ij + L_i         L_i = ln sum_j exp W_ij, the row's `log_total`, so that logits can
                                 be had from weights

Of the first prompt at most `rows` x `keys` weights per head are kept. Rows are all tokens of the
prompt where these are no more than `rows`, with as many keys as then fit, so that the rows of a
short prompt are whole; else the tokens of its spans, as many as fit, and others evenly spread
between them, with `keys` keys. Of the first `prompts` prompts, those of up to `rows` tokens, every
token's `prompt_keys` strongest keys are kept besides. Computed in parts of rows: no n x n map of a
long prompt is kept.

This module knows nothing about the meaning of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.fitting import AnyPrompt, Layers, PromptLabels
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.measures.kernels.seen_pairs import extents, on_host, once
from repo_interp.measures.labels import Arrays, arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.sinks import with_sinks
from repo_interp.runtime.memory import memory_for

_OF_PROMPTS = ("prompt_weight", "prompt_key", "prompt_log_total")
"""Variables with several prompts."""
_TEXTS = {
    "weight": "largest attention weights of a row of the first prompt",
    "key": "token that the weight is on; -1: none [tokens]",
    "log_total": "logarithm of the sum of exponentials of the row's logits [logits]",
    "prompt_weight": "largest attention weights of every token's row; NaN in long prompts",
    "prompt_key": "token that the weight is on; -1: none [tokens]",
    "prompt_log_total": "logarithm of the sum of exponentials of the row's logits [logits]",
}
_NOT_MARKED = ("rest", "separator")
"""Spans, besides segments, that do not mark rows of interest."""


def strongest_keys(
    inputs: AttentionInputs, rows: Int[Tensor, "row"], count: int
) -> tuple[Float[Tensor, "head row rank"], Int[Tensor, "head row rank"], Float[Tensor, "head row"]]:
    """Return the largest attention weights of rows of one prompt.

    Args:
        inputs: A layer and a batch of one prompt.
        rows: Token numbers of the queries, ascending, int64.
        count: Weights per row; fewer if the prompt has fewer tokens.

    Returns:
        Weights [head, row, rank], float64, NaN where fewer keys are visible; their keys [head, row,
        rank], -1 there; and the logarithm of the sum of exponentials of the logits [head, row],
        float64.
    """
    count = min(count, inputs.valid.shape[1])
    weights, keys, totals = [], [], []
    for part, logits in row_blocks(inputs, rows):
        sinks, logits = inputs.sinks_of(part), logits[0]
        # No row sees a later key; which these are would keep an accelerator waiting.
        if not memory_for(rows.device, 0):
            logits = logits[..., : max(count, int(part[-1]) + 1)]
        largest, places = logits.topk(count, dim=-1)
        seen = largest > float("-inf")
        # Of all keys and the sink, so that weights of the kept keys are those of the whole row
        of_row = with_sinks(logits[None], sinks)[0]
        total = torch.logsumexp(of_row, dim=-1, keepdim=True).double()
        weights.append(torch.exp(largest.double() - total).masked_fill(~seen, float("nan")))
        keys.append(places.masked_fill(~seen, -1))
        totals.append(total[..., 0])
    return torch.cat(weights, dim=1), torch.cat(keys, dim=1), torch.cat(totals, dim=1)


def rows_of_interest(
    valid: Bool[np.ndarray, " token"], spans: Spans, prompt: int, most: int
) -> Int[np.ndarray, " row"]:
    """Return up to `most` valid tokens of a prompt: all, or tokens of its spans before others.

    Args:
        valid: Mask [token] of the prompt, on the processor: one question serves all layers.
        spans: Masks [prompt, token] by name; segments, `rest` and `separator` mark nothing.
        prompt: Row of the batch.
        most: Most tokens.

    Returns:
        Token numbers [row], ascending, int64.
    """
    tokens = np.flatnonzero(valid)
    if len(tokens) <= most:
        return tokens
    wanted = np.zeros_like(valid)
    for name, mask in spans.items():
        if name not in _NOT_MARKED and not name.startswith("segments."):
            wanted |= on_host(mask)[prompt] & valid
    # Tokens of spans first; the rest of `most` goes to others, evenly spread
    named = _spread(np.flatnonzero(wanted), most)
    others = _spread(np.flatnonzero(valid & ~wanted), most - len(named))
    return np.sort(np.concatenate([named, others]))


@dataclass(frozen=True)
class AttentionRows(
    Measure, needs=Needs(by_pair=True, nan=("weight", *_OF_PROMPTS), documents=True)
):
    """The measure `attention_rows`."""

    rows: Annotated[int, Interval(ge=1, le=65_536)] = 512
    """Most rows."""
    keys: Annotated[int, Interval(ge=1, le=4096)] = 16
    """Strongest keys of a row; of fewer rows more, `rows` x `keys` in all."""
    prompts: Annotated[int, Interval(ge=1, le=65_536)] = 8
    """Prompts, the first ones, of which every token has a row, where they have no more than `rows`
    tokens.
    """
    prompt_keys: Annotated[int, Interval(ge=1, le=4096)] = 4
    """Strongest keys of a row."""
    name: str = "attention_rows"
    describes: ClassVar[str] = "strongest keys of every token"
    offers: ClassVar[str] = "prompt_tokens"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return True: any layers will do."""
        return True

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return weights, keys and totals of rows.

        Of the first prompt [layer, head, query, rank], of several [prompt, layer, head, token,
        strongest].
        """
        return Statistics(
            per_prompt=self._of_prompts(inputs), first_prompt=self._of_first_prompt(inputs, spans)
        )

    def _of_first_prompt(self, inputs: AttentionInputs, spans: Spans) -> Arrays:
        first = inputs.row_of_first_prompt
        if first is None:
            return Arrays()
        prompt, valid = select_prompts(inputs, slice(first, first + 1)), on_host(inputs.valid)
        rows, index = once(
            ("rows of interest", first, self.rows, *spans),
            lambda: _uploaded(rows_of_interest(valid[first], spans, first, self.rows), inputs),
            inputs.valid,
            *spans.values(),
        )
        # The budget rows x keys is spent on keys where a prompt has few rows
        weights, keys, totals = strongest_keys(
            prompt, index, max(self.keys, self.rows * self.keys // len(rows))
        )
        # float32, and doubles that hold whole numbers exactly: so the compressed run file is
        # smaller, and parts of it merge.
        kept = {
            "weight": ("layer head query rank", weights.float()),
            "key": ("layer head query rank", keys.double()),
            "log_total": ("layer head query", totals.float()),
        }
        return arrays(inputs, kept, query=rows, rank=range(weights.shape[-1]))

    def _of_prompts(self, inputs: AttentionInputs) -> Arrays:
        counts = [count for _, _, count in extents(inputs.valid)]
        chosen = [
            row
            for row, (number, count) in enumerate(zip(inputs.prompts.tolist(), counts, strict=True))
            if number < self.prompts and count <= self.rows
        ]
        if not chosen:
            return Arrays()
        # [prompt, head, token, strongest]: rows of padding and absent ranks stay NaN
        shape = (len(chosen), inputs.heads, inputs.valid.shape[1], self.prompt_keys)
        # Weights and keys by rank, and the total behind them
        device, ranks = inputs.valid.device, self.prompt_keys
        kept = torch.full((*shape[:-1], 2 * ranks + 1), torch.nan, device=device)
        for place, row in enumerate(chosen):
            _, tokens = once(
                ("tokens", row),
                lambda row=row: _uploaded(np.flatnonzero(on_host(inputs.valid)[row]), inputs),
                inputs.valid,
            )
            weight, key, total = strongest_keys(
                select_prompts(inputs, slice(row, row + 1)), tokens, ranks
            )
            missing = ranks - weight.shape[-1]
            filled = [
                torch.nn.functional.pad(part, (0, missing), value=torch.nan)
                for part in (weight.float(), key.float())
            ]
            of_tokens = torch.cat([*filled, total.float()[..., None]], -1)
            kept[place].index_copy_(1, tokens, of_tokens)
        weights, keys, totals = kept.split([ranks, ranks, 1], -1)
        record = {
            "prompt_weight": ("prompt layer head token strongest", weights),
            "prompt_key": ("prompt layer head token strongest", keys),
            "prompt_log_total": ("prompt layer head token", totals[..., 0]),
        }
        labels = {"prompt": inputs.prompts[chosen].tolist(), "strongest": range(self.prompt_keys)}
        return arrays(inputs, record, **labels)

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `attention_rows` of a run."""
        measured = {**statistics.first_prompt.data_vars, **statistics.per_prompt.data_vars}
        keys = {
            # Merging fills absent entries of floats with NaN; as keys they are -1
            name: measured[name].fillna(-1).astype("int32")
            for name in ("key", "prompt_key")
            if name in measured
        }
        group = described_group(measured | keys, _TEXTS)
        return group.assign_coords(
            {axis: group[axis].astype("int64") for axis in ("query", "rank")}
        )

    def add_tokens(self, group: xr.Dataset, tokens: PromptLabels) -> xr.Dataset:
        """Return the group with the tokens of the first prompts, of which it has rows."""
        count = 1 + int(group["prompt"].max()) if "prompt" in group else 1
        # Prompts without rows get key -1: the default fill, NaN, would turn the keys into floats
        return group.merge(tokens.of_prompts(count), fill_value={"prompt_key": -1})


def _uploaded(
    rows: Int[np.ndarray, " row"], inputs: AttentionInputs
) -> tuple[list[int], Int[Tensor, "row"]]:
    """Rows as a list and as an index on the device."""
    return rows.tolist(), torch.from_numpy(rows).to(inputs.valid.device)


def _spread(tokens: Int[np.ndarray, " token"], most: int) -> Int[np.ndarray, " row"]:
    if len(tokens) <= most:
        return tokens
    return (
        # Both ends included; float32 would round steps of long prompts
        tokens[torch.linspace(0, len(tokens) - 1, most, dtype=torch.float64).round().long().numpy()]
        if most
        else tokens[:0]
    )
