"""Sums of a causal logit map along rows, columns and diagonals, and of its squares, without making the map.

    y_ij = scale * q_i . k_j   over seen pairs (see causal_pairs)
    query_i = sum_j y_ij,  key_j = sum_i y_ij,  distance_t = sum_i y_{i, i-t},  total = sum y,  square = sum y^2

Tokens are cut into chunks. Pairs within a chunk are multiplied out; a query's pairs with earlier chunks need only the
sum of their keys, a key's pairs with later chunks the sum of their queries, the squares Grams (see chunks). Diagonals
are a cross-correlation (see diagonals). Cost O(n d (d + chunk) + d n log n) a head. Products within a chunk are in
the features' dtype, everything else is in float64; heads whose variance would lose its digits are redone in float64.

Features are rotated already: index and learned positions look the same here. Knows nothing of models or measures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.kernels.causal_pairs import advanced, pairs_of_heads, signed_keys
from repo_interp.measures.kernels.chunks import CHUNK, STRIDE, gram_products, in_chunks
from repo_interp.measures.kernels.diagonals import diagonal_sums
from repo_interp.measures.kernels.over_heads import ILL_CONDITIONED, MEMORY, over_heads_in_two_precisions


@dataclass(frozen=True)
class CausalSums:
    """Sums over the seen pairs of each head, float64."""

    query: Float[Tensor, "... head query"]
    key: Float[Tensor, "... head key"]
    distance: Float[Tensor, "... head distance"]
    total: Float[Tensor, "... head"]
    square: Float[Tensor, "... head"]


@dataclass(frozen=True)
class _Lines:
    query: Tensor
    key: Tensor
    square: Tensor
    magnitude: Tensor
    """Sum of the absolute values of the terms that gave `square`: what its rounding is relative to."""


def causal_sums(
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None = None,
    window: int | None = None,
    scale: float = 1.0,
    memory: int = MEMORY,
) -> CausalSums:
    """Row, column and diagonal sums and the sum of squares of scale * q . k over seen pairs, all heads at once.

    `valid` is [prompt, token], or broadcasts over the leading axes of `queries`; `memory` in bytes bounds what is made
    beside inputs and outputs. Raises ValueError where the shapes do not pair.
    """
    tokens, dimensions = queries.shape[-2:]
    distance = diagonal_sums(queries, keys, valid, window, memory)
    total, pairs = distance.sum(-1), pairs_of_heads(valid, window, queries).clamp(min=1)
    together = min(STRIDE, tokens)
    floats = 2 * tokens * dimensions + together * (CHUNK + 3 * dimensions) + 3 * together // CHUNK * dimensions**2
    lines = over_heads_in_two_precisions(
        lambda some_queries, some_keys: _windowed(some_queries, some_keys, window),
        lambda sums: sums.magnitude > ILL_CONDITIONED * (sums.square - total**2 / pairs).clamp(min=0),
        queries,
        keys,
        valid,
        bytes_per_head=6 * floats,
        memory=memory,
    )
    return CausalSums(
        query=lines.query * scale,
        key=lines.key * scale,
        distance=distance * scale,
        total=total * scale,
        square=lines.square * scale**2,
    )


def _windowed(queries: Tensor, keys: Tensor, window: int | None) -> _Lines:
    """Causal pairs less those beyond the window."""
    all_queries = queries.sum(1, dtype=torch.float64)
    sums = None
    for sign, delay, delayed_keys in signed_keys(keys, window):
        more = _causal(queries, delayed_keys, all_queries)
        if sums is None:
            sums = more
        else:
            sums = _Lines(
                query=sums.query + sign * more.query,
                key=sums.key + sign * advanced(more.key, delay, axis=-1),
                square=sums.square + sign * more.square,
                magnitude=sums.magnitude + more.magnitude,
            )
    assert sums is not None
    return sums


def _causal(queries: Tensor, keys: Tensor, all_queries: Tensor) -> _Lines:
    """Sums over all causal pairs, some chunks at a time."""
    items, _, dimensions = queries.shape
    new = {"dtype": torch.float64, "device": queries.device}
    lower = torch.ones(CHUNK, CHUNK, dtype=queries.dtype, device=queries.device).tril()
    keys_before, gram_before = (
        torch.zeros(items, dimensions, **new),
        torch.zeros(items, dimensions, dimensions, **new),
    )
    queries_after, square, magnitude = (
        all_queries.clone(),
        torch.zeros(items, **new),
        torch.zeros(items, **new),
    )
    by_query, by_key = [], []
    for some_queries, some_keys in zip(queries.split(STRIDE, 1), keys.split(STRIDE, 1), strict=True):
        length = some_queries.shape[1]
        q, k = in_chunks(some_queries), in_chunks(some_keys)
        logits = (q @ k.transpose(-1, -2)).mul_(lower)
        key_sums, query_sums = k.sum(2, dtype=torch.float64), q.sum(2, dtype=torch.float64)
        before = keys_before[:, None] + key_sums.cumsum(1) - key_sums
        after = queries_after[:, None] - query_sums.cumsum(1)
        earlier = (q.to(torch.float64) @ before[..., None])[..., 0] + logits.sum(-1, dtype=torch.float64)
        later = (k.to(torch.float64) @ after[..., None])[..., 0] + logits.sum(-2, dtype=torch.float64)
        by_query.append(earlier.flatten(1)[:, :length])
        by_key.append(later.flatten(1)[:, :length])
        within = logits.square_().sum((-1, -2), dtype=torch.float64).sum(1)
        products, gram_before = gram_products(q, k, gram_before)
        square += within + products.sum((-1, -2))
        magnitude += within + products.abs_().sum((-1, -2))
        keys_before = keys_before + key_sums.sum(1)
        queries_after = queries_after - query_sums.sum(1)
    return _Lines(torch.cat(by_query, 1), torch.cat(by_key, 1), square, magnitude)
