"""Two-axis fit of a query's fake-distance logits W', without computing W'.

Position Generalization, eq. 3, 9-13.

    W'_dj = (R_d q) . k_j       un-rotated q (scaled) and k; R_d: rotation by the distance d of a
                                grid
    a_d = row mean - grand mean / 2,   b_j = column mean - grand mean / 2,
            r = Pearson(W', a_d + b_j)

a needs only the mean key, b only the mean rotation. With the Gram G of the centered keys,

    sum W'^2 = q . N q,   N = sum_d R_d^T G R_d,
            N_rs = sum of cos and sin (theta_r d) times cos and sin (theta_s d), times G_rs

The sums over d are equal for all layers with the same rotation. The cost is O(n d^2) once per head
and grid, and O(n d) per query. Terms that depend only on the distance belong to the row means. This
module knows nothing about the choice of query, grid and layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from repo_interp.measures.kernels.rounding import ROUNDING
from repo_interp.measures.kernels.seen_pairs import is_whole, once
from repo_interp.runtime.memory import SHARED, memory_for


@dataclass(frozen=True)
class KeyMoments:
    """Moments of a prompt's valid keys, per key-value head. Float64."""

    mean: Float[Tensor, "*layer prompt kv_head d_head"]
    gram: Float[Tensor, "*layer prompt kv_head d_head d_head"]
    """Gram of the centered keys."""


@dataclass(frozen=True)
class DistanceTurns:
    """Rotations by the distances of a grid, float64, one grid for all heads or one per head."""

    tables: Float[Tensor, "prompt any distance two_components"]
    """Cosines and sines; 0 beyond a prompt's distances."""
    count: Float[Tensor, "prompt 1 1"]
    whole: bool
    """Whether every prompt has all distances."""

    @cached_property
    def mean(
        self,
    ) -> tuple[Float[Tensor, "prompt any 1 d_head"], Float[Tensor, "prompt any 1 d_head"]]:
        """Mean cosine and mean sine of every dimension."""
        cosines, sines = (self.tables.sum(-2, keepdim=True) / self.count[..., None]).chunk(2, -1)
        return torch.cat([cosines, cosines], -1), torch.cat([sines, sines], -1)

    @cached_property
    def squares(self) -> Float[Tensor, "prompt any half 2 half 2 component component"]:
        """Sums over distances of products of two entries of the rotations.

        Entry (half a, half a') of one component and (b, b') of another.
        """
        products = (
            (self.tables.mT @ self.tables)
            .unflatten(-1, (2, -1))
            .unflatten(-3, (2, -1))
            .transpose(-3, -2)
        )
        first, second, signs = _entries(products.device)
        return products[:, :, first, second] * signs


@lru_cache(maxsize=8)
def _entries(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices into (cos, sin), and signs, of two entries of R = [[cos, -sin], [sin, cos]]."""
    entry = torch.tensor([[0, 1], [1, 0]], device=device)
    sign = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64, device=device)
    return entry[:, :, None, None], entry, (sign[:, :, None, None] * sign)[..., None, None]


def distance_turns(
    start: Float[Tensor, "prompt any"],
    step: Float[Tensor, "prompt any"],
    valid: Bool[Tensor, "prompt token"],
    frequencies: Tensor,
) -> DistanceTurns:
    """Return rotations by the distances start + step t, t = 0, 1, ..., one per token of a prompt.

    Args:
        start: First distance [prompt, 1 or head], positions, float64.
        step: Distance between neighbors, of the same shape.
        valid: Mask [prompt, token].
        frequencies: Radians per position [component], float64.

    Returns:
        The rotations.
    """
    count = valid.sum(-1)[:, None, None]
    steps = torch.arange(valid.shape[-1], dtype=torch.float64, device=valid.device)
    angles = (start[..., None] + step[..., None] * steps)[..., None] * frequencies
    tables = torch.cat([angles.cos(), angles.sin()], -1)
    whole = is_whole(valid)
    return DistanceTurns(
        tables if whole else tables.masked_fill_((steps >= count)[..., None], 0),
        count.to(torch.float64),
        whole,
    )


def key_moments(
    keys: Float[Tensor, "prompt kv_head token d_head"], valid: Bool[Tensor, "prompt token"]
) -> KeyMoments:
    """Return mean and Gram of the valid keys; products in their dtype, sums in float64.

    Args:
        keys: Un-rotated [prompt, kv_head, token, d_head].
        valid: Mask [prompt, token].

    Returns:
        The moments.
    """
    prompts, kv_heads, tokens, width = keys.shape
    exact = torch.promote_types(keys.dtype, torch.float32)
    at_once = max(1, memory_for(keys.device, SHARED) // (prompts * kv_heads * width * 16))
    # In stretches of tokens, so that float64 copies of keys stay within the kernel's memory.
    hidden = None if is_whole(valid) else ~valid[:, None, :, None]
    stretches = [slice(start, start + at_once) for start in range(0, tokens, at_once)]

    def known(features: Tensor, some: slice) -> Tensor:
        return features if hidden is None else features.masked_fill(hidden[:, :, some], 0)

    stretches = [(some, keys if len(stretches) == 1 else keys[:, :, some]) for some in stretches]
    sums = [known(part, some).sum(2, keepdim=True, dtype=torch.float64) for some, part in stretches]
    mean = _added(sums) / once(
        "keys", lambda: valid.sum(-1).clamp(min=1)[:, None, None, None], valid
    )
    centred = (
        known(part.to(exact) - mean.to(exact), some).flatten(0, 1) for some, part in stretches
    )
    gram = _added([torch.bmm(part.mT, part).to(torch.float64) for part in centred])
    return KeyMoments(mean[:, :, 0], gram.unflatten(0, (prompts, kv_heads)))


def _added(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0) if parts[1:] else parts[0]


class FakeFit(NamedTuple):
    """The fit of every query by the two axes, float64."""

    correlation: Float[Tensor, "*layer prompt head query"]
    """Correlation of W' and the sum of its axes; NaN if W' does not vary."""
    semantic_share: Float[Tensor, "*layer prompt head query"]
    """Share of the semantic axis in the variance of both axes: var b / (var a + var b)."""
    rows: Float[Tensor, "*layer prompt head query distance"]
    """Row means of W'."""


def mean_rotated(
    queries: Float[Tensor, "*layer prompt head query d_head"], turns: DistanceTurns
) -> Float[Tensor, "*layer prompt head query d_head"]:
    """Return queries turned by the mean rotation of the distances.

    Their products with the keys are the column means of W' without the bias.

    Args:
        queries: Un-rotated, float64, with the logit's scale.
        turns: Rotations by the distances.

    Returns:
        Mean rotated queries, float64.
    """
    cosines, sines = turns.mean
    return torch.addcmul(queries * cosines, _quarter(queries), sines)


def fake_fit(
    queries: Float[Tensor, "layer prompt head query d_head"],
    keys: KeyMoments,
    turns: DistanceTurns,
    bias: Float[Tensor, "layer prompt head distance"] | None = None,
) -> FakeFit:
    """Fit W' by two axes, for all queries of some layers.

    Args:
        queries: Un-rotated [layer, prompt, head, query, d_head], float64, with the logit's scale.
        keys: Moments of the keys, with an axis `layer` in front.
        turns: Rotations by the distances, the same in all layers.
        bias: Position logits [layer, prompt, head, distance]; None: the scheme adds nothing.

    Returns:
        The fit.
    """
    group, count = queries.shape[2] // keys.gram.shape[2], turns.count
    gram, key_mean = (
        part.repeat_interleave(group, 2) if group > 1 else part for part in (keys.gram, keys.mean)
    )
    # The part of the sum of squares about the grand mean that is due to the key axis (columns)
    # or to neither axis.
    # [..., half a', half a, half b', half b, component, component]: R^T G R by halves
    half = queries.shape[-1] // 2
    blocks = gram.view(*gram.shape[:3], 2, 1, half, 2, 1, half).permute(0, 1, 2, 3, 4, 6, 7, 5, 8)
    turned = (blocks * turns.squares).sum((-6, -4)).transpose(-3, -2).reshape(gram.shape)
    within = _square(queries, turned)
    # The part of the columns only: the mean rotation of q with centered keys.
    by_key = count * _square(mean_rotated(queries, turns), gram)
    # The part of the rows (the distance axis): the mean key at every distance, minus its mean.
    means = torch.stack([key_mean, -_quarter(key_mean)], 3)[:, :, :, None]
    products = (queries[..., None, :] * means).unflatten(-1, (2, -1)).sum(-2).flatten(-2)
    # All layers have the tables of a prompt, and beside its heads, their queries are as many more
    rows = _of_heads(products.movedim(0, 2).flatten(2, 3), turns.tables.mT)
    rows = rows.unflatten(2, (len(products), -1)).movedim(2, 0)
    rows = rows if bias is None else rows + bias[..., None, :]
    level = rows.sum(-1, keepdim=True) / count[..., None]
    # Rows beyond a prompt's distances are 0; their squares about the level are not part of the
    # scatter.
    scatter = (rows - level).square().sum(-1)
    if not turns.whole:
        scatter = scatter - (rows.shape[-1] - count) * level[..., 0].square()
    by_distance = count * scatter
    # The two axes are orthogonal, so r^2 = (by_distance + by_key) / total; `within` is by_key
    # plus the part due to neither axis.
    total = by_distance + within
    # sum |k|^2; by Cauchy-Schwarz sum W'^2 <= count |q|^2 sum |k|^2
    largest = key_mean.square().sum(-1) * count[..., 0] + gram.diagonal(0, -2, -1).sum(-1)
    flat = total <= ROUNDING * count * queries.square().sum(-1) * largest[..., None]
    axes = by_distance + by_key
    r = (axes / total).clamp(0, 1).sqrt().masked_fill(flat, torch.nan)
    return FakeFit(r, (by_key / axes).masked_fill(flat, torch.nan), rows)


def _of_heads(
    values: Float[Tensor, "*prompt head query a"], matrices: Float[Tensor, "*prompt any a b"]
) -> Tensor:
    """Multiply values by the matrices of all heads, or one per head, with one operator."""
    matrices = matrices.flatten(0, -3)
    return torch.bmm(values.reshape(len(matrices), -1, values.shape[-1]), matrices).view(
        *values.shape[:-1], matrices.shape[-1]
    )


def products_with_keys(
    rotated: Float[Tensor, "head d_head"], keys: Float[Tensor, "kv_head token d_head"]
) -> Float[Tensor, "head token"]:
    """Return products of one vector per head with all keys, float64.

    Args:
        rotated: Mean rotated query of every head, float64.
        keys: Un-rotated, of any dtype.

    Returns:
        Column means of W' without the bias.
    """
    of_keys = rotated.unflatten(0, (len(keys), -1))
    # A share of an accelerator's memory, at least 4 MiB on a processor
    memory = max(2**22, memory_for(keys.device, 0))
    blocks = keys.split(max(1, memory // (16 * keys[:, 0].numel())), 1)
    columns = [torch.bmm(of_keys, block.to(torch.float64).mT) for block in blocks]
    return torch.cat(columns, -1).flatten(0, 1)


def fake_axes(
    rows: Float[Tensor, "*layer head distance"],
    columns: Float[Tensor, "*layer head token"],
    bias: Tensor | float,
) -> tuple[Float[Tensor, "*layer head distance"], Float[Tensor, "*layer head token"]]:
    """Return both axes of one query per head.

    Args:
        rows: Row means of W', float64.
        columns: Its column means without the bias, float64.
        bias: Mean position logit [*layer, head, 1], or 0.

    Returns:
        a_d [head, distance] and b_j [head, token], float64, in logits.
    """
    half = rows.mean(-1, keepdim=True) / 2
    return rows - half, columns + (bias - half)


def in_pairs(features: Float[Tensor, "... d_head"]) -> Complex[Tensor, "... component"]:
    """Return half-split pairs as complex numbers.

    Args:
        features: [..., d_head], any floating dtype.

    Returns:
        [..., component], complex128.
    """
    first, second = features.to(torch.float64).chunk(2, -1)
    return torch.complex(first, second)


def _quarter(features: Float[Tensor, "... d_head"]) -> Float[Tensor, "... d_head"]:
    """Rotate every pair by a quarter of a whole rotation."""
    first, second = features.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _square(
    values: Float[Tensor, "*prompt head query d_head"], matrix: Tensor
) -> Float[Tensor, "*prompt head query"]:
    """Return v . (matrix v) for all v."""
    return (_of_heads(values, matrix) * values).sum(-1)
