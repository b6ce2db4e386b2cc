"""Mean and covariance of the rotary components of causal logits over seen pairs, without making any map.

    C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (rotated; r' = r + d/2),   y = sum_r C_r
    mean_r = E C_r,   covariance_rs = E C_r C_s - mean_r mean_s   over seen pairs

From these follows the variance of any set of components taken together, and what it leaves of the logits' variance.

The triangle of causal pairs is cut into rectangles, in which all queries come after all keys, and small triangles: chunks of 128
against everything earlier, the later half of a chunk against its earlier half, quarters, eighths. In a rectangle

    sum_{i, j} q_ia q_ib k_ja k_jb = (Q^T Q)_ab (K^T K)_ab ,   symmetric in a and b

and in the small triangles of 16 tokens the C_r are written out. Cost O(n d^2) a head, with products in the features' dtype and sums over
rectangles in float64; heads whose variance would lose its digits are redone in float64.

Features are rotated already: index and learned positions look the same here. Knows nothing of models or measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.kernels.causal_pairs import pairs_of_heads, signed_keys
from repo_interp.measures.kernels.chunks import CHUNK, STRIDE, gram, gram_products, in_chunks
from repo_interp.measures.kernels.over_heads import ILL_CONDITIONED, MEMORY, over_heads_in_two_precisions

_LEAF = 16


@dataclass(frozen=True)
class ComponentMoments:
    """Moments of the components over the seen pairs of each head, float64, in units of q . k and its square.

    NaN where a head sees no pair.
    """

    pairs: Float[Tensor, "... head"]
    mean: Float[Tensor, "... head component"]
    covariance: Float[Tensor, "... head component component"]


@dataclass(frozen=True)
class _Sums:
    second: Tensor
    """[item, component, component]: sum of C_r C_s over pairs."""
    magnitude: Tensor
    """[item]: sum of the absolute values of the terms that make up the logits' sum of squares."""


def component_moments(
    queries: Float[Tensor, "... head token d_head"],
    keys: Float[Tensor, "... kv_head token d_head"],
    totals: Float[Tensor, "... head component"],
    valid: Bool[Tensor, "... token"] | None = None,
    window: int | None = None,
    memory: int = MEMORY,
) -> ComponentMoments:
    """Mean and covariance of every component over seen pairs, all heads at once.

    `totals` are the sums of each component over seen pairs, float64: profiles by distance, summed (see diagonals).
    `valid` is [prompt, token], or broadcasts over the leading axes of `queries`; `memory` in bytes bounds what is
    made beside inputs and outputs. Raises ValueError where the shapes do not pair.
    """
    tokens, dimensions = queries.shape[-2:]
    pairs = pairs_of_heads(valid, window, queries)
    logits_of_mean = totals.sum(-1) ** 2 / pairs.clamp(min=1)
    together = min(STRIDE, tokens)
    floats = 2 * (tokens + together) * dimensions + (6 + 3 * together // CHUNK) * dimensions**2
    sums = over_heads_in_two_precisions(
        lambda some_queries, some_keys: _windowed(some_queries, some_keys, window),
        lambda sums: sums.magnitude > ILL_CONDITIONED * (sums.second.sum((-1, -2)) - logits_of_mean).clamp(min=0),
        queries,
        keys,
        valid,
        bytes_per_head=6 * floats,
        memory=memory,
    )
    mean = totals / pairs[..., None]
    covariance = sums.second.div_(pairs[..., None, None])
    covariance -= mean[..., :, None] * mean[..., None, :]
    return ComponentMoments(pairs, mean, covariance)


def _windowed(queries: Tensor, keys: Tensor, window: int | None) -> _Sums:
    """Causal pairs less those beyond the window."""
    parts = [(sign, _causal(queries, delayed_keys)) for sign, _, delayed_keys in signed_keys(keys, window)]
    return _Sums(
        second=torch.stack([sign * part.second for sign, part in parts]).sum(0),
        magnitude=torch.stack([part.magnitude for _, part in parts]).sum(0),
    )


def _causal(queries: Tensor, keys: Tensor) -> _Sums:
    """Sums over all causal pairs, some chunks at a time."""
    half = queries.shape[-1] // 2
    first, second, both = slice(0, half), slice(half, 2 * half), slice(0, 2 * half)
    within = queries.new_zeros(len(queries), half, half, dtype=torch.float64)
    before_first, before_second = torch.cat((within, within), -1), torch.zeros_like(within)
    with_first, with_second = torch.zeros_like(before_first), torch.zeros_like(within)
    for some_queries, some_keys in zip(queries.split(STRIDE, 1), keys.split(STRIDE, 1), strict=True):
        q, k = in_chunks(some_queries), in_chunks(some_keys)
        more, before_first = gram_products(q, k, before_first, first, both)
        with_first += more
        more, before_second = gram_products(q, k, before_second, second, second)
        with_second += more
        for later, earlier in _halves(q, k):
            with_first += gram(later, first, both).mul_(gram(earlier, first, both)).sum(1, dtype=torch.float64)
            with_second += gram(later, second, second).mul_(gram(earlier, second, second)).sum(1, dtype=torch.float64)
        within += _leaves(q.flatten(1, 2), k.flatten(1, 2))
    across = with_first[..., second]
    products = with_first[..., first] + with_second + across + across.transpose(-1, -2)
    magnitude = torch.stack([part.abs().sum((-1, -2)) for part in (within, with_first, with_second, across)]).sum(0)
    return _Sums(within + products, magnitude)


def _halves(queries: Tensor, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The later half of every chunk's queries and the earlier half of its keys, then so for its halves, quarters, ..."""
    size = queries.shape[2] // 2
    while size >= _LEAF:
        later = queries.unflatten(2, (-1, 2, size))[:, :, :, 1].flatten(1, 2)
        earlier = keys.unflatten(2, (-1, 2, size))[:, :, :, 0].flatten(1, 2)
        yield later, earlier
        size //= 2


def _leaves(queries: Tensor, keys: Tensor) -> Tensor:
    """Sum of C_r C_s over the causal pairs within blocks of _LEAF tokens, with the components written out."""
    q, k = in_chunks(queries, _LEAF), in_chunks(keys, _LEAF)
    half, sums = q.shape[-1] // 2, None
    for distance in range(_LEAF):
        later, earlier = q[:, :, distance:], k[:, :, : _LEAF - distance]
        components = later[..., :half] * earlier[..., :half]
        components = components.addcmul_(later[..., half:], earlier[..., half:]).flatten(1, 2)
        more = (components.transpose(-1, -2) @ components).to(torch.float64)
        sums = more if sums is None else sums + more
    assert sums is not None
    return sums
