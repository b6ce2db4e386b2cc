"""Mean and covariance of the rotary components of causal logits over seen pairs, without making any map.

    C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (rotated; r' = r + d/2),   y = sum_r C_r
    mean_r = E C_r,   covariance_rs = E C_r C_s - mean_r mean_s   over seen pairs

From these follows the variance of any set of components taken together, and what it leaves of the logits' variance.

The triangle of causal pairs is cut into rectangles, in which all queries come after all keys, and small triangles:
chunks of 128 against everything earlier, the later half of a chunk against its earlier half, quarters, eighths. In a
rectangle sum_{i, j} q_ia q_ib k_ja k_jb = (Q^T Q)_ab (K^T K)_ab; in the small triangles of 16 tokens the C_r are written
out. Cost O(n d^2) a head, with products in the features' dtype and sums over rectangles in float64; heads
whose variance would lose its digits are redone in float64.

Features are rotated already: index and learned positions look the same here. Knows nothing of models or measures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.causal_pairs import pairs_of_heads, signed_keys
from repo_interp.measures.chunks import CHUNK, STRIDE, gram_products, in_chunks
from repo_interp.measures.over_heads import ILL_CONDITIONED, MEMORY, over_heads_in_two_precisions

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
        lambda sums: (
            sums.magnitude > ILL_CONDITIONED * (sums.second.sum((-1, -2)) - logits_of_mean).clamp(min=0)
        ),
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
    items, _, dimensions = queries.shape
    new = {"dtype": torch.float64, "device": queries.device}
    gram_before = torch.zeros(items, dimensions, dimensions, **new)
    products = torch.zeros_like(gram_before)
    within = torch.zeros(items, dimensions // 2, dimensions // 2, **new)
    for some_queries, some_keys in zip(queries.split(STRIDE, 1), keys.split(STRIDE, 1), strict=True):
        q, k = in_chunks(some_queries), in_chunks(some_keys)
        more, gram_before = gram_products(q, k, gram_before)
        products += more
        size = CHUNK // 2
        while size >= _LEAF:
            later = q.unflatten(2, (-1, 2, size))[:, :, :, 1].flatten(1, 2)
            earlier = k.unflatten(2, (-1, 2, size))[:, :, :, 0].flatten(1, 2)
            gram = (later.transpose(-1, -2) @ later).mul_(earlier.transpose(-1, -2) @ earlier)
            products += gram.sum(1, dtype=torch.float64)
            size //= 2
        within += _leaves(q.flatten(1, 2), k.flatten(1, 2))
    magnitude = products.abs().sum((-1, -2)) + within.abs().sum((-1, -2))
    return _Sums(within + _fold(_fold(products).transpose(-1, -2)), magnitude)


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


def _fold(by_dimension: Tensor) -> Tensor:
    """Add the two dimensions of each component along the last axis."""
    half = by_dimension.shape[-1] // 2
    return by_dimension[..., :half] + by_dimension[..., half:]
