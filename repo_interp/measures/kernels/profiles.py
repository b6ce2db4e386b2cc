"""Sums of causal logits, and of their rotary components, along diagonals, without making a map.

    distance_t = sum_i q_i . k_{i-t}   over seen pairs (see causal_pairs)

Diagonals are a cross-correlation: with Q_a, K_a the Fourier transforms of dimension a, zero-padded,

    sum_i q_ia k_{i-t, a} = irfft(Q_a conj(K_a))_t

Rotary component r is the pair of dimensions (r, r + d/2), so its profile by distance (HoPE, fig. 2,
3) is the sum of two of these; the logits' is the sum of all, taken before the inverse transform.
Always in float64: the error of a Fourier transform is absolute, and the longest distances have few
pairs (float32 would leave 2e-4 there). Cost O(n d log n) per head; a few dimensions at a time, so
that what is transformed stays in the processor's caches.

Features are rotated already, and 0 where a token takes no part. Knows nothing of models or
measures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from repo_interp.measures.kernels.seen_pairs import fast_length
from repo_interp.memory import CORE, memory_for


def component_profiles(
    queries: Float[Tensor, "key member token d_head"],
    keys: Float[Tensor, "key 1 token d_head"],
    window: int | None = None,
) -> Float[Tensor, "key member component distance"]:
    """sum_i C_r(i, i-t) over seen pairs, for every component r and t = 0 .. n-1.

    Float64, in units of q . k.
    """
    tokens, half = queries.shape[-2], queries.shape[-1] // 2
    reach, length = _reach_and_length(tokens, window)
    parts = (
        torch.fft.irfft(spectrum, n=length)[..., :reach]
        for spectrum in _spectra(queries, keys, length)
    )
    first = next(parts)
    if first.shape[-2:] == (half, tokens):
        return first
    profiles, done = (
        torch.zeros(*queries.shape[:2], half, tokens, dtype=torch.float64, device=queries.device),
        0,
    )
    for part in itertools.chain([first], parts):
        profiles[..., done : done + part.shape[-2], :reach] = part
        done += part.shape[-2]
    return profiles


def logit_profile(
    queries: Float[Tensor, "key member token d_head"],
    keys: Float[Tensor, "key 1 token d_head"],
    window: int | None = None,
) -> Float[Tensor, "key member distance"]:
    """sum_i q_i . k_{i-t} over seen pairs, for t = 0 .. n-1. Float64, in units of q . k."""
    tokens = queries.shape[-2]
    reach, length = _reach_and_length(tokens, window)
    total = torch.zeros(
        *queries.shape[:2], length // 2 + 1, dtype=torch.complex128, device=queries.device
    )
    for spectrum in _spectra(queries, keys, length):
        total += spectrum.sum(-2)
    profile = torch.fft.irfft(total, n=length)[..., :tokens]
    profile[..., reach:] = 0
    return profile


def _reach_and_length(tokens: int, window: int | None) -> tuple[int, int]:
    """Distances that have pairs, and a transform length at which they do not wrap around."""
    reach = tokens if window is None else min(window, tokens)
    return reach, fast_length(tokens + reach - 1)


def _spectra(queries: Tensor, keys: Tensor, length: int) -> Iterator[Tensor]:
    """Transforms of the profiles of some components at a time [key, member, component, frequency],
    complex128.
    """
    tokens, half = queries.shape[-2], queries.shape[-1] // 2
    at_once = max(
        1, memory_for(queries.device, CORE) // (queries.shape[:2].numel() * 2 * length * 8)
    )
    if at_once >= half:
        of_queries, of_keys = (
            torch.fft.rfft(features.to(torch.float64).mT, n=length) for features in (queries, keys)
        )
        yield of_queries.mul_(of_keys.conj_physical_()).unflatten(-2, (2, half)).sum(-3)
        return
    query_room, key_room = (
        torch.zeros(
            *features.shape[:2],
            2,
            min(at_once, half),
            length,
            dtype=torch.float64,
            device=queries.device,
        )
        for features in (queries, keys)
    )
    for start in range(0, half, at_once):
        components = slice(start, min(start + at_once, half))
        count = components.stop - components.start
        transformed = []
        for features, room in ((queries, query_room), (keys, key_room)):
            room = room[..., :count, :]
            room[..., :tokens].copy_(
                features.unflatten(-1, (2, half))[..., components].movedim(2, -1)
            )
            transformed.append(torch.fft.rfft(room))
        of_queries, of_keys = transformed
        products = of_queries.mul_(of_keys.conj_physical_())
        yield products[:, :, 0].add_(products[:, :, 1])
