"""The three-axis map with its distance axis shuffled: what a fit is worth when distances are told wrong.

    W_ij ~ a_{s(i-j)} + b_i + c_j,     s a random permutation of the distances that are seen

A trend a_t = alpha + beta t is no property of the distance axis: beta (i - j) is a row and a column effect as well (a
gauge of the fit). It is given to them first - a keeps the least variance over pairs that it can have - so that
shuffling destroys what only distances explain, and nothing else. Knows nothing about where the axes come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repo_interp.measures.kernels.additive_map import AdditivePairs
from repo_interp.measures.kernels.triangle_solver import Axes


def shuffle_distances(axes: Axes, pairs: AdditivePairs, seed: int) -> Axes:
    """`axes` [prompt, head, n] with the trend of a moved to b and c, and a permuted, by `seed` and n alone."""
    steady = without_trend(axes, pairs)
    distance = steady.distance.clone()
    seen = pairs.counts.distance > 0
    for prompt in range(len(distance)):
        distances = seen[prompt, 0].cpu().nonzero()[:, 0]
        order = torch.randperm(len(distances), generator=torch.Generator().manual_seed(seed), device="cpu")
        distance[prompt][:, distances] = steady.distance[prompt][:, distances[order]]
    return Axes(distance, steady.query, steady.key)


def without_trend(axes: Axes, pairs: AdditivePairs) -> Axes:
    """Axes of the same map whose distance axis has mean 0 and no slope, distances weighted by their pairs."""
    steps = torch.arange(axes.distance.shape[-1], dtype=axes.distance.dtype, device=axes.distance.device)
    share = pairs.counts.distance / pairs.total.clamp(min=1)[..., None]
    centred = steps - _mean(share, steps)
    slope = _mean(share, centred * axes.distance) / _mean(share, centred**2).clamp(min=torch.finfo(steps.dtype).tiny)
    level = _mean(share, axes.distance) - slope * _mean(share, steps)
    return Axes(axes.distance - level - slope * steps, axes.query + level + slope * steps, axes.key - slope * steps)


def _mean(share: Tensor, values: Tensor) -> Tensor:
    return (share * values).sum(-1, keepdim=True)
