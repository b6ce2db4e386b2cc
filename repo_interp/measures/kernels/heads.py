"""The heads of a layer, as many at a time as memory allows, and in float64 where float32 will not do.

    over_heads      calls a kernel on queries and keys [item, token, d_head] of as many heads as fit, and joins what it returns
    head_blocks     yields rotated queries and keys of as many heads as fit, for measures that reduce each head themselves

A kernel returns a dataclass of tensors whose first axis is `item`: it is batched over heads, and this module decides how many
heads a batch has. Products of float32 features lose digits where large terms cancel in a variance - a mean that dwarfs the
spread, dimensions that oppose each other. Such heads, and only they, are given to the kernel a second time, in float64.

Knows nothing about what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.positions.rotary import rotation_tables, turn

MEMORY = 16 * 2**20
"""Bytes that a kernel may use beside its inputs and outputs, as long as one head fits."""

ILL_CONDITIONED = 26.0
"""Sum of the absolute terms over the sum that they give, from where on float32 features are treated in float64.

Where nothing but the mean is large this is mean^2 / variance > 25.
"""

Sums = TypeVar("Sums")
Kernel = Callable[[Tensor, Tensor], Sums]


def over_heads(
    kernel: Kernel[Sums],
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None,
    bytes_per_head: int,
    memory: int = MEMORY,
) -> Sums:
    """What `kernel` returns for every head, as one record, with the leading axes of `queries` in the place of `item`.

    `valid` is [prompt, token], or broadcasts over the leading axes of `queries`. The kernel sees zeros as the
    features of invalid tokens, and half-precision features as float32. Consecutive heads share a key-value head where
    there are fewer of those. Raises ValueError where queries and keys do not pair.
    """
    every = torch.arange(queries.shape[:-2].numel(), device=queries.device)
    exact = torch.float64 if queries.dtype == torch.float64 else torch.float32
    at_once = max(1, memory // max(1, bytes_per_head))
    flat: Any = _over_items(kernel, queries, keys, valid, every, exact, at_once)
    return type(flat)(**{name: part.unflatten(0, queries.shape[:-2]) for name, part in _tensors(flat).items()})


def over_heads_in_two_precisions(
    kernel: Kernel[Sums],
    ill_conditioned: Callable[[Sums], Bool[Tensor, "... head"]],
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None,
    bytes_per_head: int,
    memory: int = MEMORY,
) -> Sums:
    """As `over_heads`, but heads that `ill_conditioned` picks from the results are done again in float64."""
    sums = over_heads(kernel, queries, keys, valid, bytes_per_head, memory)
    if queries.dtype == torch.float64:
        return sums
    chosen = ill_conditioned(sums)
    items = chosen.flatten().nonzero()[:, 0]
    if len(items):
        at_once = max(1, memory // max(1, 2 * bytes_per_head))
        exact = _over_items(kernel, queries, keys, valid, items, torch.float64, at_once)
        for name, part in _tensors(exact).items():
            getattr(sums, name)[chosen] = part
    return sums


def _over_items(kernel, queries, keys, valid, items: Tensor, dtype: torch.dtype, at_once: int):
    check_pairable(queries, keys)
    lead, group = queries.shape[:-2], queries.shape[-3] // keys.shape[-3]
    mask = None if valid is None else broadcast_valid(valid, lead)
    joined, record_type, start = {}, None, 0
    for block in items.split(at_once):
        some_queries = _take(queries, block, lead).to(dtype)
        some_keys = _take(keys, block // group, keys.shape[:-2]).to(dtype)
        if mask is not None:
            hidden = ~_take(mask, block, lead)[..., None]
            if bool(hidden.any()):
                some_queries, some_keys = some_queries.masked_fill_(hidden, 0), some_keys.masked_fill_(hidden, 0)
        record = kernel(some_queries, some_keys)
        record_type = type(record)
        for name, part in _tensors(record).items():
            if name not in joined:
                joined[name] = part.new_empty(len(items), *part.shape[1:])
            joined[name][start : start + len(block)] = part
        start += len(block)
    assert record_type is not None, "there is at least one head"
    return record_type(**joined)


def _tensors(record) -> dict[str, Tensor]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _take(values: Tensor, items: Tensor, lead: torch.Size) -> Tensor:
    """Entries number `items` of the leading axes `lead`: copies those only, however `values` is strided."""
    return values[torch.unravel_index(items, lead)]


def broadcast_valid(valid: Tensor, lead: torch.Size) -> Tensor:
    """`valid` [..., token] with the leading axes `lead`, as a view; without a head axis it counts for every head."""
    if valid.ndim == len(lead) and valid.ndim > 1:
        valid = valid[..., None, :]
    return valid.expand(*lead, valid.shape[-1])


def check_pairable(queries: Tensor, keys: Tensor) -> None:
    """Raise ValueError unless queries and keys can be paired."""
    pairable = queries.ndim == keys.ndim >= 3 and queries.shape[-2:] == keys.shape[-2:]
    if not pairable or queries.shape[:-3] != keys.shape[:-3] or queries.shape[-3] % keys.shape[-3]:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} do not pair: wanted "
            "[..., head, token, d_head] and [..., kv_head, token, d_head] with the same tokens and d_head, "
            "the number of heads a multiple of that of key-value heads"
        )


@dataclass(frozen=True)
class HeadBlock:
    """Some heads of some prompts, prompt by prompt. One entry of the axis `item` is one head of one prompt."""

    prompt: Int[Tensor, "item"]
    """Row of the batch."""
    head: Int[Tensor, "item"]
    queries: Float[Tensor, "item token d_head"]
    """Rotated; float32, or float64 where the inputs are."""
    keys: Float[Tensor, "item token d_head"]
    """Rotated; a key-value head is repeated for each of its query heads."""
    tokens: Bool[Tensor, "item token"]
    """Tokens that take part."""


def head_blocks(
    inputs: AttentionInputs, tokens: Bool[Tensor, "prompt token"] | None = None, memory: int = MEMORY // 2
) -> Iterator[HeadBlock]:
    """All heads of all prompts, each once, in the order (prompt, head), so that joined results unflatten to [prompt, head].

    `tokens` says which take part (default: the valid ones). `memory` bounds the bytes of the rotated queries and keys of a block, as
    long as one head fits.
    """
    exact = torch.float64 if inputs.queries.dtype == torch.float64 else torch.float32
    prompts, heads, length, width = inputs.queries.shape
    tokens = inputs.valid if tokens is None else tokens
    items = torch.arange(prompts * heads, device=inputs.queries.device)
    bytes_per_head = 2 * length * width * (8 if exact == torch.float64 else 4)
    for block in items.split(max(1, memory // max(1, 2 * bytes_per_head))):
        prompt, head = block // heads, block % heads
        queries = inputs.queries[prompt, head].to(exact)
        keys = inputs.keys[prompt, head // (heads // inputs.kv_heads)].to(exact)
        if inputs.positions is not None and inputs.frequencies is not None:
            positions = inputs.positions[prompt, head // (heads // inputs.positions.shape[1])]
            tables = rotation_tables(positions, inputs.frequencies, inputs.attention_scaling, exact)
            queries, keys = turn(queries, *tables), turn(keys, *tables)
        yield HeadBlock(prompt, head, queries, keys, tokens[prompt])
