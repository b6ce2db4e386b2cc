"""Sums of logits or attention weights along diagonals, rows and columns, and of squares.

Logits that are a dot product, W_ij = scale q~_i . k~_j (rotated), are never written out: see
causal_pairs and profiles, whose sums they share with whoever else asks in the same pass (heads).
Soft-capped logits, logits with a position bias and attention weights - the softmax of a row - are
not bilinear: their rows are written out some at a time, in O(n^2 d) time (about that of the layer's
attention, several times over) and O(n) memory per row.

This module knows nothing about the use of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import CHUNK
from repo_interp.measures.kernels.heads import HeadBlock, Reduction, over_heads, reduced
from repo_interp.measures.kernels.solvers import Axes
from repo_interp.positions.sinks import weights_of
from repo_interp.runtime.memory import SHARED, memory_for


@dataclass(frozen=True)
class MapSums:
    """Sums of a map over the seen pairs of every head, float64."""

    together: Float[Tensor, "*layer prompt head three_tokens_and_1"]
    """`lines` and `square`, one after the other: a block of heads is written by one operator."""

    @cached_property
    def lines(self) -> Axes:
        """Sums over diagonals, rows and columns [..., prompt, head, token]."""
        return Axes(*self.together[..., :-1].chunk(3, -1))

    @property
    def square(self) -> Float[Tensor, "*layer prompt head"]:
        """Sum of squares."""
        return self.together[..., -1]


def logit_sums(
    inputs: AttentionInputs, rows: Bool[Tensor, "prompt token"] | None = None
) -> MapSums:
    """Return sums of the logits over the seen pairs.

    Args:
        inputs: A layer and a batch; keeps the sums of all rows.
        rows: Mask [prompt, token] of the queries that take part; None for all valid tokens.

    Returns:
        Sums along diagonals, rows and columns [prompt, head, token], and of squares [prompt, head],
        float64.
    """
    # Other logits with a mask of rows have no reduction: `by_rows` is for all valid tokens
    if rows is None or inputs.is_bilinear:
        return reduced(inputs, [LogitSums()], rows)[0]
    return _sums_by_rows(inputs, rows & inputs.valid, lambda logits, rows: logits)


def attention_sums(inputs: AttentionInputs) -> MapSums:
    """Return sums of the post-softmax attention weights over the seen pairs.

    O(n^2 d) time; no n x n map is made.

    Args:
        inputs: A layer and a batch.

    Returns:
        Sums along diagonals, rows and columns [prompt, head, token], and of squares [prompt, head],
        float64.
    """
    return _sums_by_rows(
        inputs, inputs.valid, lambda logits, rows: weights_of(logits, inputs.sinks_of(rows))
    )


def row_blocks(
    inputs: AttentionInputs, rows: Int[Tensor, "row"] | None = None
) -> Iterator[tuple[Int[Tensor, "row"], Float[Tensor, "prompt head row key"]]]:
    """Yield the logits of some rows at a time, as many as the device's memory allows.

    Args:
        inputs: A layer and a batch; features below float32 are computed with in float32.
        rows: Token numbers of the queries; None for all, padding included.

    Yields:
        Token numbers [row] and logits [prompt, head, row, key], -inf where a key is not seen.
    """
    if inputs.queries.dtype not in (torch.float32, torch.float64):
        # Products in bfloat16 would keep 8 bits; `replace` drops copies that were rotated in it
        inputs = replace(inputs, queries=inputs.queries.float(), keys=inputs.keys.float())
    prompts, heads, tokens, _ = inputs.queries.shape
    memory = memory_for(inputs.queries.device, 2 * SHARED)
    # 32 bytes per entry of the map: a few copies of it in float32 and float64
    # On a processor no more than stay in its caches
    most = tokens if memory_for(inputs.queries.device, 0) else CHUNK
    at_once = max(1, min(most, memory // (prompts * heads * tokens * 32)))
    rows = torch.arange(tokens, device=inputs.queries.device) if rows is None else rows
    for some in rows.split(at_once):
        yield some, inputs.logits(some)


@dataclass(frozen=True)
class LogitSums(Reduction):
    """Sum the logits: gives `MapSums`."""

    def start(self, inputs: AttentionInputs) -> MapSums:
        """Return zeros."""
        prompts, heads, tokens, _ = inputs.queries.shape
        new = {"dtype": torch.float64, "device": inputs.queries.device}
        return MapSums(torch.zeros(prompts, heads, 3 * tokens + 1, **new))

    def ill_conditioned(self, inputs: AttentionInputs, block: HeadBlock) -> Tensor:
        """Mark heads whose logits vary little beside the terms of their sum of squares."""
        return block.pairs.magnitude > block.well_conditioned

    def add(self, result: MapSums, inputs: AttentionInputs, block: HeadBlock) -> None:
        """Write the sums of the heads of a block, with the logit's scale."""
        pairs = block.pairs
        sums = [block.by_distance, pairs.by_query, pairs.by_key, pairs.square[..., None]]
        together = torch.cat(sums, -1)
        together *= _scales(together.shape[-1], inputs.logit_scale, together.device)
        over_heads(result.together, block, together)

    def by_rows(self, inputs: AttentionInputs) -> MapSums:
        """Return the sums of any logits, from some rows at a time."""
        return _sums_by_rows(inputs, inputs.valid, lambda logits, rows: logits)


@lru_cache(maxsize=8)
def _scales(count: int, scale: float, device: torch.device) -> Float[Tensor, "sum"]:
    """A block has q . k: logits are `scale` times that, their squares scale^2."""
    scales = torch.full((count,), scale, dtype=torch.float64, device=device)
    scales[-1] = scale**2
    return scales


def _sums_by_rows(
    inputs: AttentionInputs,
    rows: Bool[Tensor, "prompt token"],
    finish: Callable[[Tensor, Tensor], Tensor],
) -> MapSums:
    sums, done = LogitSums().start(inputs), 0
    for block, logits in row_blocks(inputs):
        seen = inputs.visible(block) & rows[:, block, None]
        # Hidden logits are -inf, weights of padding NaN: 0 adds nothing to any sum
        values = torch.where(seen[:, None], finish(logits, block), 0)
        sums.lines.query[..., block] = values.sum(-1, dtype=torch.float64)
        sums.lines.key.add_(values.sum(-2, dtype=torch.float64))
        sums.lines.distance[..., : done + len(block)] += _diagonals(values, done)
        done += len(block)
        # Last, because it overwrites the values
        sums.square.add_(values.square_().sum((-1, -2), dtype=torch.float64))
    return sums


def _diagonals(
    values: Float[Tensor, "prompt head row key"], first_row: int
) -> Float[Tensor, "prompt head distance"]:
    """Return sums of the entries at every distance i - j >= 0, up to the last row's."""
    count, tokens = values.shape[-2:]
    # Keys backwards, and every row cut from one long vector one place later: a diagonal becomes a
    # column.
    backwards = torch.nn.functional.pad(values.flip(-1), (0, count))
    skewed = backwards.flatten(-2)[..., : count * (tokens + count - 1)].unflatten(-1, (count, -1))
    by_shift = skewed.sum(-2, dtype=torch.float64)
    return by_shift[..., tokens - 1 - first_row : tokens + count - 1]
