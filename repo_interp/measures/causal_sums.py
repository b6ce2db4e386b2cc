"""Sums of a causal logit map along its rows, columns and diagonals, and of its squares, without making the map.

    y_ij = scale * q_i . k_j   over seen pairs (see causal_pairs):
    query_i = sum_j y_ij,   key_j = sum_i y_ij,   distance_t = sum_i y_{i, i-t},   total = sum y,   square = sum y^2

Tokens are cut into chunks. Pairs within a chunk are multiplied out; a query's pairs with earlier chunks need only the sum of their
keys, a key's pairs with later chunks the sum of their queries, and for the squares, with Grams,

    sum_{i in c} sum_{j before c} (q_i . k_j)^2 = sum of all entries of (Q_c^T Q_c) o (sum over earlier chunks of K^T K).

Diagonals are a cross-correlation, summed over dimensions in the frequency domain:  irfft(sum_r Q_r conj(K_r)).
Cost O(n d (d + chunk) + d n log n) a head; products in the features' dtype within a chunk, everything else in float64 (the Fourier
transforms too: their error is absolute, and the longest distances have few pairs). `square` of float32 features loses digits where
the mean dwarfs the spread: heads with total square > 26 n var(y) are redone in float64.

Features are rotated already: index and learned positions look the same here. Knows nothing of models, prompts or measures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures.causal_pairs import (
    CHUNK,
    MEMORY,
    advanced,
    broadcast_valid,
    over_chosen_heads,
    over_heads,
    pair_counts,
    signed_keys,
)

ILL_CONDITIONED = 26.0
"""mean^2 / var = 25: from here on the second moments of float32 features are made in float64."""

_STRIDE = 16 * CHUNK
_DIMENSIONS = 32


@dataclass(frozen=True)
class CausalSums:
    """Sums over the seen pairs of each head, float64."""

    query: Float[Tensor, "... head query"]
    key: Float[Tensor, "... head key"]
    distance: Float[Tensor, "... head distance"]
    total: Float[Tensor, "... head"]
    square: Float[Tensor, "... head"]


@dataclass(frozen=True)
class _LinesAndSquare:
    query: Tensor
    key: Tensor
    square: Tensor
    causal_square: Tensor
    """Sum of squares over all causal pairs: larger than `square` where there is a window, and what the rounding is relative to."""


@dataclass(frozen=True)
class _Diagonals:
    distance: Tensor


def causal_sums(
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None = None,
    window: int | None = None,
    scale: float = 1.0,
    memory: int = MEMORY,
) -> CausalSums:
    """Row, column, diagonal sums and sum of squares of scale * q . k over seen pairs, for every head at once.

    `valid` is [prompt, token] or anything that broadcasts over the leading axes; `memory` in bytes bounds what is made beside inputs
    and outputs. Raises ValueError where the shapes do not pair.
    """
    distance = diagonal_sums(queries, keys, valid, window, memory)
    lines = _lines_and_squares(queries, keys, valid, window, memory, total=distance.sum(-1))
    return CausalSums(
        query=lines.query * scale,
        key=lines.key * scale,
        distance=distance * scale,
        total=distance.sum(-1) * scale,
        square=lines.square * scale**2,
    )


def diagonal_sums(
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None = None,
    window: int | None = None,
    memory: int = MEMORY,
) -> Float[Tensor, "... head distance"]:
    """sum_i q_i . k_{i-t} over seen pairs, for t = 0 .. n-1. Float64."""
    tokens, dimensions = queries.shape[-2:]
    reach = tokens if window is None else min(window, tokens)
    length = next_fast_len(tokens + reach - 1, real=True)

    def kernel(some_queries: Tensor, some_keys: Tensor) -> _Diagonals:
        product = torch.zeros(len(some_queries), length // 2 + 1, dtype=torch.complex128, device=queries.device)
        for start in range(0, dimensions, _DIMENSIONS):
            some = slice(start, start + _DIMENSIONS)
            spectrum = spectra(some_queries[..., some], length)
            product += spectrum.mul_(spectra(some_keys[..., some], length).conj_physical_()).sum(1)
        distance = torch.fft.irfft(product, n=length)[..., :tokens]
        distance[..., reach:] = 0
        return _Diagonals(distance)

    bytes_per_head = 2 * tokens * dimensions * queries.element_size() + 4 * min(_DIMENSIONS, dimensions) * length * 8
    return over_heads(kernel, queries, keys, valid, bytes_per_head, memory).distance


def spectra(
    features: Float[Tensor, "item token dimension"], length: int
) -> Float[Tensor, "item dimension frequency"]:
    """Real Fourier transforms along the tokens, zero-padded to `length`, in complex128."""
    return torch.fft.rfft(features.transpose(-1, -2).to(torch.float64), n=length)


def _lines_and_squares(queries, keys, valid, window, memory, total: Tensor) -> _LinesAndSquare:
    """Everything but the diagonals; in float64 for the heads that need it."""

    def kernel(some_queries: Tensor, some_keys: Tensor) -> _LinesAndSquare:
        return _lines_and_square_kernel(some_queries, some_keys, window)

    tokens, dimensions = queries.shape[-2:]
    grams = min(_STRIDE, tokens) // CHUNK * dimensions**2
    bytes_per_head = (2 * tokens * dimensions + min(_STRIDE, tokens) * (CHUNK + 3 * dimensions) + 3 * grams) * 8
    lines = over_heads(kernel, queries, keys, valid, bytes_per_head, memory)
    if queries.dtype == torch.float64:
        return lines
    pairs = seen_pairs(queries, valid, window)
    spread = lines.square - total**2 / pairs
    ill = lines.causal_square > ILL_CONDITIONED * spread.clamp(min=0)
    if bool(ill.any()):
        exact = over_chosen_heads(kernel, queries, keys, valid, ill, bytes_per_head, memory)
        lines.query[ill], lines.key[ill], lines.square[ill] = exact.query, exact.key, exact.square
    return lines


def seen_pairs(queries: Tensor, valid: Tensor | None, window: int | None) -> Float[Tensor, "... head"]:
    """Number of seen pairs of every head; 1 where there are none, to be divided by."""
    mask = torch.ones(queries.shape[-2], dtype=torch.bool, device=queries.device) if valid is None else valid
    return broadcast_valid(pair_counts(mask, window).total[..., None], queries.shape[:-2])[..., 0].clamp(min=1)


def _lines_and_square_kernel(queries: Tensor, keys: Tensor, window: int | None) -> _LinesAndSquare:
    items, tokens, _ = queries.shape
    new = {"dtype": torch.float64, "device": queries.device}
    query, key = torch.zeros(items, tokens, **new), torch.zeros(items, tokens, **new)
    squares = []
    all_queries = queries.sum(1, dtype=torch.float64)
    for sign, delay, delayed_keys in signed_keys(keys, window):
        by_query, by_key, square = _causal_lines_and_square(queries, delayed_keys, all_queries)
        query += sign * by_query
        key += sign * (advanced(by_key, delay, axis=-1) if delay else by_key)
        squares.append(sign * square)
    return _LinesAndSquare(query, key, square=torch.stack(squares).sum(0), causal_square=squares[0])


def _causal_lines_and_square(queries: Tensor, keys: Tensor, all_queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums by query and by key, and the sum of squares, over all causal pairs; a few chunks at a time."""
    items, _, dimensions = queries.shape
    new = {"dtype": torch.float64, "device": queries.device}
    lower = torch.ones(CHUNK, CHUNK, dtype=queries.dtype, device=queries.device).tril()
    keys_before, gram_before = torch.zeros(items, dimensions, **new), torch.zeros(items, dimensions, dimensions, **new)
    queries_after, square = all_queries.clone(), torch.zeros(items, **new)
    by_query, by_key = [], []
    for some_queries, some_keys in zip(queries.split(_STRIDE, 1), keys.split(_STRIDE, 1), strict=True):
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
        square += logits.square_().sum((-1, -2), dtype=torch.float64).sum(1)
        crossed, gram_before = gram_products(q, k, gram_before)
        square += crossed.sum((-1, -2))
        keys_before = keys_before + key_sums.sum(1)
        queries_after = queries_after - query_sums.sum(1)
    return torch.cat(by_query, 1), torch.cat(by_key, 1), square


def in_chunks(features: Float[Tensor, "item token d_head"], size: int = CHUNK) -> Float[Tensor, "item chunk token d_head"]:
    """Cut the tokens into chunks of `size`; zeros fill the last one."""
    missing = -features.shape[1] % size
    if missing:
        features = torch.nn.functional.pad(features, (0, 0, 0, missing))
    return features.unflatten(1, (-1, size))


def gram_products(
    queries: Float[Tensor, "item chunk token d_head"],
    keys: Float[Tensor, "item chunk token d_head"],
    gram_before: Float[Tensor, "item d_head d_head"],
) -> tuple[Float[Tensor, "item d_head d_head"], Float[Tensor, "item d_head d_head"]]:
    """sum over chunks of (Q_c^T Q_c) o (Gram of all keys before chunk c), and the Gram of all keys up to the last chunk. Float64."""
    key_grams = (keys.transpose(-1, -2) @ keys).to(torch.float64)
    torch.cumsum(key_grams, 1, out=key_grams)
    query_grams = (queries.transpose(-1, -2) @ queries).to(torch.float64)
    crossed = query_grams.sum(1).mul_(gram_before)
    if queries.shape[1] > 1:
        crossed += query_grams[:, 1:].mul_(key_grams[:, :-1]).sum(1)
    return crossed, gram_before + key_grams[:, -1]
