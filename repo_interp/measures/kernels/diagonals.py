"""Sums along the diagonals of causal logits and of their rotary components: profiles by distance (HoPE, fig. 2, 3).

    sum_i q_ia k_{i-t, a} = irfft(Q_a conj(K_a))_t ,   Q_a, K_a the Fourier transforms of dimension a, zero-padded

Component r is the pair of dimensions (r, r + d/2), so its profile is the sum of two of these; the logits' is the sum of
all, taken before the inverse transform. Cost O(d n log n). Always in float64: the error of a Fourier transform is
absolute, and the longest distances have few pairs (float32 would leave 2e-4 there).

Features are rotated already: index and learned positions look the same here. Knows nothing of models or measures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures.kernels.over_heads import MEMORY, over_heads

_DIMENSIONS = 16
"""Dimensions transformed together: what bounds memory at any length."""


@dataclass(frozen=True)
class _Sums:
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

    def kernel(some_queries: Tensor, some_keys: Tensor) -> _Sums:
        product = torch.zeros(len(some_queries), length // 2 + 1, dtype=torch.complex128, device=queries.device)
        for start in range(0, dimensions, _DIMENSIONS):
            some = slice(start, start + _DIMENSIONS)
            product += _correlate(some_queries[..., some], some_keys[..., some], length).sum(1)
        distance = torch.fft.irfft(product, n=length)[..., :tokens]
        distance[..., reach:] = 0
        return _Sums(distance)

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

    def kernel(some_queries: Tensor, some_keys: Tensor) -> _Sums:
        profiles = torch.zeros(len(some_queries), half, tokens, dtype=torch.float64, device=queries.device)
        for start in range(0, half, _DIMENSIONS // 2):
            first, second = (
                slice(begin, min(begin + _DIMENSIONS // 2, end)) for begin, end in ((start, half), (start + half, 2 * half))
            )
            product = _correlate(some_queries[..., first], some_keys[..., first], length)
            product += _correlate(some_queries[..., second], some_keys[..., second], length)
            profiles[:, first, :reach] = torch.fft.irfft(product, n=length)[..., :reach]
        return _Sums(profiles)

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
