"""Which pairs of a query and an earlier key are seen, and how many there are.

    (i, j) is seen  <=>  j <= i,  i - j < window,  i and j take part

A sliding window is a difference: the pairs beyond it, i - j >= window, are the causal pairs of the same queries with the keys delayed by
`window` tokens. Counts by query and key are running sums of the mask, those by distance its autocorrelation. Knows nothing about features.
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


def pair_counts(
    keys: Bool[Tensor, "... token"], window: int | None = None, queries: Bool[Tensor, "... token"] | None = None
) -> PairCounts:
    """How many seen pairs each query, each key and each distance i - j has, and how many there are. Exact.

    The masks say which tokens take part; `queries` None: those of the keys.
    """
    tokens, key = keys.shape[-1], keys.to(torch.float64)
    query = key if queries is None else queries.to(torch.float64)
    earlier = key.cumsum(-1)
    later = query.flip(-1).cumsum(-1).flip(-1)
    if window is not None and window < tokens:
        earlier = earlier - delayed(earlier, window, axis=-1)
        later = later - advanced(later, window, axis=-1)
    length = fast_length(2 * tokens - 1)
    spectrum = torch.fft.rfft(query, n=length) * torch.fft.rfft(key, n=length).conj()
    distance = torch.fft.irfft(spectrum, n=length)[..., :tokens].round()
    if window is not None:
        distance[..., window:] = 0
    return PairCounts(query=earlier * query, key=later * key, distance=distance, total=distance.sum(-1))


def fast_length(least: int) -> int:
    """A length of Fourier transforms of at least `least` entries that are fast."""
    length = next_fast_len(least, real=True)
    assert length is not None
    return length


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
