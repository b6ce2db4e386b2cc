"""Rotary components of causal logits: profiles by distance and variance accounted for.

    C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (rotated; r' = r + d/2),   y = sum_r C_r,
    Y = the sum of a band's components
    VAF = 100 (1 - var(y - C) / var(y)) = 100 (2 cov(C, y) - var(C)) / var(y)
            C a component, or Y      (HoPE, eq. 5)
    VAF as printed = 100 (1 - sum(y - C) / sum(y)) = 100 sum(C) / sum(y)
    activated: pi / L < theta < 2 pi / L,   low: theta <= pi / L,   high: theta >= 2 pi / L
            L: as `compared_length` (sec. 3.3.2)

The first VAF is the standard definition; the second is the formula in the paper: unbounded, and
ill-conditioned where sum(y) is near 0. Both over seen pairs, or on curves over distances. Per cent.
NaN where logits vary by rounding only, or sum to 0. The sums behind them need no map: see
causal_pairs and profiles.

This module knows nothing about labels and runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
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
    """Sum of the logits over prompts and seen pairs, without terms that the scheme adds."""
    components: Float[Tensor, "group component distance"]
    """Sum of components over prompts, seen pairs and the heads of a group: all heads, or one.
    """
    moments: Float[Tensor, "prompt head 6_components_and_5"]
    """`pair_sums` and `curve_sums`, of which `variance_shares` are made."""
    bands: Bool[Tensor, "band *head component"]
    """Mask of the components that belong to every band, perhaps of every head."""


@dataclass(frozen=True)
class ComponentSums(Reduction):
    """Profiles and variance accounted for of every component: gives `LayerComponents`."""

    training_length: int
    """L in tokens, which divides the components into bands."""
    first_token: int = 0
    last_token: int | None = None
    """Tokens `first_token` to `last_token` - 1 of a prompt take part."""
    of_each_head: bool = False
    """Whether a group is one head, or all heads."""

    def start(self, inputs: AttentionInputs) -> LayerComponents:
        """Sums of no head yet."""
        prompts, heads, length, width = inputs.queries.shape
        new = {"dtype": torch.float64, "device": inputs.queries.device}
        return LayerComponents(
            logits=torch.zeros(heads, length, **new),
            components=torch.zeros(heads if self.of_each_head else 1, width // 2, length, **new),
            moments=torch.zeros(prompts, heads, sum(_sizes(width // 2)), **new),
            bands=self._bands(inputs),
        )

    def ill_conditioned(self, inputs: AttentionInputs, block: HeadBlock) -> Tensor:
        """Return the heads whose logits vary little beside their terms or their components."""
        some = block.between(self.first_token, self.last_token)
        # Components may cancel in y: then float32 has lost digits although y itself varies enough
        return (
            torch.maximum(some.pairs.magnitude, some.pairs.component_squares.sum(-1))
            > some.well_conditioned
        )

    def add(self, result: LayerComponents, inputs: AttentionInputs, block: HeadBlock) -> None:
        """Profiles of the heads of a block, added up, and sums that tell their variance."""
        whole = block.between(self.first_token, self.last_token)
        for some, bands in _of_equal_bands(whole, result.bands):
            self._add(result, some, bands)

    def _bands(self, inputs: AttentionInputs) -> Bool[Tensor, "band *head component"]:
        frequencies = layer_frequencies(inputs)
        length = inputs.compared_length(self.training_length)
        return once(("bands", length), lambda: frequency_bands(frequencies, length), frequencies)

    def _add(self, result: LayerComponents, some: HeadBlock, bands: Tensor) -> None:
        """Add heads whose components are in the same bands."""
        profiles = some.profiles
        # index_add_ rather than an index: a block may hold a head once per prompt
        result.logits.index_add_(0, some.head.flatten(), some.by_distance.flatten(0, 1))
        if self.of_each_head:
            result.components.index_add_(0, some.head.flatten(), profiles.flatten(0, 1))
        else:
            result.components.add_(profiles.sum((0, 1)))
        # Shares follow once all heads are there, or all layers
        sums = torch.cat([*pair_sums(some, bands), *curve_sums(profiles, some.counts)], -1)
        over_heads(result.moments, some, sums)


def _sizes(components: int) -> list[int]:
    """Numbers of `pair_sums`, then of `curve_sums`."""
    return [*[components] * 3, len(BANDS), 1, *[components] * 3, 1]


def _of_equal_bands(
    block: HeadBlock, bands: Bool[Tensor, "band *head component"]
) -> Iterator[tuple[HeadBlock, Bool[Tensor, "band component"]]]:
    """Yield the heads of a block with their bands: all at once unless heads have their own."""
    if bands.ndim == 2:
        yield block, bands
        return
    known, kind = bands[:, :, 0].unique(dim=1, return_inverse=True)
    for number in kind[block.head].unique().tolist():
        some = kind[block.head] == number
        yield block.heads(some, block.queries.dtype), known[:, number].contiguous()


@dataclass(frozen=True)
class Moments:
    """Means over pairs, or distances, of parts of a quantity y. Float64."""

    variance: Float[Tensor, "... 1"]
    """Of y; 0 where y varies by rounding only."""
    of_part: Float[Tensor, "... part"]
    """Variances of the parts."""
    with_whole: Float[Tensor, "... part"]
    """Covariances of the parts with y."""

    @property
    def accounted(self) -> Float[Tensor, "... part"]:
        """Variance that a part accounts for: 0 for an empty one, `variance` for all of y."""
        return 2 * self.with_whole - self.of_part


def pair_sums(block: HeadBlock, bands: Bool[Tensor, "band component"]) -> list[Tensor]:
    """Return sums over the seen pairs of every head of a block, [key, member, ...].

    Args:
        block: Heads of a layer.
        bands: Mask of the components that belong to every band.

    Returns:
        Of C_r, C_r y and C_r^2 by component, of Y^2 by band, and of y^2, in units of q . k and their
        squares.
    """
    pairs = block.pairs
    return [
        block.profiles.sum(-1),
        pairs.with_logits,
        pairs.component_squares,
        pairs.squares_of(bands),
        pairs.square[..., None],
    ]


def curve_sums(
    profiles: Float[Tensor, "key member component distance"], counts: PairCounts
) -> list[Tensor]:
    """Return sums over distances of the mean curves of the components, [key, member, ...].

    Args:
        profiles: Sum of every component over the seen pairs at a distance, in units of q . k.
        counts: Numbers of seen pairs.

    Returns:
        Of c_r, c_r c and c_r^2 by component, and of c^2, c the sum of all c_r.
    """
    # Mean over the pairs at a distance; 0 where there is none
    curves = profiles * counts.shares
    whole = curves.sum(-2, keepdim=True)
    sums, with_whole = curves.sum(-1), (curves * whole).sum(-1)
    # square_ in place: curves were made here, and this is their last use
    return [sums, with_whole, curves.square_().sum(-1), whole.square().sum(-1)]


def variance_shares(
    sums: Float[Tensor, "layer prompt head 6_components_and_5"],
    counts: PairCounts,
    bands: Bool[Tensor, "band *head component"],
) -> dict[str, Float[Tensor, "layer prompt head component"]]:
    """Return shares of the variance of layers, in per cent.

    Args:
        sums: `pair_sums` and `curve_sums` of every head.
        counts: Numbers of seen pairs of the prompts.
        bands: Mask of the components that belong to every band, perhaps of every head.

    Returns:
        `vaf`, `vaf_printed`, `vaf_curve` and `vaf_curve_printed` [layer, prompt, head, component],
        `vaf_band` [layer, prompt, head, band]; NaN where the whole varies by rounding only, or sums
        to 0.
    """
    components = bands.shape[-1]
    parts = sums.split(_sizes(components), -1)
    of_pairs, of_curves = parts[:5], parts[5:]
    moments = component_moments(of_pairs, counts.total[:, None, None], bands)
    curves = curve_moments(of_curves, counts.distances[:, None])
    # In the order of `_SHARES`, and bands behind
    accounted, of_bands = moments.accounted.split([components, len(BANDS)], -1)
    totals, printed = of_pairs[0], of_curves[0]
    together = torch.cat([accounted, curves.accounted, totals, printed, of_bands], -1)
    wholes = [moments.variance, curves.variance, totals.sum(-1, True), printed.sum(-1, True)]
    whole = torch.cat([*wholes, moments.variance], -1)
    of_part = whole.index_select(-1, _wholes(components, sums.device))
    shares = (100 * together / of_part).masked_fill_(of_part == 0, torch.nan)
    by_name = shares.split([*[components] * len(_SHARES), len(BANDS)], -1)
    return dict(zip((*_SHARES, "vaf_band"), by_name, strict=True))


def component_moments(
    sums: Sequence[Tensor],
    count: Float[Tensor, "*any 1"],
    bands: Bool[Tensor, "band *head component"],
) -> Moments:
    """Return moments over the seen pairs.

    In units of q . k squared; NaN where a head sees no pair.

    Args:
        sums: `pair_sums`.
        count: Number of seen pairs.
        bands: Mask of the components that belong to every band.

    Returns:
        Moments whose last axis holds the components and, after them, the sums of the bands.
    """
    totals, with_logits, squares, of_bands, square = sums
    of_components = torch.stack([totals, with_logits]) / count
    # [*head, component, band]: sums of a band are sums over its components, squares are not
    member = once("member", lambda: bands.movedim(0, -1).to(torch.float64), bands)
    banded = (
        of_components @ member
        if bands.ndim == 2
        else (of_components[..., None, :] @ member[:, 0])[..., 0, :]
    )
    mean, product = torch.cat([of_components, banded], -1).unbind(0)
    whole = totals.sum(-1, keepdim=True) / count
    return Moments(
        variance_of(square / count, whole),
        # Not cut off at rounding: a component without variance has VAF near 0
        torch.cat([squares, of_bands], -1) / count - mean**2,
        product - mean * whole,
    )


def curve_moments(sums: Sequence[Tensor], count: Float[Tensor, "*any 1"]) -> Moments:
    """Return moments of the mean curves of the components over distances.

    Every distance that has a pair counts once.

    Args:
        sums: `curve_sums`.
        count: Number of these distances.

    Returns:
        The moments [..., component].
    """
    curves, with_whole, squares, square = sums
    # The sums of the components are that of the whole curve
    mean, of_whole = curves / count, curves.sum(-1, keepdim=True) / count
    return Moments(
        variance_of(square / count, of_whole),
        squares / count - mean**2,
        with_whole / count - mean * of_whole,
    )


def pair_components(
    inputs: AttentionInputs, query: int, key: int
) -> Float[Tensor, "prompt head component"]:
    """Return the components of one pair of tokens.

    A pair outside the causal mask or the window has components too.

    Args:
        inputs: A layer and a batch.
        query: Index of the query token.
        key: Index of the key token.

    Returns:
        Components [prompt, head, component], float64, in units of q . k.
    """
    at_query = inputs.rotated_queries[:, :, query].double()
    at_key = expand_heads(inputs.rotated_keys, inputs.heads)[:, :, key].double()
    return (at_query * at_key).unflatten(-1, (2, -1)).sum(-2)


def frequency_bands(
    frequencies: Float[Tensor, "*layer component"], length: int | Float[Tensor, "layer 1"]
) -> Bool[Tensor, "band *layer component"]:
    """Return the components of every band of `BANDS`.

    Args:
        frequencies: Radians per position; NaN is in no band.
        length: L in tokens: the length that a layer compares, see `compared_length`.

    Returns:
        Mask [band, *layer, component], in the order of `BANDS`.
    """
    lowest, highest = math.pi / length, 2 * math.pi / length
    rates = frequencies.abs()  # learned ones may turn backwards
    activated = (rates > lowest) & (rates < highest)
    return torch.stack((activated, rates <= lowest, rates >= highest))


def layer_frequencies(inputs: AttentionInputs) -> Float[Tensor, "*head component"]:
    """Return the frequencies by which a layer rotates.

    Args:
        inputs: A layer and a batch.

    Returns:
        Radians per position [component], or [head, 1, component] where heads have their own,
        float64; NaN where the layer has none (`AttentionInputs.has_frequencies`).
    """
    if inputs.frequencies is None or not inputs.has_frequencies:
        return _none(inputs.queries.shape[-1] // 2, inputs.valid.device)
    frequencies, device = inputs.frequencies, inputs.valid.device
    return once(
        ("float64", device),
        # A copy: a result that is its own key would keep itself alive in the cache for good
        lambda: frequencies.to(dtype=torch.float64, device=device, copy=True),
        frequencies,
    )


@lru_cache(maxsize=8)
def _none(components: int, device: torch.device) -> Float[Tensor, "component"]:
    return torch.full((components,), torch.nan, dtype=torch.float64, device=device)


@lru_cache(maxsize=8)
def _wholes(components: int, device: torch.device) -> Int[Tensor, "share"]:
    """Number of the whole of every share: of four kinds of the components, and of the bands."""
    kinds = [kind for kind in range(len(_SHARES)) for _ in range(components)]
    return torch.tensor([*kinds, *[len(_SHARES)] * len(BANDS)], device=device)
