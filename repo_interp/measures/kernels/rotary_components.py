"""The rotary components of causal logits: their profiles by distance, and the variance that each,
and each band of them, accounts for.

    C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (rotated; r' = r + d/2),   y = sum_r C_r,   Y = the sum of a band's
    VAF = 100 (1 - var(y - C) / var(y)) = 100 (2 cov(C, y) - var(C)) / var(y)      C a component, or Y      (HoPE, eq. 5)
    VAF as printed = 100 (1 - sum(y - C) / sum(y)) = 100 sum(C) / sum(y)
    activated: pi / L < theta < 2 pi / L,   low: theta <= pi / L,   high: theta >= 2 pi / L       L: as `compared_length` (sec. 3.3.2)

The first VAF is the standard definition; the second is the formula in the paper: unbounded, and
ill-conditioned where sum(y) is near 0. Both over seen pairs, or on curves over distances. Per cent.
NaN where logits vary by rounding only, or sum to 0. The sums behind them need no map: see
causal_pairs and profiles.

Knows nothing about labels and runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.heads import HeadBlock, Reduction, over_heads
from repo_interp.measures.kernels.rounding import variance_of
from repo_interp.measures.kernels.seen_pairs import PairCounts, once
from repo_interp.positions.rotary import expand_heads

_SHARES = ("vaf", "vaf_curve", "vaf_printed", "vaf_curve_printed")
BANDS = ("activated", "low", "high")


@dataclass(frozen=True)
class LayerComponents:
    """Components of one layer and one batch, float64, logits in units of q . k."""

    logits: Float[Tensor, "head distance"]
    """Sum of the logits over prompts and seen pairs, without what the scheme adds to them."""
    components: Float[Tensor, "group component distance"]
    """Sum of each component over prompts, seen pairs and the heads of a group: all heads, or each.
    """
    shares: Float[Tensor, "prompt head 4_components_and_3"]
    """`explained`, one after the other."""

    @property
    def explained(self) -> dict[str, Float[Tensor, "prompt head component"]]:
        """VAF in per cent: `vaf`, `vaf_printed`, `vaf_curve`, `vaf_curve_printed`; and `vaf_band`
        [prompt, head, band].
        """
        parts = self.shares.split([self.components.shape[1]] * len(_SHARES) + [len(BANDS)], -1)
        return dict(zip((*_SHARES, "vaf_band"), parts, strict=True))


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

    def start(self, inputs: AttentionInputs) -> LayerComponents:
        """Sums of no head yet."""
        prompts, heads, length, width = inputs.queries.shape
        new = {"dtype": torch.float64, "device": inputs.queries.device}
        return LayerComponents(
            logits=torch.zeros(heads, length, **new),
            components=torch.zeros(heads if self.of_each_head else 1, width // 2, length, **new),
            shares=torch.zeros(prompts, heads, len(_SHARES) * (width // 2) + len(BANDS), **new),
        )

    def ill_conditioned(self, inputs: AttentionInputs, block: HeadBlock) -> Tensor:
        """Heads whose logits vary little beside the terms of their sum of squares, or beside their
        components.
        """
        some = block.between(self.first_token, self.last_token)
        return (
            torch.maximum(some.pairs.magnitude, some.pairs.own_squares.sum(-1))
            > some.well_conditioned
        )

    def add(self, result: LayerComponents, inputs: AttentionInputs, block: HeadBlock) -> None:
        """Profiles of the heads of a block, added up, and their shares of the variance."""
        some = block.between(self.first_token, self.last_token)
        profiles = some.profiles
        result.logits.index_add_(0, some.head.flatten(), some.by_distance.flatten(0, 1))
        if self.of_each_head:
            result.components.index_add_(0, some.head.flatten(), profiles.flatten(0, 1))
        else:
            result.components.add_(profiles.sum((0, 1)))
        totals = profiles.sum(-1)
        moments = component_moments(
            some, totals, _layer_bands(inputs, inputs.compared_length(self.training_length))
        )
        accounted, of_bands = moments.variance_accounted.split([totals.shape[-1], len(BANDS)], -1)
        curves, sums = curve_moments(profiles, some.counts)
        printed = variance_accounted_as_printed(torch.stack([totals, sums], -2)).flatten(-2)
        over_heads(
            result.shares,
            some,
            torch.cat([accounted, curves.variance_accounted, printed, of_bands], -1),
        )


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


def component_moments(
    block: HeadBlock,
    totals: Float[Tensor, "key member component"],
    bands: Bool[Tensor, "band component"],
) -> Moments:
    """Moments over the seen pairs of each head of a block: of every component, and then of the sum
    of every band.

    `totals` are the sums of each component over the pairs. In units of q . k squared; NaN where a
    head sees none.
    """
    count, pairs = block.counts.total[..., None], block.pairs
    of_components = torch.stack([totals, pairs.with_logits]) / count
    member = once("member", lambda: bands.T.to(torch.float64), bands)
    mean, product = torch.cat([of_components, of_components @ member], -1).unbind(0)
    whole = totals.sum(-1, keepdim=True) / count
    square = torch.cat([pairs.own_squares, pairs.squares_of(bands)], -1) / count
    return Moments(
        variance_of(pairs.square[..., None] / count, whole),
        square - mean**2,
        product - mean * whole,
    )


def curve_moments(
    profiles: Float[Tensor, "key member component distance"], counts: PairCounts
) -> tuple[Moments, Float[Tensor, "key member component"]]:
    """Moments of the components' mean curves, each distance with pairs counted once; and the sums
    of the curves.
    """
    curves, count = profiles * counts.shares, counts.distances
    whole = curves.sum(-2, keepdim=True)
    sums, of_whole = curves.sum(-1), whole.sum(-1) / count
    mean, product = sums / count, (curves * whole).sum(-1) / count
    variance = variance_of(whole.square().sum(-1) / count, of_whole)
    return Moments(
        variance, curves.square_().sum(-1) / count - mean**2, product - mean * of_whole
    ), sums


def pair_components(
    inputs: AttentionInputs, query: int, key: int
) -> Float[Tensor, "prompt head component"]:
    """The components of one pair of tokens, in units of q . k.

    Float64; whether the pair is seen is not asked.
    """
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


def _layer_bands(inputs: AttentionInputs, length: int) -> Bool[Tensor, "band component"]:
    frequencies = inputs.frequencies
    if frequencies is None or inputs.positions is None:
        return frequency_bands(layer_frequencies(inputs), length)
    return once(
        ("bands", length, inputs.valid.device),
        lambda: frequency_bands(layer_frequencies(inputs), length),
        frequencies,
    )


def layer_frequencies(inputs: AttentionInputs) -> Float[Tensor, "component"]:
    """Frequencies by which the layer rotates, float64; NaN where the layer rotates nothing."""
    if inputs.frequencies is None or inputs.positions is None:
        return torch.full(
            (inputs.queries.shape[-1] // 2,),
            torch.nan,
            dtype=torch.float64,
            device=inputs.valid.device,
        )
    frequencies, device = inputs.frequencies, inputs.valid.device
    return once(
        ("float64", device),
        lambda: frequencies.to(dtype=torch.float64, device=device, copy=True),
        frequencies,
    )


def variance_accounted_as_printed(
    sums: Float[Tensor, "... component"],
) -> Float[Tensor, "... component"]:
    """The printed formula, from sums or means of each component over the same pairs or distances.

    Per cent.
    """
    return _share(sums, sums.sum(-1, keepdim=True))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return (100 * part / whole).masked_fill(whole == 0, torch.nan)
