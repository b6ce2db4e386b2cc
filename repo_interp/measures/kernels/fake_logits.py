"""Fake-distance logits of a query and their two axes, without making them (Position Generalization eq. 3, 9-13).

    W'_dj = Re sum_r q_r conj(k_jr) exp(i theta_r d)        un-rotated q (scaled) and k in complex pairs, d on a grid
    a_d = row mean - grand mean / 2,   b_j = column mean - grand mean / 2,   r = Pearson(W', a_d + b_j)

a needs the mean key only, b the mean rotation. With keys centred and G1 = sum_j k_r conj(k_s), G2 = sum_j k_r k_s,

    sum W'^2 = 1/2 Re sum_rs (q_r conj(q_s) conj(G1_rs) S(theta_r - theta_s) + q_r q_s conj(G2_rs) S(theta_r + theta_s))

S(w) = sum_d exp(i w d), a geometric series. O(n d^2) once per head, O(d^2) per query. What a scheme adds to the logits by
distance alone belongs to the row means. Knows nothing about which query, grid and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from repo_interp.measures.kernels.memory import SHARED, memory_for
from repo_interp.measures.kernels.rounding import ROUNDING

_TOKENS = 512
"""Tokens and distances treated in float64 at a time on a processor."""


@dataclass(frozen=True)
class KeyMoments:
    """Moments of a prompt's valid keys, per key-value head. Float64."""

    mean: Complex[Tensor, "prompt kv_head component"]
    gram: Float[Tensor, "prompt kv_head d_head d_head"]
    """Gram of the centred keys."""


@dataclass(frozen=True)
class Grid:
    """Distances start + step t, t = 0 .. count - 1, in positions; one row for all heads or one per head, `count` per prompt."""

    start: Float[Tensor, "prompt any"]
    step: Float[Tensor, "prompt any"]
    count: Int[Tensor, "prompt"]

    def phase_sums(self, frequencies: Float[Tensor, "*axes"]) -> Complex[Tensor, "prompt any *axes"]:
        """Sum over the distances of exp(i frequency distance)."""
        start, step = (part[(...,) + (None,) * frequencies.dim()] for part in (self.start, self.step))
        count = self.count[(...,) + (None,) * (frequencies.dim() + 1)]
        # sum_t exp(i (w start + t x)) = exp(i (w start + (n - 1) x / 2)) sin(n x / 2) / sin(x / 2), x = w step taken into -pi .. pi:
        # whole rotations change no term, and near them sin(x / 2) would lose its digits.
        angle = torch.remainder(frequencies * step + torch.pi, 2 * torch.pi) - torch.pi
        none = angle.abs() < 1e-15
        size = torch.where(none, count, (count * angle / 2).sin() / torch.where(none, 1, (angle / 2).sin()))
        return torch.polar(torch.ones_like(angle), frequencies * start + (count - 1) * angle / 2) * size


def key_moments(keys: Float[Tensor, "prompt kv_head token d_head"], valid: Bool[Tensor, "prompt token"]) -> KeyMoments:
    """Mean and Gram of the valid keys, un-rotated; products in the keys' dtype, sums over blocks of tokens in float64."""
    prompts, kv_heads, tokens, width = keys.shape
    exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
    at_once = max(1, memory_for(keys.device, SHARED) // (prompts * kv_heads * width * 16))
    hidden = None if bool(valid.all()) else ~valid[:, None, :, None]
    new = {"dtype": torch.float64, "device": keys.device}
    mean = torch.zeros(prompts, kv_heads, width, **new)
    stretches = [slice(start, start + at_once) for start in range(0, tokens, at_once)]
    for some in stretches:
        known = keys[:, :, some] if hidden is None else keys[:, :, some].masked_fill(hidden[:, :, some], 0)
        mean += known.sum(2, dtype=torch.float64)
    mean /= valid.sum(-1).clamp(min=1)[:, None, None]
    gram = torch.zeros(prompts, kv_heads, width, width, **new)
    for some in stretches:
        centred = keys[:, :, some].to(exact) - mean[:, :, None].to(exact)
        centred = centred if hidden is None else centred.masked_fill_(hidden[:, :, some], 0)
        gram += centred.mT @ centred
    return KeyMoments(in_pairs(mean), gram)


def fake_correlation(
    queries: Float[Tensor, "prompt head query d_head"],
    keys: KeyMoments,
    frequencies: Float[Tensor, "component"],
    grid: Grid,
    bias: Float[Tensor, "prompt head distance"] | None = None,
) -> Float[Tensor, "prompt head query"]:
    """Correlation of W' and the sum of its axes, for every query; NaN where W' does not vary.

    `queries` are float64, un-rotated, with the logit's scale; `bias` is what the scheme adds at each distance.
    """
    group = queries.shape[1] // keys.gram.shape[1]
    gram, key_mean = (part.repeat_interleave(group, 1) for part in (keys.gram, keys.mean))
    query, count = in_pairs(queries), grid.count[:, None, None].to(torch.float64)
    every = torch.cat([frequencies[:, None] - frequencies, frequencies[:, None] + frequencies, frequencies[None]])
    differences, totals, single = grid.phase_sums(every).split([len(frequencies), len(frequencies), 1], -2)
    mean_phase = single[..., 0, :] / count
    half = gram.shape[-1] // 2
    # With centred k = x + i y: conj(G1) = sum conj(k_r) k_s = xx + yy + i (xy - xy^T),
    # conj(G2) = sum conj(k_r k_s) = xx - yy - i (xy + xy^T).
    xx, xy, yy = gram[..., :half, :half], gram[..., :half, half:], gram[..., half:, half:]
    within = _square(
        query,
        torch.complex(xx + yy, xy - xy.mT) * differences,
        torch.complex(xx - yy, -xy - xy.mT) * totals,
    )
    # Of the sum of squares about the grand mean, the part of the columns (the key axis): mean rotation of q against centred keys.
    rotated = _as_features(query * mean_phase[:, :, None])
    by_key = count * ((rotated @ gram) * rotated).sum(-1)
    of_mean = query * key_mean.conj()[:, :, None]
    # ... and that of the rows (the distance axis): the mean key at every distance, less its mean.
    if bias is None:
        level = (of_mean * mean_phase[:, :, None]).sum(-1).real
        by_distance = count * (_square(of_mean, differences, totals) - count * level**2)
    else:
        by_distance = count * _scatter(row_means(of_mean, frequencies, grid, bias), grid.count)
    # The two axes are orthogonal, so r^2 = (by_distance + by_key) / total; `within` is by_key and what neither axis explains.
    total = by_distance + within
    largest = (
        queries.square().sum(-1) * (key_mean.abs().square().sum(-1) * count[..., 0] + gram.diagonal(0, -2, -1).sum(-1))[..., None]
    )
    return torch.where(total > ROUNDING * count * largest, ((by_distance + by_key) / total).clamp(0, 1).sqrt(), torch.nan)


def fake_axes(
    query: Float[Tensor, "head d_head"],
    keys: Float[Tensor, "kv_head token d_head"],
    key_mean: Complex[Tensor, "kv_head component"],
    frequencies: Float[Tensor, "component"],
    grid: Grid,
    bias: Float[Tensor, "head distance"],
) -> tuple[Float[Tensor, "head distance"], Float[Tensor, "head token"]]:
    """Both axes of one prompt: a_d and b_j, float64. `grid` is that prompt's, `bias` that of its distances."""
    group, count = len(query) // len(keys), int(grid.count[0])
    of_mean = in_pairs(query) * key_mean.repeat_interleave(group, 0).conj()
    rows = row_means(of_mean[None, :, None], frequencies, grid, bias[None])[0, :, 0]
    grand = rows.mean(-1, keepdim=True)
    mean_phase = grid.phase_sums(frequencies)[0] / count
    rotated = _as_features(in_pairs(query) * mean_phase).unflatten(0, (len(keys), group))
    blocks = keys.split(_at_once(keys[:, 0]), 1)
    columns = torch.cat([rotated @ block.to(torch.float64).mT for block in blocks], -1).flatten(0, 1)
    columns = columns + bias.mean(-1, keepdim=True)
    return rows - grand / 2, columns - grand / 2


def row_means(
    of_mean: Complex[Tensor, "prompt head query component"],
    frequencies: Float[Tensor, "component"],
    grid: Grid,
    bias: Float[Tensor, "prompt head distance"],
) -> Float[Tensor, "prompt head query distance"]:
    """Row means of W' at every distance: the mean key's logit - `of_mean` is q conj(mean k) - and the bias there."""
    means = []
    for steps in torch.arange(bias.shape[-1], dtype=torch.float64, device=bias.device).split(
        _at_once(grid.start[..., None] * frequencies)
    ):
        angles = (grid.start[..., None] + grid.step[..., None] * steps)[..., None] * frequencies
        means.append(of_mean.real @ angles.cos().mT - of_mean.imag @ angles.sin().mT)
    return torch.cat(means, -1) + bias[:, :, None]


def _at_once(of_token: Tensor) -> int:
    """Tokens, or distances, that are treated together, where each takes as many numbers as `of_token` has."""
    return max(_TOKENS, memory_for(of_token.device, 0) // (16 * of_token.numel()))


def in_pairs(features: Float[Tensor, "... d_head"]) -> Complex[Tensor, "... component"]:
    """Half-split pairs as complex numbers, complex128."""
    first, second = features.to(torch.float64).chunk(2, -1)
    return torch.complex(first, second)


def _as_features(pairs: Complex[Tensor, "... component"]) -> Float[Tensor, "... d_head"]:
    return torch.cat([pairs.real, pairs.imag], -1)


def _square(
    values: Complex[Tensor, "prompt head query component"], differences: Tensor, totals: Tensor
) -> Float[Tensor, "prompt head query"]:
    """1/2 Re sum_rs (v_r conj(v_s) differences_rs + v_r v_s totals_rs)."""
    return ((values @ differences * values.conj()).sum(-1) + (values @ totals * values).sum(-1)).real / 2


def _scatter(values: Float[Tensor, "prompt head query distance"], count: Int[Tensor, "prompt"]) -> Tensor:
    """sum (value - mean)^2 over the first `count` distances."""
    count = count[:, None, None, None]
    inside = torch.arange(values.shape[-1], device=values.device) < count
    mean = torch.where(inside, values, 0).sum(-1, keepdim=True) / count
    return torch.where(inside, values - mean, 0).square().sum(-1)
