"""The rotary components of causal logits: their profiles by distance, their covariance, and the variance that each accounts for.

    C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (rotated; r' = r + d/2),   y = sum_r C_r
    mean_r = E C_r,   covariance_rs = E C_r C_s - mean_r mean_s   over seen pairs
    VAF = 100 (1 - var(y - C) / var(y))                           C a component, or the sum of a band's      (HoPE, eq. 5)
    VAF as printed = 100 (1 - sum(y - C) / sum(y)) = 100 sum(C) / sum(y)
    activated: pi / L < theta < 2 pi / L,   low: theta <= pi / L,   high: theta >= 2 pi / L       L: training length (sec. 3.3.2)

The first VAF is the standard definition; the second is the formula in the paper: unbounded, and ill-conditioned where
sum(y) is near 0. Both over seen pairs, or on curves over distances. Per cent. NaN where the logits do not vary, or sum
to exactly 0.

The covariance needs no map. The triangle of causal pairs is cut into rectangles, in which all queries come after all
keys, and small triangles: chunks of 128 against everything earlier, the later half of a chunk against its earlier half,
quarters, eighths. In a rectangle

    sum_{i, j} q_ia q_ib k_ja k_jb = (Q^T Q)_ab (K^T K)_ab ,   symmetric in a and b

and in the small triangles of 16 tokens the C_r are written out. Cost O(n d^2) per head, with products in the features'
dtype and sums over rectangles in float64; heads whose variance would lose its digits are redone in float64. Heads go
through a few at a time: what is large - n x n, or a profile of every head - never stands whole.

Knows nothing about labels and runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import (
    CHUNK,
    STRIDE,
    gram,
    gram_products,
    in_chunks,
    pair_counts,
    pairs_of_heads,
    signed_keys,
)
from repo_interp.measures.kernels.causal_sums import component_profiles
from repo_interp.measures.kernels.heads import ILL_CONDITIONED, MEMORY, head_blocks, over_heads_in_two_precisions
from repo_interp.positions.rotary import expand_heads


@dataclass(frozen=True)
class LayerComponents:
    """Components of one layer and one batch, float64, logits in units of q . k."""

    pairs: Float[Tensor, "distance"]
    """Seen pairs of all prompts."""
    logits: Float[Tensor, "head distance"]
    """Sum of the logits over prompts and seen pairs, without what the scheme adds to them."""
    components: Float[Tensor, "group component distance"]
    """Sum of each component over prompts, seen pairs and the heads of a group."""
    explained: dict[str, Float[Tensor, "prompt head component"]]
    """VAF in per cent: `vaf`, `vaf_printed`, `vaf_curve`, `vaf_curve_printed`; and `vaf_band` [prompt, head, band]."""


def layer_components(
    inputs: AttentionInputs,
    tokens: Bool[Tensor, "prompt token"],
    bands: Bool[Tensor, "band component"],
    group_of_head: Int[Tensor, "head"],
) -> LayerComponents:
    """Profiles and variance accounted for of every component over the seen pairs of `tokens`.

    `group_of_head` numbers from 0 the groups of heads whose profiles are added up: all zeros for one group.
    """
    half, length = inputs.queries.shape[-1] // 2, tokens.shape[-1]
    new = {"dtype": torch.float64, "device": tokens.device}
    by_distance = pair_counts(tokens, inputs.window).distance
    logits = torch.zeros(inputs.heads, length, **new)
    components = torch.zeros(int(group_of_head.max()) + 1, half, length, **new)
    explained: dict[str, list[Tensor]] = {}
    for block in head_blocks(inputs, tokens):
        profiles = component_profiles(block.queries, block.keys, block.tokens, inputs.window)
        totals = profiles.sum(-1)
        covariance = component_moments(block.queries, block.keys, totals, block.tokens, inputs.window).covariance
        logits.index_add_(0, block.head, profiles.sum(1))
        components.index_add_(0, group_of_head[block.head], profiles)
        pairs = by_distance[block.prompt]
        shares = {"vaf_printed": variance_accounted_as_printed(totals)}
        curves = profiles.div_(pairs.clamp(min=1)[:, None])
        shares |= {
            "vaf": variance_accounted(covariance),
            "vaf_curve": variance_accounted(curve_covariance(curves, pairs > 0)),
            "vaf_curve_printed": variance_accounted_as_printed(curves.sum(-1)),
            "vaf_band": band_variance_accounted(covariance, bands),
        }
        for name, values in shares.items():
            explained.setdefault(name, []).append(values)
    shape = (tokens.shape[0], inputs.heads)
    return LayerComponents(
        pairs=by_distance.sum(0),
        logits=logits,
        components=components,
        explained={name: torch.cat(values).unflatten(0, shape) for name, values in explained.items()},
    )


def pair_components(inputs: AttentionInputs, query: int, key: int) -> Float[Tensor, "prompt head component"]:
    """The components of one pair of tokens, in units of q . k. Float64; whether the pair is seen is not asked."""
    at_query = inputs.rotated_queries[:, :, query].double()
    at_key = expand_heads(inputs.rotated_keys, inputs.heads)[:, :, key].double()
    return (at_query * at_key).unflatten(-1, (2, -1)).sum(-2)


BANDS = ("activated", "low", "high")


def frequency_bands(frequencies: Float[Tensor, "component"], training_length: int) -> Bool[Tensor, "band component"]:
    """Whether each component is in each of `BANDS`, for a training length in tokens. NaN is in no band."""
    lowest, highest = math.pi / training_length, 2 * math.pi / training_length
    activated = (frequencies > lowest) & (frequencies < highest)
    return torch.stack((activated, frequencies <= lowest, frequencies >= highest))


def variance_accounted(covariance: Float[Tensor, "... component component"]) -> Float[Tensor, "... component"]:
    """VAF of each component alone, in per cent."""
    logits = covariance.sum((-1, -2))
    with_logits, own = covariance.sum(-1), covariance.diagonal(dim1=-2, dim2=-1)
    return _share(2 * with_logits - own, logits[..., None])


def band_variance_accounted(
    covariance: Float[Tensor, "... component component"], bands: Bool[Tensor, "... band component"]
) -> Float[Tensor, "... band"]:
    """VAF of each band's components taken together, in per cent: 0 for an empty band, 100 for all components."""
    outside = (~bands).to(covariance.dtype)
    left = torch.einsum("...br,...rs,...bs->...b", outside, covariance, outside)
    logits = covariance.sum((-1, -2))[..., None]
    return _share(logits - left, logits)


def variance_accounted_as_printed(sums: Float[Tensor, "... component"]) -> Float[Tensor, "... component"]:
    """The printed formula, from sums or means of each component over the same pairs or distances. Per cent."""
    return _share(sums, sums.sum(-1, keepdim=True))


def curve_covariance(
    curves: Float[Tensor, "... component distance"], distances: Bool[Tensor, "... distance"]
) -> Float[Tensor, "... component component"]:
    """Covariance of the components' curves over the `distances` chosen, each counted once."""
    chosen = curves.masked_fill(~distances[..., None, :], 0)
    count = distances.sum(-1)[..., None, None]
    mean = chosen.sum(-1, keepdim=True) / count
    return chosen @ chosen.transpose(-1, -2) / count - mean @ mean.transpose(-1, -2)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, torch.nan, 100 * part / whole)


_LEAF = 16
"""Tokens of the smallest triangles."""


@dataclass(frozen=True)
class ComponentMoments:
    """Moments of the components over the seen pairs of each head, float64, in units of q . k and its square.

    NaN where a head sees no pair.
    """

    pairs: Float[Tensor, "... head"]
    mean: Float[Tensor, "... head component"]
    covariance: Float[Tensor, "... head component component"]


@dataclass(frozen=True)
class _SecondMoments:
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


def _windowed(queries: Tensor, keys: Tensor, window: int | None) -> _SecondMoments:
    """Causal pairs less those beyond the window."""
    parts = [(sign, _causal(queries, delayed_keys)) for sign, _, delayed_keys in signed_keys(keys, window)]
    return _SecondMoments(
        second=torch.stack([sign * part.second for sign, part in parts]).sum(0),
        magnitude=torch.stack([part.magnitude for _, part in parts]).sum(0),
    )


def _causal(queries: Tensor, keys: Tensor) -> _SecondMoments:
    """Sums over all causal pairs, some chunks at a time."""
    half = queries.shape[-1] // 2
    # Of a rectangle's products only three quarters are made - first halves with both, second halves with second - since the fourth
    # is the transpose of one of them.
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
    return _SecondMoments(within + products, magnitude)


def _halves(queries: Tensor, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The later half of every chunk's queries and the earlier half of its keys, then so for its halves, quarters, ..."""
    size = queries.shape[2] // 2
    while size >= _LEAF:
        later = queries.unflatten(2, (-1, 2, size))[:, :, :, 1].flatten(1, 2)
        earlier = keys.unflatten(2, (-1, 2, size))[:, :, :, 0].flatten(1, 2)
        yield later, earlier
        size //= 2


def _leaves(queries: Tensor, keys: Tensor) -> Tensor:
    """Sum of C_r C_s over the causal pairs within blocks of _LEAF tokens, with the components written out, one distance at a time."""
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
