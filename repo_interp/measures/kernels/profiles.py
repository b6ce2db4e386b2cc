"""Sums of causal logits, and of their rotary components, along diagonals, without making a map.

    distance_t = sum_i q_i . k_{i-t}   over seen pairs (see causal_pairs)

Diagonals are a cross-correlation: with Q_a, K_a the Fourier transforms of dimension a, zero-padded,

    sum_i q_ia k_{i-t, a} = irfft(Q_a conj(K_a))_t

Rotary component r is the pair of dimensions (r, r + d/2), so its profile by distance (HoPE, fig. 2,
3) is the sum of two of these; the logits' is the sum of all, taken before the inverse transform.
Always in float64: the error of a Fourier transform is absolute, and the longest distances have few
pairs (float32 would leave 2e-4 there). Cost O(n d log n) per head; a few dimensions at a time, so
that transforms stay in the processor's caches.

Features are rotated already, and 0 where a token takes no part. This module knows nothing of models
or measures.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from repo_interp.measures.kernels.seen_pairs import fast_length
from repo_interp.runtime.memory import CORE, memory_for


def component_profiles(
    queries: Float[Tensor, "key member token d_head"],
    keys: Float[Tensor, "key 1 token d_head"],
    window: int | None = None,
) -> Float[Tensor, "key member component distance"]:
    """Return sum_i C_r(i, i - t) over seen pairs, by component r and distance t.

    Args:
        queries: Rotated queries [key, member, token, d_head], 0 where a token does not take part.
        keys: Rotated keys [key, 1, token, d_head], likewise.
        window: Tokens that a query looks back over, itself included; None for all.

    Returns:
        Sums [key, member, component, distance] for t = 0 .. n - 1, float64, in units of q . k.
    """
    tokens, half = queries.shape[-2], queries.shape[-1] // 2
    reach = tokens if window is None else min(window, tokens)
    # A length at which distances do not wrap around.
    # Negative lags wrap to the end, and stay clear of 0 .. reach - 1
    length = fast_length(tokens + reach - 1)
    memory = memory_for(queries.device, CORE)
    at_once = max(1, memory // (queries.shape[:2].numel() * 2 * length * 8))
    parts = []
    for start in range(0, half, at_once):
        of_queries, of_keys = (
            torch.fft.rfft(
                features.unflatten(-1, (2, half))[..., start : start + at_once]
                .to(torch.float64)
                # [key, member, 2, component, token]: transformed along tokens
                .movedim(-3, -1),
                n=length,
            )
            for features in (queries, keys)
        )
        # Halves are added before the inverse transform: one per component instead of two
        spectrum = of_queries.mul_(of_keys.conj_physical_()).sum(-3)
        parts.append(torch.fft.irfft(spectrum, n=length)[..., :reach])
    profiles = torch.cat(parts, -2) if parts[1:] else parts[0]
    return profiles if reach == tokens else torch.nn.functional.pad(profiles, (0, tokens - reach))
