"""Sums of a causal logit map along rows, columns and diagonals, and of its squares, without making the map.

    y_ij = scale * q_i . k_j   over seen pairs (see causal_pairs)
    query_i = sum_j y_ij,  key_j = sum_i y_ij,  distance_t = sum_i y_{i, i-t},  total = sum y,  square = sum y^2

Tokens are cut into chunks. Pairs within a chunk are multiplied out; a query's pairs with earlier chunks need only the
sum of their keys, a key's pairs with later chunks the sum of their queries, the squares Grams (see causal_pairs). Cost
O(n d (d + chunk) + d n log n) per head. Products within a chunk are in the features' dtype, everything else is in
float64; heads whose variance would lose its digits are redone in float64.

Diagonals are a cross-correlation: with Q_a, K_a the Fourier transforms of dimension a, zero-padded,

    sum_i q_ia k_{i-t, a} = irfft(Q_a conj(K_a))_t

Rotary component r is the pair of dimensions (r, r + d/2), so its profile by distance (HoPE, fig. 2, 3) is the sum of two
of these; the logits' is the sum of all, taken before the inverse transform. Always in float64: the error of a Fourier
transform is absolute, and the longest distances have few pairs (float32 would leave 2e-4 there).

Features are rotated already: index and learned positions look the same here. Knows nothing of models or measures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures.kernels.causal_pairs import (
    CHUNK,
    STRIDE,
    advanced,
    gram_products,
    in_chunks,
    pairs_of_heads,
    signed_keys,
)
from repo_interp.measures.kernels.heads import ILL_CONDITIONED, MEMORY, over_heads, over_heads_in_two_precisions


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
        # Pairs within a chunk, written out; what a query has with earlier chunks follows from the sum of their keys alone.
        logits = (q @ k.transpose(-1, -2)).mul_(lower)
        key_sums, query_sums = k.sum(2, dtype=torch.float64), q.sum(2, dtype=torch.float64)
        before = keys_before[:, None] + key_sums.cumsum(1) - key_sums
        after = queries_after[:, None] - query_sums.cumsum(1)
        earlier = (q.to(torch.float64) @ before[..., None])[..., 0] + logits.sum(-1, dtype=torch.float64)
        later = (k.to(torch.float64) @ after[..., None])[..., 0] + logits.sum(-2, dtype=torch.float64)
        by_query.append(earlier.flatten(1)[:, :length])
        by_key.append(later.flatten(1)[:, :length])
        # sum y^2: within chunks from the logits, between chunks from the Grams of a chunk's queries and of all earlier keys.
        within = logits.square_().sum((-1, -2), dtype=torch.float64).sum(1)
        products, gram_before = gram_products(q, k, gram_before)
        square += within + products.sum((-1, -2))
        magnitude += within + products.abs_().sum((-1, -2))
        keys_before = keys_before + key_sums.sum(1)
        queries_after = queries_after - query_sums.sum(1)
    return _Lines(torch.cat(by_query, 1), torch.cat(by_key, 1), square, magnitude)


_DIMENSIONS = 16
"""Dimensions transformed together: what bounds memory at any length."""


@dataclass(frozen=True)
class _ByDistance:
    distance: Tensor


def diagonal_sums(
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None = None,
    window: int | None = None,
    memory: int = MEMORY,
) -> Float[Tensor, "... head distance"]:
    """sum_i q_i . k_{i-t} over seen pairs, for t = 0 .. n-1. Float64, in units of q . k."""
    tokens, dimensions = queries.shape[-2:]
    reach, length = _reach_and_length(tokens, window)

    def kernel(some_queries: Tensor, some_keys: Tensor) -> _ByDistance:
        product = torch.zeros(len(some_queries), length // 2 + 1, dtype=torch.complex128, device=queries.device)
        for start in range(0, dimensions, _DIMENSIONS):
            some = slice(start, start + _DIMENSIONS)
            product += _correlate(some_queries[..., some], some_keys[..., some], length).sum(1)
        distance = torch.fft.irfft(product, n=length)[..., :tokens]
        distance[..., reach:] = 0
        return _ByDistance(distance)

    return over_heads(kernel, queries, keys, valid, _bytes_per_head(queries, length), memory).distance


def component_profiles(
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    valid: Bool[Tensor, "... token"] | None = None,
    window: int | None = None,
    memory: int = MEMORY,
) -> Float[Tensor, "... head component distance"]:
    """sum_i C_r(i, i-t) over seen pairs, for every component r and t = 0 .. n-1. Float64, in units of q . k."""
    tokens, half = queries.shape[-2], queries.shape[-1] // 2
    reach, length = _reach_and_length(tokens, window)

    def kernel(some_queries: Tensor, some_keys: Tensor) -> _ByDistance:
        profiles = torch.zeros(len(some_queries), half, tokens, dtype=torch.float64, device=queries.device)
        for start in range(0, half, _DIMENSIONS // 2):
            first, second = (
                slice(begin, min(begin + _DIMENSIONS // 2, end)) for begin, end in ((start, half), (start + half, 2 * half))
            )
            product = _correlate(some_queries[..., first], some_keys[..., first], length)
            product += _correlate(some_queries[..., second], some_keys[..., second], length)
            profiles[:, first, :reach] = torch.fft.irfft(product, n=length)[..., :reach]
        return _ByDistance(profiles)

    return over_heads(kernel, queries, keys, valid, _bytes_per_head(queries, length), memory).distance


def _reach_and_length(tokens: int, window: int | None) -> tuple[int, int]:
    """Distances that have pairs, and a transform length at which they do not wrap around."""
    reach = tokens if window is None else min(window, tokens)
    length = next_fast_len(tokens + reach - 1, real=True)
    assert length is not None
    return reach, length


def _correlate(queries: Tensor, keys: Tensor, length: int) -> Tensor:
    """[item, dimension, frequency], complex128."""
    return _spectra(queries, length).mul_(_spectra(keys, length).conj_physical_())


def _spectra(features: Tensor, length: int) -> Tensor:
    return torch.fft.rfft(features.transpose(-1, -2).to(torch.float64), n=length)


def _bytes_per_head(queries: Tensor, length: int) -> int:
    return 2 * queries.shape[-2] * queries.shape[-1] * queries.element_size() + 5 * _DIMENSIONS * length * 8
