"""Norms of the values that attention moves, and the contribution of the first token.

With A_ij the attention of query i to key j, v_j the values, f the first token of a query's document,
and means over queries i but f:

    first_value    |v_f| / median over other tokens j of |v_j|
    first_weight   mean of A_if
    first_moved    mean of A_if |v_f| / sum_j A_ij |v_j|
    output         mean of |sum_j A_ij v_j| / sum_j A_ij |v_j|      1: all values have one direction

(Kobayashi et al. 2020: weights alone overrate tokens with small values.) Queries are all tokens
except f; for a longer prompt, the middles of `queries` equal parts. This module knows nothing about
why a value is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.measures.kernels.samples import first_tokens, middles, places_of
from repo_interp.measures.kernels.seen_pairs import once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.rotary import expand_heads
from repo_interp.positions.sinks import weights_of
from repo_interp.values import Count

_TEXTS = {
    "first_value": "norm of the first token's value over the median of other tokens",
    "first_weight": "attention to the first token",
    "first_moved": "share of the first token in the norms that attention moves",
    "output": "norm of what a head writes over the norms that it adds up",
}


@dataclass(frozen=True)
class ValueNorms(Measure, needs=Needs(by_pair=True, nan=tuple(_TEXTS), documents=True)):
    """The measure `value_norms`."""

    queries: Count = 512
    """Most queries of a prompt; a longer one has the middles of as many equal parts."""
    name: str = "value_norms"
    describes: ClassVar[str] = "values that attention moves, and the first token's"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Reduce rows of attention of each prompt, times the norms of values."""
        first, device = first_tokens(inputs), inputs.valid.device
        values = inputs.values
        found = []
        for row, places in enumerate(places_of(inputs.valid)):
            # For a prompt of one token, the first token is the only query
            candidates = places[1:] or places
            chosen = [candidates[middle] for middle in middles(len(candidates), self.queries)]
            rows = once(
                ("value_norms", row, *chosen),
                lambda chosen=chosen: torch.tensor(chosen, device=device),
                inputs.valid,
            )
            of_prompt = select_prompts(inputs, slice(row, row + 1))
            found.append(_of_prompt(of_prompt, values[row], first[row], rows))
        parts = {tuple(_TEXTS): ("prompt layer head", torch.stack(found).movedim(1, 0))}
        return Statistics(per_prompt=arrays(inputs, parts))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `value_norms` of a run."""
        return described_group(statistics.per_prompt, _TEXTS)


def _of_prompt(
    inputs: AttentionInputs,
    values: Float[Tensor, "kv_head token d_value"],
    first: Int[Tensor, "token"],
    rows: Int[Tensor, "row"],
) -> Float[Tensor, "variable head"]:
    """The four numbers of every head."""
    heads = inputs.heads
    # Values of padding may be anything
    values = values.masked_fill(~inputs.valid[0][:, None], 0.0)
    of_heads = expand_heads(values[None], heads)[0]
    norms = of_heads.norm(dim=-1).double()
    index = torch.arange(len(first), device=first.device)
    others = inputs.valid[0] & (index != first)
    # `nanmedian` ignores padding and first tokens
    median = norms.masked_fill(~others, torch.nan).nanmedian(-1).values
    of_first = norms[:, first]
    sums = torch.zeros(4, heads, dtype=torch.float64, device=first.device)
    for some, logits in row_blocks(inputs, rows):
        weights = weights_of(logits, inputs.sinks_of(some))[0]
        at_first = weights.gather(-1, first[some].expand(heads, -1)[..., None])[..., 0].double()
        moved = (weights.double() * norms[:, None]).sum(-1)
        written = (weights.to(of_heads.dtype) @ of_heads).norm(dim=-1).double()
        # The first token of a document sees only itself, so it does not count
        counts = (some != first[some]).double()
        parts = (
            norms[:, first[some]] / median[:, None],
            at_first,
            at_first * of_first[:, some] / moved,
            written / moved,
        )
        sums += torch.stack([(part * counts).sum(-1) for part in parts])
    # 0 / 0 without a counted query: NaN
    return sums / (rows != first[rows]).sum()
