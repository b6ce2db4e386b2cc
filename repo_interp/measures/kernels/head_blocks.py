"""The heads of a layer a few at a time, with queries and keys as they enter the dot product.

Rotating every head of a layer at once would double what the layer's inputs take; a measure that reduces each head to a few numbers
needs only as many at a time as keep the processor busy. Knows nothing about what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.over_heads import MEMORY
from repo_interp.positions.rotary import rotation_tables, turn


@dataclass(frozen=True)
class HeadBlock:
    """Some heads of some prompts, prompt by prompt: one entry of `item` is one head of one prompt."""

    prompt: Int[Tensor, "item"]
    """Row of the batch."""
    head: Int[Tensor, "item"]
    queries: Float[Tensor, "item token d_head"]
    """Rotated; float32, or float64 where the inputs are."""
    keys: Float[Tensor, "item token d_head"]
    """Rotated; a key-value head comes once for each of its query heads."""
    tokens: Bool[Tensor, "item token"]
    """Tokens that take part."""


def head_blocks(
    inputs: AttentionInputs, tokens: Bool[Tensor, "prompt token"] | None = None, memory: int = MEMORY // 2
) -> Iterator[HeadBlock]:
    """Every head of every prompt once, in the order (prompt, head), so that joined results unflatten to [prompt, head].

    `tokens` says which take part (default: the valid ones). `memory` bounds the bytes of the rotated queries and keys of a block, as
    long as one head fits.
    """
    exact = torch.float64 if inputs.queries.dtype == torch.float64 else torch.float32
    prompts, heads, length, width = inputs.queries.shape
    tokens = inputs.valid if tokens is None else tokens
    items = torch.arange(prompts * heads, device=inputs.queries.device)
    one = 2 * length * width * (8 if exact == torch.float64 else 4)
    for block in items.split(max(1, memory // max(1, 2 * one))):
        prompt, head = block // heads, block % heads
        queries = inputs.queries[prompt, head].to(exact)
        keys = inputs.keys[prompt, head // (heads // inputs.kv_heads)].to(exact)
        if inputs.positions is not None and inputs.frequencies is not None:
            positions = inputs.positions[prompt, head // (heads // inputs.positions.shape[1])]
            tables = rotation_tables(positions, inputs.frequencies, inputs.attention_scaling, exact)
            queries, keys = turn(queries, *tables), turn(keys, *tables)
        yield HeadBlock(prompt, head, queries, keys, tokens[prompt])
