"""Where tokens look: the strongest keys of rows of attention, of every head over the first prompt.

    A_ij = softmax_j W_ij        of row i the `keys` largest A_ij are kept, and the j that they stand at; the rest holds 1 - their sum

Rows are all tokens of the prompt where these are no more than `rows`; else the tokens of its spans, as many as there is room for, and
others evenly spread between them. Computed in parts of rows: no n x n map is kept, at most `_CELLS` cells exist at a time.

Knows nothing about what the spans mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.statistics import Measure, Statistics

_CELLS = 2**24
"""Logits that exist at a time."""
_NOT_MARKED = ("rest", "separator")
"""Spans, beside segments, that say nothing about which rows are of interest."""


def strongest_keys(
    inputs: AttentionInputs, rows: Int[Tensor, "row"], count: int
) -> tuple[Float[Tensor, "head row rank"], Int[Tensor, "head row rank"]]:
    """The `count` largest attention weights of every row, for a batch of one prompt, and their keys; NaN and -1 where fewer are visible."""
    count = min(count, inputs.valid.shape[1])
    step = max(1, _CELLS // (inputs.heads * inputs.valid.shape[1]))
    weights, keys = [], []
    for part in rows.split(step):
        logits = inputs.logits(part)[0]
        largest, places = logits.topk(count, dim=-1)
        seen = largest > float("-inf")
        total = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        weights.append(torch.exp(largest.double() - total).masked_fill(~seen, float("nan")))
        keys.append(places.masked_fill(~seen, -1))
    return torch.cat(weights, dim=1), torch.cat(keys, dim=1)


@dataclass(frozen=True)
class AttentionRows(Measure):
    """The measure `attention_rows`."""

    rows: Annotated[int, Interval(ge=1, le=65_536)] = 512
    """Most rows."""
    keys: Annotated[int, Interval(ge=1, le=4096)] = 16
    """Strongest keys of every row."""
    name: str = "attention_rows"

    @property
    def may_be_nan(self) -> tuple[str, ...]:
        """What not every prompt, layer and head has, or what is a share or a correlation of nothing."""
        return ("weight",)

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Weights and keys [layer, head, query, rank] of the first prompt."""
        first = inputs.row_of_first_prompt
        if first is None:
            return Statistics()
        names = [name for name in spans if name not in _NOT_MARKED and not name.startswith("segments.")]
        marked = [spans[name][first] for name in names]
        prompt = select_prompts(inputs, slice(first, first + 1))
        rows = _rows(prompt.valid[0], marked, self.rows)
        weights, keys = strongest_keys(prompt, rows, self.keys)
        axes = ("layer", "head", "query", "rank")
        labels = {"query": rows.tolist(), "rank": range(weights.shape[-1])}
        # float32, and doubles that hold whole numbers exactly: so the compressed run file is smaller, and parts of it merge.
        kept = {"weight": weights.float(), "key": keys.double()}
        return Statistics(first_prompt=xr.Dataset({name: of_layer(inputs, axes, part, **labels) for name, part in kept.items()}))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `attention_rows` of a run."""
        measured = statistics.first_prompt
        group = xr.Dataset(
            {
                "weight": described(measured["weight"], "largest attention weights of a row of the first prompt", "1"),
                "key": described(measured["key"].fillna(-1).astype("int32"), "token that the weight is on; -1: none", "tokens"),
            }
        )
        return group.assign_coords({axis: group[axis].astype("int64") for axis in ("query", "rank")})


def _rows(valid: Bool[Tensor, "token"], marked: list[Bool[Tensor, "token"]], most: int) -> Int[Tensor, "row"]:
    """Up to `most` of the valid tokens, in order: `marked` ones first, then others, each evenly spread where they are too many."""
    tokens = valid.nonzero()[:, 0]
    if len(tokens) <= most:
        return tokens
    wanted = torch.stack(marked).any(0) & valid if marked else torch.zeros_like(valid)
    named = _spread(wanted.nonzero()[:, 0], most)
    others = _spread((valid & ~wanted).nonzero()[:, 0], most - len(named))
    return torch.cat([named, others]).sort().values


def _spread(tokens: Int[Tensor, "token"], most: int) -> Int[Tensor, "row"]:
    if len(tokens) <= most:
        return tokens
    return tokens[torch.linspace(0, len(tokens) - 1, most, dtype=torch.float64).round().long()] if most else tokens[:0]
