"""Logits from a few rotary components, position and semantics apart (Position Generalization theorem 2, app. C).

    f(q_i, z_i - z_j) = sum_r Re q_ir conj(mean k_r) exp(i theta_r (z_i - z_j))        the mean key, rotated
    g(q_i, k_j)       = sum_r Re q_ir conj(k_jr - mean k_r)                            the rest, as if nothing rotated

over the chosen components r, un-rotated q, k in complex pairs. f is the paper's f_r; the signs of its eq. 17 cancel
those of the proof and are dropped. Its g_r is ||k - mean k|| ||q|| times the cosine of the query's angle to the mean
key: the bound of an inequality in the proof, which forgets which way a key deviates. `semantic="signed"` is the g
above, exact at distance 0; "printed" is the paper's.

f + g is a dot product of 4 features per component, so its correlation with the logits over all seen pairs needs no map:
the moments of both together come from chunks and Grams (see causal_pairs), with keys centred first. O(n (d + 4 chosen)^2)
per head. Knows nothing about how components are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.axis_fit import pearson
from repo_interp.measures.kernels.causal_pairs import CHUNK, STRIDE, gram_products, in_chunks, pair_counts, signed_keys
from repo_interp.measures.kernels.heads import ILL_CONDITIONED, MEMORY, over_heads_in_two_precisions
from repo_interp.measures.kernels.logit_sums import is_bilinear, row_blocks
from repo_interp.positions.rotary import rotate

Semantic = Literal["signed", "printed"]


@dataclass(frozen=True)
class _Moments:
    """Moments of two maps, each a dot product, over the seen pairs of an item: the logits, and f + g."""

    row_sums: Float[Tensor, "item map query"]
    square: Float[Tensor, "item map"]
    product: Float[Tensor, "item"]
    magnitude: Float[Tensor, "item map"]
    """Sum of the absolute values of the terms of `square`."""


def closed_form_correlation(
    inputs: AttentionInputs,
    chosen: Bool[Tensor, "prompt head component"],
    key_mean: Complex[Tensor, "prompt head component"],
    semantic: str,
) -> Float[Tensor, "prompt head"]:
    """Pearson correlation of the logits and f + g over the seen pairs; NaN where nothing is chosen or varies.

    `key_mean` is that of the un-rotated keys of each prompt. Raises ValueError for a layer that does not rotate.
    """
    if inputs.frequencies is None or inputs.head_positions is None:
        raise ValueError(f"layer {inputs.layer} ({inputs.scheme}) rotates nothing: it has no components")
    correlation = torch.full(chosen.shape[:2], torch.nan, dtype=torch.float64, device=chosen.device)
    items = chosen.any(-1).flatten().nonzero()[:, 0]
    if not len(items):
        return correlation
    tokens, width = inputs.queries.shape[-2:]
    bytes_per_item = tokens * 8 * (2 * width + 12 * int(chosen.sum(-1).max()))
    for block in items.split(max(1, MEMORY // bytes_per_item)):
        prompt, head = block // inputs.heads, block % inputs.heads
        left, right = _features(inputs, chosen, key_mean, semantic, prompt, head)
        if is_bilinear(inputs):
            correlation[prompt, head] = _bilinear_correlation(inputs, left, right, prompt, head)
        else:
            correlation[prompt, head] = _written_out_correlation(inputs, left, right, prompt, head)
    return correlation


def _features(
    inputs: AttentionInputs, chosen: Tensor, key_mean: Tensor, semantic: str, prompt: Tensor, head: Tensor
) -> tuple[Float[Tensor, "item token feature"], Float[Tensor, "item token feature"]]:
    """Features u_i, v_j with u_i . v_j = f + g, for some heads; components that are not chosen for a head give 0."""
    assert inputs.frequencies is not None and inputs.positions is not None
    some = chosen[prompt, head]
    most = int(some.sum(-1).max())
    # The chosen components of each head stand first, in their order; heads with fewer are filled up, with weight 0.
    component = some.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    exact = torch.float64 if inputs.queries.dtype == torch.float64 else torch.float32
    weight = some.gather(-1, component).to(exact)[:, None].repeat(1, 1, 2)
    index = torch.cat([component, component + chosen.shape[-1]], -1)[:, None]
    queries = inputs.queries[prompt, head]
    queries = queries.gather(-1, index.expand(-1, queries.shape[1], -1)).to(exact)
    keys = inputs.keys[prompt, head // (inputs.heads // inputs.kv_heads)]
    keys = keys.gather(-1, index.expand(-1, keys.shape[1], -1)).to(exact)
    mean = key_mean[prompt, head].gather(-1, component)
    mean = torch.cat([mean.real, mean.imag], -1)[:, None].to(exact)
    deviation = keys - mean
    if semantic == "printed":
        sizes = _pair_norm(deviation) / _pair_norm(mean).clamp(min=torch.finfo(exact).tiny)
        deviation = mean * sizes
    positions = inputs.positions[prompt, head // (inputs.heads // inputs.positions.shape[1])]
    frequencies = inputs.frequencies.to(component.device)[component][:, None]
    # f: query and mean key rotated, 2 features per component; g: query and deviation as they are, 2 more.
    rotated_queries, rotated_mean = (
        rotate(features, positions, frequencies, inputs.attention_scaling) for features in (queries, mean.expand_as(keys))
    )
    left = torch.cat([rotated_queries, queries * inputs.attention_scaling], -1)
    right = torch.cat([rotated_mean * weight, deviation * inputs.attention_scaling * weight], -1)
    return left, right


def _pair_norm(features: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Norm of each pair, in both of its places."""
    first, second = features.chunk(2, -1)
    return torch.hypot(first, second).repeat(*[1] * (features.dim() - 1), 2)


def _bilinear_correlation(
    inputs: AttentionInputs, left: Tensor, right: Tensor, prompt: Tensor, head: Tensor
) -> Float[Tensor, "item"]:
    key_head = head // (inputs.heads // inputs.rotated_keys.shape[1])
    queries, keys = (
        inputs.rotated_queries[prompt, head].to(left),
        inputs.rotated_keys[prompt, key_head].to(left),
    )
    width, valid = queries.shape[-1], inputs.valid[prompt]
    queries, keys = torch.cat([queries, left], -1), torch.cat([keys, right], -1)
    mean = keys.masked_fill(~valid[..., None], 0).sum(1, keepdim=True, dtype=torch.float64)
    mean = (mean / valid.sum(-1)[:, None, None]).to(keys.dtype)
    counts = pair_counts(valid, inputs.window)
    moments = over_heads_in_two_precisions(
        lambda some_queries, some_keys: _windowed(some_queries, some_keys, width, inputs.window),
        lambda sums: _cancelling(sums, counts.total),
        queries,
        keys - mean,
        valid,
        bytes_per_head=8 * (queries.shape[1] * queries.shape[2] * 4 + STRIDE // CHUNK * 4 * queries.shape[2] ** 2),
    )
    products = queries.to(torch.float64) * mean.to(torch.float64)
    # Centring the keys took beta_i = q_i . mean k from every entry of row i, on both maps (effect [item, map, query]). With n_i keys
    # in row i and centred row sums S_i, sum (x + beta)^2 = sum x^2 + sum_i beta_i (2 S_i + n_i beta_i); the product alike.
    effect = torch.stack([products[..., :width].sum(-1), products[..., width:].sum(-1)], 1)
    effect = torch.where(valid[:, None], effect, 0)
    per_row = counts.query[:, None]
    total = (moments.row_sums + per_row * effect).sum(-1)
    square = moments.square + (effect * (2 * moments.row_sums + per_row * effect)).sum(-1)
    beta, fitted_beta = effect.unbind(1)
    rows, fitted_rows = moments.row_sums.unbind(1)
    product = moments.product + (beta * fitted_rows + fitted_beta * rows + counts.query * beta * fitted_beta).sum(-1)
    return pearson(counts.total, total[:, 0], square[:, 0], total[:, 1], square[:, 1], product)


def _cancelling(moments: _Moments, pairs: Float[Tensor, "item"]) -> Bool[Tensor, "item"]:
    """Heads whose spread is small against the terms that give it."""
    scatter = moments.square - moments.row_sums.sum(-1) ** 2 / pairs.clamp(min=1)[:, None]
    return (moments.magnitude > ILL_CONDITIONED * scatter.clamp(min=0)).any(-1)


def _windowed(queries: Tensor, keys: Tensor, width: int, window: int | None) -> _Moments:
    """Causal pairs less those beyond the window; the first `width` features are the logits', the others f + g's."""
    parts = [(sign, _causal(queries, some_keys, width)) for sign, _, some_keys in signed_keys(keys, window)]
    return _Moments(
        row_sums=torch.stack([sign * part.row_sums for sign, part in parts]).sum(0),
        square=torch.stack([sign * part.square for sign, part in parts]).sum(0),
        product=torch.stack([sign * part.product for sign, part in parts]).sum(0),
        magnitude=torch.stack([part.magnitude for _, part in parts]).sum(0),
    )


def _causal(queries: Tensor, keys: Tensor, width: int) -> _Moments:
    """Moments over all causal pairs, some chunks at a time."""
    items, _, features = queries.shape
    new = {"dtype": torch.float64, "device": queries.device}
    lower = torch.ones(CHUNK, CHUNK, dtype=queries.dtype, device=queries.device).tril()
    gram, before = torch.zeros(items, features, features, **new), torch.zeros(items, features, **new)
    square, product, magnitude = (
        torch.zeros(items, 2, **new),
        torch.zeros(items, **new),
        torch.zeros(items, 2, **new),
    )
    maps = (slice(0, width), slice(width, features))
    row_sums = []
    for some_queries, some_keys in zip(queries.split(STRIDE, 1), keys.split(STRIDE, 1), strict=True):
        q, k = in_chunks(some_queries), in_chunks(some_keys)
        key_sums = k.sum(2, dtype=torch.float64)
        earlier = before[:, None] + key_sums.cumsum(1) - key_sums
        before = before + key_sums.sum(1)
        within = [(q[..., part] @ k[..., part].mT).mul_(lower) for part in maps]
        rows = [
            inside.sum(-1, dtype=torch.float64) + (q[..., part].to(torch.float64) @ earlier[..., part, None])[..., 0]
            for part, inside in zip(maps, within, strict=True)
        ]
        row_sums.append(torch.stack([row.flatten(1) for row in rows], 1)[..., : some_queries.shape[1]])
        # One Gram of all features serves both maps: its diagonal blocks give sum x^2 of each, the block beside them their product.
        crossed, gram = gram_products(q, k, gram)
        product += (within[0] * within[1]).sum((1, 2, 3), dtype=torch.float64) + crossed[:, maps[0], maps[1]].sum((1, 2))
        for number, part in enumerate(maps):
            inside = within[number].square_().sum((1, 2, 3), dtype=torch.float64)
            square[:, number] += inside + crossed[:, part, part].sum((1, 2))
            magnitude[:, number] += inside + crossed[:, part, part].abs().sum((1, 2))
    return _Moments(torch.cat(row_sums, -1), square, product, magnitude)


def _written_out_correlation(
    inputs: AttentionInputs, left: Tensor, right: Tensor, prompt: Tensor, head: Tensor
) -> Float[Tensor, "item"]:
    """The same where logits are no dot product: rows written out some at a time, O(n^2 d)."""
    sums = torch.zeros(6, len(prompt), dtype=torch.float64, device=left.device)
    for rows, logits in row_blocks(inputs):
        seen = inputs.visible(rows)[prompt]
        values = torch.where(seen, logits[prompt, head], 0).to(torch.float64)
        approximate = torch.where(seen, left[:, rows] @ right.mT, 0).to(torch.float64)
        pairs = (seen, values, values * values, approximate, approximate * approximate, approximate * values)
        sums += torch.stack([part.sum((1, 2)) for part in pairs])
    return pearson(*sums)
