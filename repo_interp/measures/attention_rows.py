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

Knows nothing about the meaning of spans.
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

from repo_interp.inputs import AttentionInputs, Spans, select_prompts, with_sinks
from repo_interp.measures.fitting import AnyPrompt, Layers, PromptLabels
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.measures.labels import Arrays, arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics

_OF_PROMPTS = ("prompt_weight", "prompt_key", "prompt_log_total")
"""Variables of several prompts."""
_TEXTS = {
    "weight": "largest attention weights of a row of the first prompt",
    "key": "token that the weight is on; -1: none [tokens]",
    "log_total": "logarithm of the sum of exponentials of the row's logits [logits]",
    "prompt_weight": "largest attention weights of every token's row; NaN in long prompts",
    "prompt_key": "token that the weight is on; -1: none [tokens]",
    "prompt_log_total": "logarithm of the sum of exponentials of the row's logits [logits]",
}
_NOT_MARKED = ("rest", "separator")
"""Spans, beside segments, that say nothing about which rows are of interest."""


def strongest_keys(
    inputs: AttentionInputs, rows: Int[Tensor, "row"], count: int
) -> tuple[Float[Tensor, "head row rank"], Int[Tensor, "head row rank"], Float[Tensor, "head row"]]:
    """Return the largest attention weights of rows of one prompt.

    Args:
        inputs: A layer and a batch of one prompt.
        rows: Token numbers of the queries, ascending, int64.
        count: Weights per row; fewer where the prompt has fewer tokens.

    Returns:
        Weights [head, row, rank], float64, NaN where fewer keys are visible; their keys [head, row,
        rank], -1 there; and the logarithm of the sum of exponentials of the logits [head, row],
        float64.
    """
    count = min(count, inputs.valid.shape[1])
    weights, keys, totals = [], [], []
    for part, logits in row_blocks(inputs, rows):
        # No row sees a later key.
        logits = logits[0, :, :, : max(count, int(part[-1]) + 1)]
        largest, places = logits.topk(count, dim=-1)
        seen = largest > float("-inf")
        # Of all keys and the sink, so that weights of the kept keys are those of the whole row
        total = torch.logsumexp(with_sinks(logits, inputs.sinks), dim=-1, keepdim=True).double()
        weights.append(torch.exp(largest.double() - total).masked_fill(~seen, float("nan")))
        keys.append(places.masked_fill(~seen, -1))
        totals.append(total[..., 0])
    return torch.cat(weights, dim=1), torch.cat(keys, dim=1), torch.cat(totals, dim=1)


def rows_of_interest(
    valid: Bool[Tensor, "token"], spans: Spans, prompt: int, most: int
) -> Int[Tensor, "row"]:
    """Return up to `most` valid tokens of a prompt: all, or those of its spans before others.

    Args:
        valid: Mask [token] of the prompt.
        spans: Masks [prompt, token] by name; segments, `rest` and `separator` mark nothing.
        prompt: Row of the batch.
        most: Most tokens.

    Returns:
        Token numbers [row], ascending, int64.
    """
    tokens = valid.nonzero()[:, 0]
    if len(tokens) <= most:
        return tokens
    wanted = torch.zeros_like(valid)
    for name, mask in spans.items():
        if name not in _NOT_MARKED and not name.startswith("segments."):
            wanted |= mask[prompt] & valid
    # Tokens of spans first; the rest of `most` goes to others, evenly spread
    named = _spread(wanted.nonzero()[:, 0], most)
    others = _spread((valid & ~wanted).nonzero()[:, 0], most - len(named))
    return torch.cat([named, others]).sort().values


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
        prompt = select_prompts(inputs, slice(first, first + 1))
        rows = rows_of_interest(prompt.valid[0], spans, first, self.rows)
        # The budget rows x keys is spent on keys where a prompt has few rows
        weights, keys, totals = strongest_keys(
            prompt, rows, max(self.keys, self.rows * self.keys // len(rows))
        )
        # float32, and doubles that hold whole numbers exactly: so the compressed run file is
        # smaller, and parts of it merge.
        kept = {
            "weight": ("layer head query rank", weights.float()),
            "key": ("layer head query rank", keys.double()),
            "log_total": ("layer head query", totals.float()),
        }
        return arrays(inputs, kept, query=rows.tolist(), rank=range(weights.shape[-1]))

    def _of_prompts(self, inputs: AttentionInputs) -> Arrays:
        counts = inputs.valid.sum(1)
        chosen = (
            ((inputs.prompts.to(counts.device) < self.prompts) & (counts <= self.rows))
            .nonzero()[:, 0]
            .tolist()
        )
        if not chosen:
            return Arrays()
        # [prompt, head, token, strongest]: rows of padding and absent ranks stay NaN
        shape = (len(chosen), inputs.heads, inputs.valid.shape[1], self.prompt_keys)
        weights, keys, totals = (
            np.full(size, np.nan, np.float32) for size in (shape, shape, shape[:-1])
        )
        for place, row in enumerate(chosen):
            tokens = inputs.valid[row].nonzero()[:, 0]
            found = strongest_keys(
                select_prompts(inputs, slice(row, row + 1)), tokens, self.prompt_keys
            )
            weight, key, total = (array.float().cpu().numpy() for array in found)
            # numpy reads a tensor of one token as a number
            ranks, tokens = slice(weight.shape[-1]), tokens.cpu().numpy()
            weights[place][:, tokens, ranks], keys[place][:, tokens, ranks] = weight, key
            totals[place][:, tokens] = total
        record = {
            "prompt_weight": ("prompt layer head token strongest", weights),
            "prompt_key": ("prompt layer head token strongest", keys),
            "prompt_log_total": ("prompt layer head token", totals),
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


def _spread(tokens: Int[Tensor, "token"], most: int) -> Int[Tensor, "row"]:
    if len(tokens) <= most:
        return tokens
    return (
        # Both ends included; float32 would round steps of long prompts
        tokens[torch.linspace(0, len(tokens) - 1, most, dtype=torch.float64).round().long()]
        if most
        else tokens[:0]
    )
