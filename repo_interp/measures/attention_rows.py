"""Where tokens look: the strongest keys of rows of attention, of every head over the first prompt.

    A_ij = softmax_j W_ij        of row i the largest A_ij are kept, and the j that they stand at; the rest holds 1 - their sum
    W_ij = ln A_ij + L_i         L_i = ln sum_j exp W_ij, the row's `log_total`, so that logits can be had from weights

A head has room for `rows` x `keys` weights. Rows are all tokens of the prompt where these are no more than `rows`, each with as many keys
as there is then room for, so that the rows of a short prompt are whole; else the tokens of its spans, as many as there is room for, and
others evenly spread between them, each with `keys`. Computed in parts of rows: no n x n map is kept of a long prompt, at most `_CELLS`
cells exist at a time.

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

from repo_interp.inputs import AttentionInputs, Spans, select_prompts, with_sinks
from repo_interp.measures.labels import arrays, described
from repo_interp.measures.statistics import Measure, Needs, Statistics

_CELLS = 2**20
"""Logits that exist at a time."""
_NOT_MARKED = ("rest", "separator")
"""Spans, beside segments, that say nothing about which rows are of interest."""


def strongest_keys(
    inputs: AttentionInputs, rows: Int[Tensor, "row"], count: int
) -> tuple[Float[Tensor, "head row rank"], Int[Tensor, "head row rank"], Float[Tensor, "head row"]]:
    """The `count` largest attention weights of every row, for a batch of one prompt, and their keys; NaN and -1 where fewer are visible.

    And of every row the logarithm of the sum of exponentials of its logits.
    """
    count = min(count, inputs.valid.shape[1])
    step = max(1, _CELLS // (inputs.heads * inputs.valid.shape[1]))
    weights, keys, totals = [], [], []
    for part in rows.split(step):
        logits = inputs.logits(part)[0]
        largest, places = logits.topk(count, dim=-1)
        seen = largest > float("-inf")
        total = torch.logsumexp(with_sinks(logits.double(), inputs.sinks), dim=-1, keepdim=True)
        weights.append(torch.exp(largest.double() - total).masked_fill(~seen, float("nan")))
        keys.append(places.masked_fill(~seen, -1))
        totals.append(total[..., 0])
    return torch.cat(weights, dim=1), torch.cat(keys, dim=1), torch.cat(totals, dim=1)


def rows_of_interest(valid: Bool[Tensor, "token"], spans: Spans, prompt: int, most: int) -> Int[Tensor, "row"]:
    """Up to `most` of the valid tokens of row `prompt` of a batch, in order: all, or those of its spans first and others between them."""
    names = [name for name in spans if name not in _NOT_MARKED and not name.startswith("segments.")]
    return _rows(valid, [spans[name][prompt] for name in names], most)


@dataclass(frozen=True)
class AttentionRows(Measure):
    """The measure `attention_rows`."""

    rows: Annotated[int, Interval(ge=1, le=65_536)] = 512
    """Most rows."""
    keys: Annotated[int, Interval(ge=1, le=4096)] = 16
    """Strongest keys of a row; of fewer rows more, `rows` x `keys` in all."""
    name: str = "attention_rows"

    @property
    def needs(self) -> Needs:
        """What some prompts, layers or heads lack, and ratios and correlations that are undefined, are NaN."""
        return Needs(nan=("weight",))

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Weights and keys [layer, head, query, rank], and totals of rows, of the first prompt."""
        first = inputs.row_of_first_prompt
        if first is None:
            return Statistics()
        prompt = select_prompts(inputs, slice(first, first + 1))
        rows = rows_of_interest(prompt.valid[0], spans, first, self.rows)
        weights, keys, totals = strongest_keys(prompt, rows, max(self.keys, self.rows * self.keys // len(rows)))
        axes = ("layer", "head", "query", "rank")
        # float32, and doubles that hold whole numbers exactly: so the compressed run file is smaller, and parts of it merge.
        kept = {"weight": (axes, weights.float()), "key": (axes, keys.double()), "log_total": (axes[:-1], totals.float())}
        return Statistics(first_prompt=arrays(inputs, kept, query=rows.tolist(), rank=range(weights.shape[-1])))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `attention_rows` of a run."""
        measured = statistics.first_prompt
        group = xr.Dataset(
            {
                "weight": described(measured["weight"], "largest attention weights of a row of the first prompt", "1"),
                "key": described(measured["key"].fillna(-1).astype("int32"), "token that the weight is on; -1: none", "tokens"),
                "log_total": described(
                    measured["log_total"], "logarithm of the sum of exponentials of the row's logits", "logits"
                ),
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
