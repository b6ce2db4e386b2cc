"""Everything about the rotary components of one layer that the measure `components` keeps, as plain tensors.

Heads go through a few at a time: rotated, reduced to profiles by distance and to a covariance of components, and these to
sums over prompts and to shares of variance. What is large - n x n, or a profile of every head - never stands whole.

Knows nothing about labels and runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import pair_counts
from repo_interp.measures.kernels.component_moments import component_moments
from repo_interp.measures.kernels.diagonals import component_profiles
from repo_interp.measures.kernels.head_blocks import head_blocks
from repo_interp.measures.kernels.variance_accounted import (
    band_variance_accounted,
    curve_covariance,
    variance_accounted,
    variance_accounted_as_printed,
)
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
        found = {"vaf_printed": variance_accounted_as_printed(totals)}
        curves = profiles.div_(pairs.clamp(min=1)[:, None])
        found |= {
            "vaf": variance_accounted(covariance),
            "vaf_curve": variance_accounted(curve_covariance(curves, pairs > 0)),
            "vaf_curve_printed": variance_accounted_as_printed(curves.sum(-1)),
            "vaf_band": band_variance_accounted(covariance, bands),
        }
        for name, values in found.items():
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
