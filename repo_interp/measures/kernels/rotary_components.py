"""The rotary components of causal logits: their profiles by distance, and the variance that each, and each band of them, accounts for.

    C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (rotated; r' = r + d/2),   y = sum_r C_r,   Y = the sum of a band's
    VAF = 100 (1 - var(y - C) / var(y)) = 100 (2 cov(C, y) - var(C)) / var(y)      C a component, or Y      (HoPE, eq. 5)
    VAF as printed = 100 (1 - sum(y - C) / sum(y)) = 100 sum(C) / sum(y)
    activated: pi / L < theta < 2 pi / L,   low: theta <= pi / L,   high: theta >= 2 pi / L       L: as `compared_length` (sec. 3.3.2)

The first VAF is the standard definition; the second is the formula in the paper: unbounded, and ill-conditioned where sum(y) is near 0.
Both over seen pairs, or on curves over distances. Per cent. NaN where logits vary by rounding only, or sum to 0. The sums behind them
need no map: see causal_pairs and profiles.

Knows nothing about labels and runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.heads import ILL_CONDITIONED, PROFILES, HeadBlock, Reduction, over_heads
from repo_interp.measures.kernels.rounding import variance_of
from repo_interp.positions.rotary import expand_heads


@dataclass(frozen=True)
class LayerComponents:
    """Components of one layer and one batch, float64, logits in units of q . k."""

    logits: Float[Tensor, "head distance"]
    """Sum of the logits over prompts and seen pairs, without what the scheme adds to them."""
    components: Float[Tensor, "group component distance"]
    """Sum of each component over prompts, seen pairs and the heads of a group: all heads, or each."""
    explained: dict[str, Float[Tensor, "prompt head component"]]
    """VAF in per cent: `vaf`, `vaf_printed`, `vaf_curve`, `vaf_curve_printed`; and `vaf_band` [prompt, head, band]."""


_SHARES = ("vaf", "vaf_printed", "vaf_curve", "vaf_curve_printed")
BANDS = ("activated", "low", "high")


@dataclass(frozen=True)
class ComponentSums(Reduction):
    """Profiles and variance accounted for of every component: gives `LayerComponents`."""

    training_length: int
    """In tokens: what parts the components into bands."""
    first_token: int = 0
    last_token: int | None = None
    """Tokens `first_token` to `last_token` - 1 of each prompt take part."""
    of_each_head: bool = False
    """Whether a group is one head, or all heads."""
    quantities = (PROFILES,)

    def start(self, inputs: AttentionInputs) -> LayerComponents:
        """Sums of no head yet."""
        prompts, heads, length, width = inputs.queries.shape
        new = {"dtype": torch.float64, "device": inputs.queries.device}
        shares = {name: torch.zeros(prompts, heads, width // 2, **new) for name in _SHARES}
        return LayerComponents(
            logits=torch.zeros(heads, length, **new),
            components=torch.zeros(heads if self.of_each_head else 1, width // 2, length, **new),
            explained={**shares, "vaf_band": torch.zeros(prompts, heads, len(BANDS), **new)},
        )

    def ill_conditioned(self, inputs: AttentionInputs, block: HeadBlock) -> Tensor:
        """Heads whose logits vary little beside the terms of their sum of squares, or beside their components."""
        some = block.between(self.first_token, self.last_token)
        magnitude = torch.maximum(some.pairs.magnitude, some.pairs.own_squares.sum(-1))
        return magnitude > ILL_CONDITIONED * some.pairs.scatter(some.counts.total)

    def add(self, result: LayerComponents, inputs: AttentionInputs, block: HeadBlock) -> None:
        """Profiles of the heads of a block, added up, and their shares of the variance."""
        some = block.between(self.first_token, self.last_token)
        profiles, seen = some.profiles, some.counts.distance
        result.logits.index_add_(0, some.head.flatten(), some.by_distance.flatten(0, 1))
        if self.of_each_head:
            result.components.index_add_(0, some.head.flatten(), profiles.flatten(0, 1))
        else:
            result.components[0] += profiles.sum((0, 1))
        totals = profiles.sum(-1)
        bands = frequency_bands(layer_frequencies(inputs), inputs.compared_length(self.training_length))
        moments = component_moments(some, totals, bands)
        shares = {
            "vaf": moments.variance_accounted,
            "vaf_band": moments.of_bands.variance_accounted,
            "vaf_printed": variance_accounted_as_printed(totals),
            **curve_shares(profiles, seen),
        }
        for name, values in shares.items():
            over_heads(result.explained[name], some, values)


@dataclass(frozen=True)
class Moments:
    """Means over pairs, or distances, of parts of a quantity y. Float64."""

    variance: Float[Tensor, "... 1"]
    """Of y; 0 where y varies by rounding only."""
    of_part: Float[Tensor, "... part"]
    """Variance of each part."""
    with_whole: Float[Tensor, "... part"]
    """Covariance of each part with y."""

    @property
    def variance_accounted(self) -> Float[Tensor, "... part"]:
        """VAF of each part, in per cent: 0 for an empty one, 100 for all of y."""
        return _share(2 * self.with_whole - self.of_part, self.variance)


@dataclass(frozen=True)
class ComponentMoments(Moments):
    """Moments of the components over the seen pairs of each head, in units of q . k squared; NaN where a head sees none."""

    of_bands: Moments
    """Those of the sums of bands."""


def component_moments(
    block: HeadBlock, totals: Float[Tensor, "key member component"], bands: Bool[Tensor, "band component"]
) -> ComponentMoments:
    """Moments of every component and every band over the seen pairs of a block; `totals` are the sums of each component over them."""
    count, pairs = block.counts.total[..., None], block.pairs
    mean, member = totals / count, bands.to(torch.float64)
    whole = mean.sum(-1, keepdim=True)
    variance = variance_of(pairs.square[..., None] / count, whole)
    with_whole = pairs.with_logits / count - mean * whole
    band_mean = mean @ member.mT
    of_bands = Moments(variance, pairs.squares_of(bands) / count - band_mean**2, with_whole @ member.mT)
    return ComponentMoments(variance, pairs.own_squares / count - mean**2, with_whole, of_bands)


def curve_shares(
    profiles: Float[Tensor, "key member component distance"], pairs: Float[Tensor, "key 1 distance"]
) -> dict[str, Float[Tensor, "key member component"]]:
    """Both VAF of the components' mean curves, each distance with pairs counted once."""
    weight = torch.where(pairs > 0, 1 / pairs.clamp(min=1), 0)[..., None]
    count = (pairs > 0).sum(-1, keepdim=True).to(torch.float64)
    whole = profiles.sum(-2)[..., None] * weight
    # Sums over distances of each curve, and of its product with the logits': one product with the profiles for both.
    sums, products = (profiles @ torch.cat([weight.expand_as(whole), whole * weight], -1)).unbind(-1)
    squares = (profiles * weight.mT).square_().sum(-1)
    mean = sums / count
    of_whole = mean.sum(-1, keepdim=True)
    variance = variance_of(whole.square().sum(-2) / count, of_whole)
    moments = Moments(variance, squares / count - mean**2, products / count - mean * of_whole)
    return {"vaf_curve": moments.variance_accounted, "vaf_curve_printed": variance_accounted_as_printed(sums)}


def pair_components(inputs: AttentionInputs, query: int, key: int) -> Float[Tensor, "prompt head component"]:
    """The components of one pair of tokens, in units of q . k. Float64; whether the pair is seen is not asked."""
    at_query = inputs.rotated_queries[:, :, query].double()
    at_key = expand_heads(inputs.rotated_keys, inputs.heads)[:, :, key].double()
    return (at_query * at_key).unflatten(-1, (2, -1)).sum(-2)


def frequency_bands(
    frequencies: Float[Tensor, "*layer component"], length: int | Float[Tensor, "layer 1"]
) -> Bool[Tensor, "band *layer component"]:
    """Whether each component is in each of `BANDS`, for an L in tokens. NaN is in no band."""
    lowest, highest = math.pi / length, 2 * math.pi / length
    activated = (frequencies > lowest) & (frequencies < highest)
    return torch.stack((activated, frequencies <= lowest, frequencies >= highest))


def layer_frequencies(inputs: AttentionInputs) -> Float[Tensor, "component"]:
    """Frequencies by which the layer rotates, float64; NaN where the layer rotates nothing."""
    if inputs.frequencies is None or inputs.positions is None:
        return torch.full((inputs.queries.shape[-1] // 2,), torch.nan, dtype=torch.float64, device=inputs.valid.device)
    return inputs.frequencies.to(dtype=torch.float64, device=inputs.valid.device)


def variance_accounted_as_printed(sums: Float[Tensor, "... component"]) -> Float[Tensor, "... component"]:
    """The printed formula, from sums or means of each component over the same pairs or distances. Per cent."""
    return _share(sums, sums.sum(-1, keepdim=True))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, torch.nan, 100 * part / whole)
