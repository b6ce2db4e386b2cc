"""Which pairs of a query and an earlier key are seen, and how many there are.

    (i, j) is seen  <=>  j <= i,  i - j < window,  valid_i and valid_j

A sum over seen pairs of anything bilinear in q_i and k_j stays the same when the features of invalid tokens are
set to zero: padding on either side, and leaving tokens out (the beginning of the sequence, say), cost nothing. A
sliding window is a difference: the pairs beyond it, i - j >= window, are the causal pairs of the same queries with
the keys delayed by `window` tokens.

Counts by query and key are running sums of the mask, those by distance its autocorrelation.
Knows nothing about features, logits or measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor


@dataclass(frozen=True)
class PairCounts:
    """Numbers of seen pairs, float64."""

    query: Float[Tensor, "... query"]
    key: Float[Tensor, "... key"]
    distance: Float[Tensor, "... distance"]
    total: Float[Tensor, "..."]


def pair_counts(valid: Bool[Tensor, "... token"], window: int | None = None) -> PairCounts:
    """How many seen pairs each query, each key and each distance i - j has, and how many there are. Exact."""
    tokens = valid.shape[-1]
    mask = valid.to(torch.float64)
    earlier = mask.cumsum(-1)
    later = earlier[..., -1:] - earlier + mask
    if window is not None and window < tokens:
        earlier = earlier - delayed(earlier, window, axis=-1)
        later = later - advanced(later, window, axis=-1)
    length = next_fast_len(2 * tokens - 1, real=True)
    spectrum = torch.fft.rfft(mask, n=length)
    distance = torch.fft.irfft(spectrum * spectrum.conj(), n=length)[..., :tokens].round()
    if window is not None:
        distance[..., window:] = 0
    return PairCounts(query=earlier * mask, key=later * mask, distance=distance, total=distance.sum(-1))


def pairs_of_heads(
    valid: Bool[Tensor, "... token"] | None,
    window: int | None,
    features: Float[Tensor, "... head token d_head"],
) -> Float[Tensor, "... head"]:
    """Number of seen pairs of every head of `features`, float64; 0 where a prompt has no valid token."""
    lead, tokens = features.shape[:-2], features.shape[-2]
    if valid is None:
        valid = torch.ones(tokens, dtype=torch.bool, device=features.device)
    return broadcast_valid(pair_counts(valid, window).total[..., None], lead)[..., 0]


def signed_keys(
    keys: Float[Tensor, "... token d_head"], window: int | None
) -> Iterator[tuple[int, int, Float[Tensor, "... token d_head"]]]:
    """(sign, delay, keys delayed by it): their causal pairs, added with the signs, are the pairs in the window."""
    yield 1, 0, keys
    if window is not None and window < keys.shape[-2]:
        yield -1, window, delayed(keys, window, axis=-2)


def delayed(values: Tensor, by: int, axis: int) -> Tensor:
    """`values` moved `by` places towards the end of `axis`; zeros come in."""
    rest = values.shape[axis] - by
    moved = torch.zeros_like(values)
    moved.narrow(axis, by, rest).copy_(values.narrow(axis, 0, rest))
    return moved


def advanced(values: Tensor, by: int, axis: int) -> Tensor:
    """`values` moved `by` places towards the start of `axis`; zeros come in."""
    rest = values.shape[axis] - by
    moved = torch.zeros_like(values)
    moved.narrow(axis, 0, rest).copy_(values.narrow(axis, by, rest))
    return moved


def broadcast_valid(valid: Tensor, lead: torch.Size) -> Tensor:
    """`valid` [..., token] with the leading axes `lead`, as a view; without a head axis it counts for every head."""
    if valid.ndim == len(lead) and valid.ndim > 1:
        valid = valid[..., None, :]
    return valid.expand(*lead, valid.shape[-1])
