"""Sums of a layer's logits, or of its attention weights, along diagonals, rows and columns, and of their squares.

Logits that are a dot product, W_ij = scale q~_i . k~_j (rotated), are never written out: see causal_sums. Keys
are centred first,

    W_ij = scale q~_i . (k~_j - mean k~) + beta_i,      beta_i = scale q~_i . mean k~,

so that float32 products keep their digits where the mean of the logits is far larger than their spread; the
row effect beta is added back to all sums in float64. Soft-capped logits, logits with a position bias and
attention weights - the softmax of a row - are not bilinear: their rows are written out some at a time, in
O(n^2 d) time (about that of the layer's own attention, several times over) and O(n) memory per row.

Knows nothing about what the sums are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.axis_fit import additive_pairs
from repo_interp.measures.kernels.causal_pairs import CHUNK
from repo_interp.measures.kernels.causal_sums import causal_sums
from repo_interp.measures.kernels.heads import MEMORY
from repo_interp.measures.kernels.solvers import Axes


@dataclass(frozen=True)
class MapSums:
    """Sums of a map over the seen pairs of every head, float64."""

    lines: Axes
    """Sums over diagonals, rows and columns, each [prompt, head, token]."""
    square: Float[Tensor, "prompt head"]


def logit_sums(inputs: AttentionInputs, rows: Bool[Tensor, "prompt token"] | None = None) -> MapSums:
    """Sums of the logits over the seen pairs; of some `rows` only where they are given."""
    rows = inputs.valid if rows is None else rows & inputs.valid
    if is_bilinear(inputs):
        return _bilinear_sums(inputs, rows)
    return _written_out(inputs, rows, lambda logits: logits)


def attention_sums(inputs: AttentionInputs) -> MapSums:
    """Sums of the post-softmax attention weights. O(n^2 d) time; no n x n map is made."""
    return _written_out(inputs, inputs.valid, lambda logits: torch.softmax(logits, dim=-1))


def is_bilinear(inputs: AttentionInputs) -> bool:
    """Whether logits are a dot product of a query's and a key's features and nothing else."""
    return inputs.softcap is None and inputs.position_logits is None


def row_blocks(
    inputs: AttentionInputs, memory: int = 2 * MEMORY
) -> Iterator[tuple[Int[Tensor, "row"], Float[Tensor, "prompt head row key"]]]:
    """Logits of some rows at a time, -inf where a key is not seen; as many as take `memory` bytes in all."""
    if inputs.queries.dtype not in (torch.float32, torch.float64):
        inputs = replace(inputs, queries=inputs.queries.float(), keys=inputs.keys.float())
    prompts, heads, tokens, _ = inputs.queries.shape
    at_once = max(1, min(CHUNK, memory // (prompts * heads * tokens * 32)))
    for rows in torch.arange(tokens, device=inputs.queries.device).split(at_once):
        yield rows, inputs.logits(rows)


def _bilinear_sums(inputs: AttentionInputs, rows: Bool[Tensor, "prompt token"]) -> MapSums:
    queries, keys, valid = inputs.rotated_queries, inputs.rotated_keys, inputs.valid
    prompts, kv_heads, tokens, width = keys.shape
    group = inputs.heads // kv_heads
    exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
    pairs = additive_pairs(rows[:, None], valid[:, None], inputs.window)
    at_once = max(1, MEMORY // (prompts * tokens * width * 4 * (1 + group)))
    parts = []
    for start in range(0, kv_heads, at_once):
        stop = min(start + at_once, kv_heads)
        some_queries = queries[:, group * start : group * stop].to(exact)
        some_keys = keys[:, start:stop].to(exact)
        mean = _mean_over(valid, some_keys)
        if rows is not valid:
            some_queries = some_queries.masked_fill(~rows[:, None, :, None], 0)
        centred = causal_sums(some_queries, some_keys - mean, valid, inputs.window, inputs.logit_scale)
        effect = some_queries.unflatten(1, (-1, group)).to(torch.float64) @ mean[:, :, None].to(torch.float64).mT
        effect = torch.where(rows[:, None], effect[..., 0].flatten(1, 2) * inputs.logit_scale, 0)
        added = pairs.sums(Axes(torch.zeros_like(effect), effect, torch.zeros_like(effect)))
        lines = Axes(centred.distance + added.distance, centred.query + added.query, centred.key + added.key)
        square = centred.square + (effect * (2 * centred.query + pairs.counts.query * effect)).sum(-1)
        parts.append(MapSums(lines, square))
    lines = Axes(*(torch.cat(part, 1) for part in zip(*(part.lines for part in parts), strict=True)))
    return MapSums(lines, torch.cat([part.square for part in parts], 1))


def _mean_over(valid: Bool[Tensor, "prompt token"], keys: Tensor) -> Float[Tensor, "prompt kv_head 1 d_head"]:
    """Mean of the valid keys, in their dtype."""
    masked = keys.masked_fill(~valid[:, None, :, None], 0)
    count = valid.sum(-1).clamp(min=1)[:, None, None, None]
    return (masked.sum(2, keepdim=True, dtype=torch.float64) / count).to(keys.dtype)


def _written_out(inputs: AttentionInputs, rows: Bool[Tensor, "prompt token"], finish: Callable[[Tensor], Tensor]) -> MapSums:
    prompts, heads, tokens, _ = inputs.queries.shape
    new = {"dtype": torch.float64, "device": inputs.queries.device}
    lines = Axes(*(torch.zeros(prompts, heads, tokens, **new) for _ in range(3)))
    square = torch.zeros(prompts, heads, **new)
    for block, logits in row_blocks(inputs):
        seen = inputs.visible(block) & rows[:, block, None]
        values = torch.where(seen[:, None], finish(logits), 0)
        lines.query[..., block] = values.sum(-1, dtype=torch.float64)
        lines.key.add_(values.sum(-2, dtype=torch.float64))
        lines.distance[..., : int(block[-1]) + 1] += _diagonals(values, int(block[0]))
        square += values.square_().sum((-1, -2), dtype=torch.float64)
    return MapSums(lines, square)


def _diagonals(values: Float[Tensor, "prompt head row key"], first_row: int) -> Float[Tensor, "prompt head distance"]:
    """Sum of the entries at each distance i - j >= 0, for distances up to the last row's."""
    count, tokens = values.shape[-2:]
    # Keys backwards, and each row cut from one long vector one place later: a diagonal becomes a column.
    backwards = torch.nn.functional.pad(values.flip(-1), (0, count))
    skewed = backwards.flatten(-2)[..., : count * (tokens + count - 1)].unflatten(-1, (count, -1))
    by_shift = skewed.sum(-2, dtype=torch.float64)
    return by_shift[..., tokens - 1 - first_row : tokens + count - 1]
