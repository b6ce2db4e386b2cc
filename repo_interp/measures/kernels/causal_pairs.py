"""Pairs of a query and an earlier key: which are seen, how many there are, and how sums over them are cut into chunks.

    (i, j) is seen  <=>  j <= i,  i - j < window,  valid_i and valid_j

A sum over seen pairs of anything bilinear in q_i and k_j stays the same when the features of invalid tokens are
set to zero: padding on either side, and leaving tokens out (the beginning of the sequence, say), cost nothing. A
sliding window is a difference: the pairs beyond it, i - j >= window, are the causal pairs of the same queries with
the keys delayed by `window` tokens. Counts by query and key are running sums of the mask, those by distance its
autocorrelation.

Second moments over causal pairs need only Grams for what happens between chunks of tokens,

    sum_{i in c} sum_{j before c} (u_i . k_j)(w_i . k_j) = sum_i u_i^T (sum_{j before c} k_j k_j^T) w_i

so, with Q_c, K_c the features of chunk c, all pairs of different chunks give, for every two dimensions a, b,

    sum_{i, j} q_ia q_ib k_ja k_jb = sum_c (Q_c^T Q_c)_ab (sum_{c' < c} K_c'^T K_c')_ab .

Chunk Grams are made in the features' dtype, their running sums and products in float64.
Knows nothing about logits or measures, nor about what happens within a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures.kernels.heads import broadcast_valid


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


CHUNK = 128
"""Tokens per chunk."""

STRIDE = 8 * CHUNK
"""Tokens whose chunks are treated together: what bounds memory at any length."""


def in_chunks(features: Float[Tensor, "item token d_head"], size: int = CHUNK) -> Float[Tensor, "item chunk token d_head"]:
    """Cut the tokens into chunks of `size`; zeros fill the last one."""
    missing = -features.shape[1] % size
    if missing:
        features = torch.nn.functional.pad(features, (0, 0, 0, missing))
    return features.unflatten(1, (-1, size))


def gram_products(
    queries: Float[Tensor, "item chunk token d_head"],
    keys: Float[Tensor, "item chunk token d_head"],
    gram_before: Float[Tensor, "item row column"],
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> tuple[Float[Tensor, "item row column"], Float[Tensor, "item row column"]]:
    """Sum over chunks of (Q^T Q) o (Gram of the keys of all earlier chunks), and the Gram of the keys so far.

    `gram_before` is that of the keys before the first chunk; of all Grams only `rows` and `columns` are made. Float64.
    """
    key_grams = gram(keys, rows, columns).to(torch.float64)
    key_grams.cumsum_(1)
    query_grams = gram(queries, rows, columns).to(torch.float64)
    products = query_grams.sum(1).mul_(gram_before)
    if queries.shape[1] > 1:
        products += query_grams[:, 1:].mul_(key_grams[:, :-1]).sum(1)
    return products, gram_before + key_grams[:, -1]


def gram(
    features: Float[Tensor, "... token d_head"], rows: slice = slice(None), columns: slice = slice(None)
) -> Float[Tensor, "... row column"]:
    """F^T F, or some rows and columns of it, in the features' dtype."""
    return features[..., rows].transpose(-1, -2) @ features[..., columns]
