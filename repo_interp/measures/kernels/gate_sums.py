"""Terms that a scheme adds to the logits, a few query rows at a time.

Gates, attention from position alone, and sums by distance.

    g_ij = sigmoid(logit_scale q_i . x_j) where query i sees key j, else 0
            x_j: `AttentionInputs.gate_features` (CoPE, eq. 3-5)
    a_ij = softmax_j B_ij over the keys that i sees
            B: `AttentionInputs.position_logits` (fig. 4)
    sum_i B_{i, i-t} / logit_scale   over seen pairs, in units of q . k
            ALiBi, KERPLE, FIRE, CoPE

O(n^2) work - a gate belongs to a pair, and nothing is known about B - but never a map of all
queries, unless `position_map` is asked for one. This module knows nothing about separators, nor
which scheme it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.positions.contextual import gates
from repo_interp.runtime.memory import SHARED, memory_for


@dataclass(frozen=True)
class GateSums:
    """Gates added up both ways, float64."""

    by_key: Float[Tensor, "prompt head key"]
    """Sum over queries."""
    by_query: Float[Tensor, "prompt head query"]
    """Sum over keys: p_{i,0} without a largest position."""
    queries: Int[Tensor, "prompt key"]
    """Number of queries that see a key."""


def _row_numbers(inputs: AttentionInputs) -> tuple[Int[Tensor, "row"], ...]:
    """Return numbers of query rows, as many at a time as memory allows for maps of them."""
    prompts, heads, tokens, _ = inputs.queries.shape
    rows = torch.arange(tokens, device=inputs.valid.device)
    # 48 bytes per entry of a map: about six float64 maps of some rows stand at once
    return rows.split(max(1, memory_for(rows.device, SHARED) // (48 * prompts * heads * tokens)))


def gates_of_rows(
    inputs: AttentionInputs, rows: Int[Tensor, "row"]
) -> Float[Tensor, "prompt head row key"]:
    """Return the gates g_ij of some queries.

    Args:
        inputs: A layer and a batch.
        rows: Token numbers of the queries [row].

    Returns:
        Gates [prompt, head, row, key] in 0 .. 1; 0 where a key is not seen.

    Raises:
        ValueError: The layer has no gates.
    """
    if inputs.gate_features is None:
        raise ValueError(f"layer {inputs.layer} ({inputs.scheme}) has no gates")
    return gates(
        inputs.queries[:, :, rows],
        inputs.gate_features,
        inputs.visible(rows)[:, None],
        inputs.logit_scale,
    )


def gate_sums(inputs: AttentionInputs) -> GateSums:
    """Return sums of all gates of a layer over queries and over keys.

    Args:
        inputs: A layer and a batch.

    Returns:
        The sums, float64.

    Raises:
        ValueError: The layer has no gates.
    """
    prompts, heads, tokens, _ = inputs.queries.shape
    by_key = torch.zeros(prompts, heads, tokens, dtype=torch.float64, device=inputs.valid.device)
    by_query = torch.zeros_like(by_key)
    queries = torch.zeros(prompts, tokens, dtype=torch.long, device=inputs.valid.device)
    for rows in _row_numbers(inputs):
        of_rows = gates_of_rows(inputs, rows)
        by_key += of_rows.sum(2, dtype=torch.float64)
        # Every row comes once, so it is written; a key is seen from many rows, so it is added up
        by_query[:, :, rows] = of_rows.sum(3, dtype=torch.float64)
        queries += inputs.visible(rows).sum(1)
    return GateSums(by_key, by_query, queries)


def attention_from_position(
    inputs: AttentionInputs, rows: Int[Tensor, "row"]
) -> Float[Tensor, "prompt head row key"]:
    """Return the weights a_ij of some queries.

    Args:
        inputs: A layer and a batch.
        rows: Token numbers of the queries [row].

    Returns:
        Weights [prompt, head, row, key]: rows sum to 1, those of padding to 0.

    Raises:
        ValueError: Nothing is added to the logits.
    """
    if inputs.position_logits is None:
        raise ValueError(f"layer {inputs.layer} ({inputs.scheme}) adds no position logits")
    seen = inputs.visible(rows)[:, None]
    logits = (
        inputs.position_logits(rows)
        # A scheme may answer once for all prompts or heads
        .expand(seen.shape[0], inputs.heads, -1, -1)
        .masked_fill(~seen, -torch.inf)
    )
    # A row of padding sees nothing: the softmax of -inf alone is NaN
    return torch.softmax(logits, dim=-1).masked_fill(~seen, 0.0)


def position_map(inputs: AttentionInputs) -> Float[Tensor, "prompt head query key"]:
    """Return the whole map of attention from position alone (fig. 4).

    Args:
        inputs: A layer and a batch.

    Returns:
        Weights [prompt, head, query, key], rows scaled to a maximum of 1; NaN where a key is not
        seen.

    Raises:
        ValueError: Nothing is added to the logits.
    """
    rows = torch.arange(inputs.valid.shape[1], device=inputs.valid.device)
    weights = attention_from_position(inputs, rows)
    # Long rows have small weights; scaled by row they can be told apart in one picture
    scaled = weights / weights.amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return scaled.masked_fill(~inputs.visible(rows)[:, None], torch.nan)


def last_segment_sums(
    inputs: AttentionInputs,
    first: Int[Tensor, "prompt layout query"],
    counted: Bool[Tensor, "prompt layout query"],
) -> tuple[Float[Tensor, "prompt head layout"], Float[Tensor, "prompt layout"]]:
    """Sum attention from position alone that stays in the segment of its query.

    Args:
        inputs: A layer and a batch.
        first: First token of the segment per query [prompt, layout, query], int64.
        counted: Queries that are summed over, of the same shape.

    Returns:
        Sums [prompt, head, layout], float64; and those of even attention [prompt, layout].
    """
    prompts, heads, _, _ = inputs.queries.shape
    layouts = first.shape[1]
    sums = torch.zeros(prompts, heads, layouts, dtype=torch.float64, device=first.device)
    even = torch.zeros(prompts, layouts, dtype=torch.float64, device=first.device)
    for rows in _row_numbers(inputs):
        # [prompt, row, layout]
        where, taken = first[:, :, rows].transpose(1, 2), counted[:, :, rows].transpose(1, 2)
        weights = attention_from_position(inputs, rows).double()
        sums += (_from(weights, where[:, None].expand(-1, heads, -1, -1)) * taken[:, None]).sum(2)
        seen = inputs.visible(rows).double()
        # Control: equal weights on the same keys stay in the segment to this extent anyway
        share = seen / seen.sum(-1, keepdim=True).clamp_min(1)
        even += (_from(share, where) * taken).sum(1)
    return sums, even


def _from(
    weights: Float[Tensor, "... row key"], first: Int[Tensor, "... row layout"]
) -> Float[Tensor, "... row layout"]:
    """Return sums of rows from key `first` on."""
    # A zero in front, so that entry `first` holds the sum of the keys before it
    before = torch.nn.functional.pad(weights.cumsum(-1), (1, 0))
    return before[..., -1:] - before.gather(-1, first)


def position_bias_sums(
    inputs: AttentionInputs, tokens: Bool[Tensor, "prompt token"]
) -> Float[Tensor, "head distance"]:
    """Return the sum of position logits over prompts and seen pairs by distance.

    Args:
        inputs: A layer and a batch.
        tokens: Mask [prompt, token] of the tokens that take part.

    Returns:
        Sums [head, distance], float64, in units of q . k; 0 where nothing is added.
    """
    length, device = tokens.shape[1], tokens.device
    sums = torch.zeros(inputs.heads, length, dtype=torch.float64, device=device)
    position_logits = inputs.position_logits
    if position_logits is None:
        return sums
    distance = torch.arange(length, device=device)
    for rows in _row_numbers(inputs):
        # [row, distance]; keys before the start are clamped for the gather and hidden by `seen`
        key = rows[:, None] - distance
        seen = (key >= 0) & tokens[:, rows, None] & tokens[:, key.clamp(min=0)]
        if inputs.window is not None:
            seen &= distance < inputs.window
        added = position_logits(rows)
        by_distance = added.gather(-1, key.clamp(min=0).expand(*added.shape[:2], -1, -1))
        sums += by_distance.masked_fill(~seen[:, None], 0).sum((0, 2), dtype=torch.float64)
    # The bias is added after scaling, so dividing brings it into units of q . k
    return sums / inputs.logit_scale
