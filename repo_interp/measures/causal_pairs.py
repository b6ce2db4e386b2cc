"""Which pairs of a query and an earlier key are seen, how many there are, and how heads are taken a few at a time.

    (i, j) is seen  <=>  j <= i,  i - j < window,  valid_i and valid_j

A sum over seen pairs of anything bilinear in q_i and k_j does not change when the features of invalid tokens are set to zero, so
padding on either side, and leaving tokens out (the beginning-of-sequence token, say), cost nothing. A sliding window is a difference:
the pairs beyond it, i - j >= window, are the causal pairs of the same queries with the keys delayed by `window` tokens.

Counts of seen pairs by query, by key and by distance come from the mask alone (by distance: its autocorrelation).
Knows nothing about logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

MEMORY = 48 * 2**20
"""Bytes that a kernel may use beside its inputs and outputs, as long as one head fits."""

CHUNK = 128
"""Tokens a chunk: within one, pairs are multiplied out; between them, only sums over whole chunks are kept."""

Sums = TypeVar("Sums")


@dataclass(frozen=True)
class PairCounts:
    """Numbers of seen pairs, float64."""

    query: Float[Tensor, "... query"]
    key: Float[Tensor, "... key"]
    distance: Float[Tensor, "... distance"]
    total: Float[Tensor, "..."]


def pair_counts(valid: Bool[Tensor, "... token"], window: int | None = None) -> PairCounts:
    """How many seen pairs each query, each key and each distance i - j has, and how many there are in all. Exact."""
    tokens = valid.shape[-1]
    mask = valid.to(torch.float64)
    earlier = mask.cumsum(-1)
    until_end = earlier[..., -1:] - earlier + mask
    if window is not None and window < tokens:
        earlier = earlier - delayed(earlier, window, axis=-1)
        until_end = until_end - advanced(until_end, window, axis=-1)
    length = next_fast_len(2 * tokens - 1, real=True)
    spectrum = torch.fft.rfft(mask, n=length)
    distance = torch.fft.irfft(spectrum * spectrum.conj(), n=length)[..., :tokens].round()
    if window is not None:
        distance[..., window:] = 0
    return PairCounts(query=earlier * mask, key=until_end * mask, distance=distance, total=distance.sum(-1))


def signed_keys(keys: Float[Tensor, "... token d_head"], window: int | None) -> Iterator[tuple[int, int, Tensor]]:
    """(sign, delay, delayed keys) whose causal pairs, added with their signs, are the pairs inside the window."""
    yield 1, 0, keys
    if window is not None and window < keys.shape[-2]:
        yield -1, window, delayed(keys, window, axis=-2)


def delayed(values: Tensor, by: int, axis: int) -> Tensor:
    """`values` moved `by` places towards the end of `axis`; zeros come in."""
    length = values.shape[axis]
    moved = torch.zeros_like(values)
    moved.narrow(axis, by, length - by).copy_(values.narrow(axis, 0, length - by))
    return moved


def advanced(values: Tensor, by: int, axis: int) -> Tensor:
    """`values` moved `by` places towards the start of `axis`; zeros come in."""
    length = values.shape[axis]
    moved = torch.zeros_like(values)
    moved.narrow(axis, 0, length - by).copy_(values.narrow(axis, by, length - by))
    return moved


def over_heads(
    kernel: Callable[[Tensor, Tensor], Sums],
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None,
    bytes_per_head: int,
    memory: int = MEMORY,
) -> Sums:
    """Call `kernel(queries, keys)` on as many heads [item, token, d_head] at a time as fit into `memory`, and join what it returns.

    `valid` is [prompt, token], or broadcasts over the leading axes of `queries`. Features of invalid tokens reach the kernel as zeros,
    half-precision ones as float32. Consecutive heads share a key-value head where there are fewer of those. The kernel returns a
    dataclass of tensors with the axis `item` first; here the leading axes of `queries` take its place. Raises ValueError where queries
    and keys do not pair.
    """
    every = torch.arange(queries.shape[:-2].numel(), device=queries.device)
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    joined = _over_items(kernel, queries, keys, valid, every, dtype, max(1, memory // max(1, bytes_per_head)))
    return type(joined)(**{name: part.unflatten(0, queries.shape[:-2]) for name, part in _tensors(joined).items()})


def over_chosen_heads(
    kernel: Callable[[Tensor, Tensor], Sums],
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None,
    chosen: Bool[Tensor, "... head"],
    bytes_per_head: int,
    memory: int = MEMORY,
) -> Sums:
    """As `over_heads`, in float64, for the `chosen` heads alone, which stand along one axis `item` in what is returned."""
    items = chosen.flatten().nonzero()[:, 0]
    return _over_items(kernel, queries, keys, valid, items, torch.float64, max(1, memory // max(1, bytes_per_head)))


def _over_items(kernel, queries, keys, valid, items: Tensor, dtype: torch.dtype, at_once: int):
    check_pairable(queries, keys)
    lead, group = queries.shape[:-2], queries.shape[-3] // keys.shape[-3]
    mask = None if valid is None else broadcast_valid(valid, lead)
    parts = []
    for block in items.split(at_once):
        some_queries = _take(queries, block, lead).to(dtype)
        some_keys = _take(keys, block // group, keys.shape[:-2]).to(dtype)
        if mask is not None:
            hidden = ~_take(mask, block, lead)[..., None]
            some_queries, some_keys = some_queries.masked_fill(hidden, 0), some_keys.masked_fill(hidden, 0)
        parts.append(kernel(some_queries, some_keys))
    columns = [_tensors(part) for part in parts]
    return type(parts[0])(**{name: torch.cat([column[name] for column in columns]) for name in columns[0]})


def _tensors(record) -> dict[str, Tensor]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _take(values: Tensor, items: Tensor, lead: torch.Size) -> Tensor:
    """Entries number `items` of the leading axes `lead`: copies those and nothing else, however `values` is strided."""
    return values[torch.unravel_index(items, lead)]


def broadcast_valid(valid: Bool[Tensor, "... token"], lead: torch.Size) -> Bool[Tensor, "... token"]:
    """`valid` with the leading axes `lead`, as a view; a mask without a head axis counts for every head."""
    if valid.ndim == len(lead) and valid.ndim > 1:
        valid = valid[..., None, :]
    return valid.expand(*lead, valid.shape[-1])


def check_pairable(queries: Tensor, keys: Tensor) -> None:
    """Raise ValueError unless queries and keys can be paired."""
    pairable = queries.ndim == keys.ndim >= 3 and queries.shape[-2:] == keys.shape[-2:]
    if not pairable or queries.shape[:-3] != keys.shape[:-3] or queries.shape[-3] % keys.shape[-3]:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} do not pair: [..., head, token, d_head] and "
            "[..., kv_head, token, d_head] with the same tokens and d_head, and a multiple of kv_head heads, were wanted"
        )
