"""Maps of logits as exact means over blocks of rows and keys.

A map has at most a few hundred blocks per side for prompts of any length.

    logit map   M_AB = mean of W_ij over the seen pairs i in A, j in B
            A, B: `size` tokens each, or a few less at the end
    fake map    F_AB = mean of W'_dj over distances d in A, keys j in B
            (Position Generalization sec. 3.2)

If logits are dot products, the sum of a block is (sum_{i in A} q_i) . (sum_{j in B} k_j); blocks on
the diagonal are triangles and use running sums. The largest arrays are n x size and blocks x
blocks, never n x n. Other logits (with a window, a soft cap or a position bias) are computed a few
rows at a time, in O(n^2 d) time. The mean of W' over a block is the logit of the mean key at the
mean phase: Re sum_r q_r conj(mean k_r) mean exp(i theta_r d).

This module knows nothing about the choice of heads.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import in_chunks
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.plugins.fake_distance.fake_logits import in_pairs


def block_size(tokens: int, side: int) -> int:
    """Return the tokens per block so that at most `side` blocks hold `tokens`.

    Args:
        tokens: Tokens to hold.
        side: Most blocks.

    Returns:
        Tokens per block, at least 1.
    """
    return max(1, math.ceil(tokens / side))


def logit_block_means(
    inputs: AttentionInputs, size: int
) -> Float[Tensor, "prompt head query_block key_block"]:
    """Return means of the logits over blocks of queries and keys.

    Args:
        inputs: A layer and a batch.
        size: Tokens per block.

    Returns:
        Means [prompt, head, query_block, key_block], float64; NaN where a block has no seen pair.
    """
    valid = inputs.valid.to(torch.float64)
    # A window cuts through blocks below the diagonal, so their sums are not products of sums
    if inputs.is_bilinear and inputs.window is None:
        sums = _bilinear_sums(inputs, size)
        counts = _causal_sums(valid[:, None, :, None], valid[:, None, :, None], size)
    else:
        sums, counts = _sums_by_rows(inputs, size)
    return torch.where(counts > 0, sums / counts.clamp(min=1), torch.nan)


def fake_block_means(
    query: Float[Tensor, "head d_head"],
    keys: Float[Tensor, "kv_head token d_head"],
    frequencies: Float[Tensor, "component"],
    bias: Float[Tensor, "head distance"],
    size: int,
) -> Float[Tensor, "head distance_block key_block"]:
    """Return means of the fake-distance logits of one query per head over blocks.

    Args:
        query: Un-rotated [head, d_head], with the logit's scale.
        keys: Un-rotated [kv_head, token, d_head], all of them valid.
        frequencies: Radians per position [component], or [head, 1, component].
        bias: Position logits [head, distance] at the distances 0 .. n-1.
        size: Distances, or keys, per block.

    Returns:
        Means [head, distance_block, key_block], float64.
    """
    counts = _block_sums(
        torch.ones(1, keys.shape[1], 1, dtype=torch.float64, device=keys.device), size
    )[0, :, 0]
    mean_keys = in_pairs(_block_sums(keys.to(torch.float64), size) / counts[:, None])
    mean_keys = mean_keys.repeat_interleave(len(query) // len(keys), 0)
    # A block of distances at a time: exp(i theta d) for all of them would be n x d_head.
    phases = torch.stack(
        [
            torch.polar(torch.ones_like(angles), angles).mean(-2)
            for some in torch.arange(keys.shape[1], device=keys.device).split(size)
            for angles in [some[:, None] * frequencies.to(torch.float64)]
        ],
        dim=-2,
    )
    means = (in_pairs(query)[:, None] * phases) @ mean_keys.conj().mT
    return means.real + (_block_sums(bias.to(torch.float64)[..., None], size) / counts[:, None])


def _bilinear_sums(
    inputs: AttentionInputs, size: int
) -> Float[Tensor, "prompt head query_block key_block"]:
    hidden = ~inputs.valid[:, None, :, None]
    # Features of padding are 0, so its pairs add nothing
    keys = inputs.rotated_keys.masked_fill(hidden, 0)
    group = inputs.heads // keys.shape[1]
    sums = [
        _causal_sums(
            inputs.rotated_queries[:, head, None].masked_fill(hidden, 0).to(torch.float64),
            keys[:, head // group, None].to(torch.float64),
            size,
        )
        # One head at a time: float64 copies of all heads would be the largest arrays here
        for head in range(inputs.heads)
    ]
    return torch.cat(sums, 1) * inputs.logit_scale


def _causal_sums(
    queries: Float[Tensor, "prompt any token feature"],
    keys: Float[Tensor, "prompt any token feature"],
    size: int,
) -> Float[Tensor, "prompt any query_block key_block"]:
    """Sum q_i . k_j over the pairs j <= i of every block."""
    # Blocks below the diagonal are whole, so their sums are products of sums.
    below = (_block_sums(queries, size) @ _block_sums(keys, size).mT).tril(-1)
    # Within a block: sum_i q_i . (sum of its keys up to i), so a running sum replaces the triangle.
    of_blocks = in_chunks(keys, size).cumsum(-2)
    within = (in_chunks(queries, size) * of_blocks).sum((-1, -2))
    return below + torch.diag_embed(within)


def _sums_by_rows(
    inputs: AttentionInputs, size: int
) -> tuple[
    Float[Tensor, "prompt head query_block key_block"],
    Float[Tensor, "prompt 1 query_block key_block"],
]:
    prompts, heads, tokens, _ = inputs.queries.shape
    blocks = math.ceil(tokens / size)
    new = {"dtype": torch.float64, "device": inputs.queries.device}
    sums, counts = (
        torch.zeros(prompts, heads, blocks, blocks, **new),
        torch.zeros(prompts, 1, blocks, blocks, **new),
    )
    for rows, logits in row_blocks(inputs):
        seen = inputs.visible(rows)[:, None]
        for into, values in ((sums, torch.where(seen, logits, 0)), (counts, seen)):
            # Keys are summed into blocks on the transpose, then rows by the number of their block
            into.index_add_(2, rows // size, _block_sums(values.to(torch.float64).mT, size).mT)
    return sums, counts


def _block_sums(
    features: Float[Tensor, "*axes token feature"], size: int
) -> Float[Tensor, "*axes block feature"]:
    return in_chunks(features, size).sum(-2)
