"""Second moments over causal pairs by chunks of tokens: what happens between chunks needs Grams only.

    sum_{i in c} sum_{j before c} (u_i . k_j)(w_i . k_j) = sum_i u_i^T (sum_{j before c} k_j k_j^T) w_i

so, with Q_c, K_c the features of chunk c, all pairs of different chunks give, for every two dimensions a, b,

    sum_{i, j} q_ia q_ib k_ja k_jb = sum_c (Q_c^T Q_c)_ab (sum_{c' < c} K_c'^T K_c')_ab .

Chunk Grams are made in the features' dtype, their running sums and products in float64.
Knows nothing about what happens within a chunk.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 128
"""Tokens a chunk."""

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
