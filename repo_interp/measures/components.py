"""The logit of a causal pair as a sum of rotary components, one per frequency.

HoPE sec. 3.3, eq. 4-5, fig. 3, 6-8.

    C_r(i, j) = (q_r k_r + q_r' k_r') cos(theta_r D) + (q_r' k_r - q_r k_r') sin(theta_r D),
            D = z_j - z_i
    y = sum_r C_r

q', k' the second half of the pair, z the index or the learned position, all times
attention_scaling^2. Logits are linear and without 1/sqrt(d_head), as in the paper: neither the
logit's scale nor a soft cap is in them. With L the `band_length` of a layer, min(window, training
length), components are activated where pi/L < theta_r < 2 pi/L, low where theta_r <= pi/L, else
high.

The bound of long-term decay (Su et al. 2021, sec. 3.4.3) follows from the frequencies alone:

    |y| <= max_r |h_{r+1} - h_r| sum_i |S_i(d)|,  S_i(d) = sum_{r < i} exp(i theta_r d)
    decay_bound = mean over i of |S_i(d)|,        h_r the product of the pairs, d in positions

It falls with d for RoPE's frequencies; pairs that do not rotate (HoPE) keep it up.

Layers that rotate nothing, or whose pairs have positions of their own, have no frequency (NaN), no
bands and no rotation angles; their components are the pairs of dimensions (r, r + d_head/2) all the
same. Prompts with images have frequencies, and no rotation angles. The term of a scheme in its
logits (ALiBi, KERPLE, FIRE, CoPE) belongs to the mean logit by distance, and is shown apart as
well; it is in no component, and VAF speaks of the part that is.

Prompts of one run may have different frequencies, where these depend on the length of a pass
(dynamic NTK, longrope): then there is none for all (NaN), and `prompt_frequency` has those of every
prompt.

This module knows nothing about models; the training length is given to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.fitting import AnyPrompt, Layers
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.gate_sums import position_bias_sums
from repo_interp.measures.kernels.heads import Reduction, reduced, tokens_between
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.rotary_components import (
    BANDS,
    ComponentSums,
    frequency_bands,
    layer_frequencies,
    variance_shares,
)
from repo_interp.measures.kernels.rotation_angles import (
    EDGES,
    PER_SIDE,
    RotationAngles,
    largest_difference,
    rotation_angles,
)
from repo_interp.measures.kernels.seen_pairs import is_whole, once, pair_counts
from repo_interp.measures.labels import Arrays, arrays, described_group, label_of
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import Tokens, TokensOrNone

_SAME = 1e-10
"""Variance of a frequency over prompts, relative to its square, that rounding may make of equal
ones.
"""
STILL = 0.1
"""Radians within which a component counts as unrotated."""

_BY_PROMPT = {
    "vaf": "variance of the logits that a component accounts for [%]",
    "vaf_printed": "share of the logits' sum that is a component's (VAF as printed) [%]",
    "vaf_curve": "variance of the mean logit by distance that a component's accounts for [%]",
    "vaf_curve_printed": "share of the sum of the mean logit by distance that is a component's [%]",
    "vaf_band": "variance of the logits that a band of components accounts for [%]",
    "position_reach": "largest difference of the positions of a seen pair [positions]",
    "still_share": f"share of components that no seen pair turns by more than {STILL} rad",
}
_HEADS = "prompt layer head"
_SHAPES = {
    name: _HEADS if name in ("position_reach", "still_share") else f"{_HEADS} component"
    for name in _BY_PROMPT
} | {"vaf_band": f"{_HEADS} band"}
"""Axes of the variables of a prompt."""
_AVERAGES = {
    f"{name}_{part}": (f"{label_of(text)[0]}, {words} over prompts", label_of(text)[1])
    for name, text in _BY_PROMPT.items()
    for part, words in (("mean", "mean"), ("deviation", "standard deviation"))
}
_FREQUENCIES = {
    "prompt_frequency": (
        "frequency of a rotary component in a prompt, where prompts have different ones "
        "[rad per position]"
    )
}

_SUMMARIES = {
    "frequency": "frequency of a rotary component [rad per position]",
    "head_frequency": "frequency of a rotary component of a head [rad per position]",
    "band_length": "L of the bands: the training length, or a shorter window of the layer [tokens]",
    "activated": "frequency between pi and 2 pi over L",
    "low_frequency": "frequency of at most pi over L",
    "decay_bound": "bound of the logit's size by distance, over that of its pairs",
    "distance_pairs": (
        "pairs of tokens at a distance; a layer with a window sees those within it [pairs]"
    ),
    "logit_by_distance": "mean logit of the pairs at a distance, with what the scheme adds [q·k]",
    "position_logit_by_distance": "mean of what the scheme adds to the logits at a distance [q·k]",
    "component_by_distance": "mean component of the logits at a distance, over heads [q·k]",
    "head_component_by_distance": "mean component of the logits at a distance [q·k]",
    "turn_share": "share of pairs by how far positions turn a component, up to turn_upper",
    "turn_mean": "mean turn of a component over pairs [rad]",
    "turn_upper": "upper end of a bin of turns [rad]",
}


@dataclass(frozen=True)
class Components(Measure):
    """The measure `components`."""

    training_length: Tokens | None = None
    """Largest L in tokens; none: `analyze` takes it from the checkpoint, and without it nothing is
    measured.
    """
    first_token: TokensOrNone = 0
    """Tokens left out at the start of a prompt: 1 drops the beginning of the sequence."""
    last_token: Tokens | None = None
    """Tokens of a prompt from this number on are left out; none: to the end."""
    curves: Literal["mean", "head"] = "mean"
    """Components by distance: their "mean" over heads, or also each "head"."""
    prompts: Literal["each", "mean"] = "each"
    """VAF of "each" prompt, or "mean" and deviation over prompts: then memory does not grow with
    their number.
    """
    sampled_per_side: Annotated[int, Interval(ge=1, le=65_536)] = PER_SIDE
    """Queries and distances looked at for the histogram of rotation angles, where a prompt has
    more.
    """
    name: str = "components"
    describes: ClassVar[str] = "logits by rotary frequency"

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InputError: A field is out of its range, or `first_token` and `last_token` leave no
                token.
        """
        super().__post_init__()
        if self.last_token is not None and self.last_token <= self.first_token:
            raise InputError(
                f"tokens {self.first_token} to {self.last_token} are none; wanted "
                "first_token < last_token"
            )

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether all positions are the token index, or none."""
        return layers.fixed

    @property
    def needs(self) -> Needs:
        """Ratios, correlations and values that a prompt, layer or head lacks may be NaN."""
        # One token must be left after `first_token` are dropped
        return Needs(tokens=self.first_token + 1, by_pair=True, nan=(*_BY_PROMPT, *_FREQUENCIES))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The fields, and the angle within which a component counts as unrotated."""
        last = "the end" if self.last_token is None else self.last_token
        return {**super().parameters, "last_token": last, "still_angle": STILL}

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Frequencies and turns, where pairs have positions of their own."""
        if inputs.one_position:
            return None
        if not inputs.differ_by_pair:
            return Gap("give queries and keys positions of their own", "no turns")
        if inputs.by_axis:
            return Gap("turn by the axes of an image, in its prompts", "no turns")
        return Gap(
            "give every rotary pair its own position",
            "no frequencies, bands, turns and decay bounds",
        )

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return sums of profiles over prompts and pairs, and VAF per prompt.

        Raises:
            InputError: The training length is missing.
        """
        # The same restriction that `ComponentSums` makes, for angles and counts of pairs
        tokens = tokens_between(inputs.valid, self.first_token, self.last_token)
        frequencies, window = layer_frequencies(inputs), inputs.window
        by_head = frequencies.ndim == 3
        # Of the first head, where heads have their own: `conclude` says whether all agree
        shared = frequencies[0, 0] if by_head else frequencies
        (measured,) = reduced(inputs, self.reductions(inputs, spans))
        assert self.training_length is not None
        found = jointly(
            _of_layers,
            {"moments": measured.moments} | _places(inputs, tokens, by_head),
            [self, tokens, window, frequencies, measured.bands, inputs.has_frequencies],
        )

        def of_prompts() -> Tensor:
            # Mean and variance over prompts tell at the end whether all prompts had one frequency
            return torch.stack([shared, shared.square()]) * len(tokens)

        def prompt_frequency() -> Tensor:
            some = torch.full_like(shared, torch.nan) if by_head else shared
            return some.expand(len(tokens), -1).float()

        def pairs() -> Tensor:
            return pair_counts(tokens, window).distance.sum(0)

        sums: Any = {
            "turn_pairs": ("layer head component turn", found["turn_pairs"]),
            "difference_sum": ("layer head", found["difference_sum"]),
            "prompts": ("layer", np.array(float(len(tokens)))),
            ("frequency_sum", "frequency_squares"): (
                "layer component",
                once(("sums", len(tokens)), of_prompts, shared),
            ),
            "length_sum": (
                "layer",
                # A sum, so that batches of any size merge; `conclude` divides by the prompts
                np.array(float(len(tokens) * inputs.compared_length(self.training_length))),
            ),
            "pairs": ("layer distance", once(("pairs of prompts", window), pairs, tokens)),
            "logit_sum": ("layer head distance", measured.logits),
            "position_logit_sum": (
                "layer head distance",
                np.zeros((inputs.heads, tokens.shape[1]))
                if inputs.position_logits is None
                else position_bias_sums(inputs, tokens),
            ),
        }
        if self.curves == "head":
            sums["component_sum"] = "layer head component distance", measured.components
        else:
            sums["component_sum",] = "layer component distance", measured.components
        if by_head:
            of_heads = frequencies[:, 0] * len(tokens)
            sums["head_frequency_sum"] = "layer head component", of_heads
        if self.prompts == "mean":
            sums |= {
                f"{name}_{part}": (axes.removeprefix("prompt "), found[f"{name}_{part}"])
                for name, axes in _SHAPES.items()
                for part in ("count", "total", "squares")
            }
            return Statistics(sums=_labelled(inputs, sums))
        per_prompt: Any = {name: (axes, found[name]) for name, axes in _SHAPES.items()}
        # Kept for all prompts, since only the merged run tells whether they differ; dropped there
        # if not
        name = "prompt frequency", len(tokens), by_head
        per_prompt["prompt_frequency"] = (
            "prompt layer component",
            once(name, prompt_frequency, shared),
        )
        return Statistics(per_prompt=_labelled(inputs, per_prompt), sums=_labelled(inputs, sums))

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[Reduction, ...]:
        """Ask for profiles and variance accounted for of all components.

        Raises:
            InputError: The training length is missing.
        """
        if self.training_length is None:
            raise InputError(
                "components are banded by the training length; give training_length in tokens"
            )
        return (
            ComponentSums(
                self.training_length, self.first_token, self.last_token, self.curves == "head"
            ),
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `components` of a run."""
        sums, labels = statistics.variables()
        pairs = sums["pairs"].where(sums["pairs"] > 0)
        frequency = sums["frequency_sum"] / sums["prompts"]
        variance = sums["frequency_squares"] / sums["prompts"] - frequency**2
        differ = (variance > _SAME * frequency**2).any("component")
        # A mean of different frequencies is the frequency of no prompt
        frequency = frequency.where(~differ)
        length = sums["length_sum"] / sums["prompts"]
        of_layers = torch.from_numpy(length.values)[:, None]
        activated, low, _ = frequency_bands(torch.from_numpy(frequency.values), of_layers).numpy()
        component, rotated = sums["component_sum"] / pairs, sums["turn_pairs"].sum("turn")
        per_head = {"head_component_by_distance": component} if self.curves == "head" else {}
        of_turns = frequency
        if "head_frequency_sum" in sums:
            of_heads = sums["head_frequency_sum"] / sums["prompts"]
            # In other layers of the run all heads share theirs
            of_turns = per_head["head_frequency"] = of_heads.where(of_heads.notnull(), frequency)
            frequency = frequency.where(~((of_turns - frequency) != 0).any(("head", "component")))
        group = per_head | {
            "frequency": frequency,
            "band_length": length,
            "decay_bound": _decay_bound(frequency.values, labels["distance"]),
            "activated": frequency.copy(data=activated),
            "low_frequency": frequency.copy(data=low),
            # A layer with a window sees fewer pairs; the maximum is from a layer without a window
            "distance_pairs": sums["pairs"].max("layer"),
            "logit_by_distance": (sums["logit_sum"] + sums["position_logit_sum"]) / pairs,
            "position_logit_by_distance": sums["position_logit_sum"] / pairs,
            "component_by_distance": component.mean("head")
            if self.curves == "head"
            # Summed over heads already
            else component / sums["logit_sum"].sizes["head"],
            "turn_share": sums["turn_pairs"] / rotated.where(rotated > 0),
            "turn_mean": sums["difference_sum"] / pairs.sum("distance") * abs(of_turns),
            "turn_upper": ("turn", [*EDGES[1:], np.inf]),
        }
        if self.prompts == "mean":
            return described_group(group | _average(sums), _SUMMARIES | _AVERAGES, labels)
        names = _BY_PROMPT | (_FREQUENCIES if bool(differ.any()) else {})
        return described_group(sums | group, _SUMMARIES | names, labels)


def _decay_bound(frequency: np.ndarray, distance: np.ndarray) -> xr.Variable:
    """Mean over i of |S_i(d)| [layer, distance]; NaN without rotation."""
    # Most layers rotate alike: one bound for each different set of frequencies
    rates, which = np.unique(frequency, axis=0, return_inverse=True)
    angles = rates[:, None] * distance[:, None]
    # S_i(d) are running sums over components, [set of frequencies, distance, component]
    bound = np.abs(np.exp(1j * angles).cumsum(-1)).mean(-1)[which.reshape(-1)]
    return xr.Variable(("layer", "distance"), bound)


def _labelled(inputs: AttentionInputs, record: Mapping[Any, Any]) -> Arrays:
    components, distances = inputs.queries.shape[-1] // 2, inputs.valid.shape[1]
    return arrays(
        inputs,
        record,
        component=range(components),
        distance=range(distances),
        band=BANDS,
        turn=EDGES,
    )


def _places(
    inputs: AttentionInputs, tokens: Bool[Tensor, "prompt token"], by_head: bool
) -> dict[str, Tensor]:
    """Positions and their reach, and the prompts in which they differ by pair; nothing without."""
    if inputs.positions is None or not inputs.has_frequencies:
        return {}
    positions, found = inputs.positions, {}
    if inputs.differ_by_pair:
        # No single difference rotates all pairs of an image; other text in the batch has one
        found["differ"] = (positions != positions[..., :1]).flatten(1).any(1)
        positions = positions[..., 0]
    if by_head:
        # A head at a time, with its frequencies
        positions = expand_heads(positions, inputs.heads)
    if inputs.key_positions is not None:
        # Pairs turn by the difference of two kinds of positions
        found["differ"] = torch.ones_like(inputs.valid[:, 0])
    reach = largest_difference(positions, tokens, inputs.window)
    return found | {"positions": positions, "reach": reach}


def _of_layers(
    measure: Components,
    tokens: Bool[Tensor, "prompt token"],
    window: int | None,
    frequencies: Float[Tensor, "*head component"],
    bands: Bool[Tensor, "band *head component"],
    banded: bool,
    moments: Float[Tensor, "layer prompt head moment"],
    **places: Tensor,
) -> dict[str, Tensor]:
    """Angles of layers over all prompts, and the variables of each prompt, or their sums."""
    angles, (reach, unrotated) = _angles(
        tokens, window, frequencies, measure.sampled_per_side, len(moments), **places
    )
    shares = variance_shares(moments, pair_counts(tokens, window), bands)
    if not banded:
        # Components have no frequency to be banded by
        shares["vaf_band"] = torch.full_like(shares["vaf_band"], torch.nan)
    by_prompt = {"position_reach": reach, "still_share": unrotated} | shares
    return {"turn_pairs": angles.pairs, "difference_sum": angles.difference} | (
        # float32 for the file; sums over prompts stay in float64
        {name: values.float() for name, values in by_prompt.items()}
        if measure.prompts == "each"
        else _sum_over_prompts(by_prompt)
    )


def _angles(
    tokens: Bool[Tensor, "prompt token"],
    window: int | None,
    frequencies: Float[Tensor, "*head component"],
    per_side: int,
    layers: int,
    positions: Float[Tensor, "layer prompt any token"] | None = None,
    reach: Float[Tensor, "layer prompt any"] | None = None,
    differ: Bool[Tensor, "layer prompt"] | None = None,
) -> tuple[RotationAngles, tuple[Tensor, Tensor]]:
    """Return rotation angles of layers over all prompts; reach and share of still pairs per prompt.

    NaN without one position.
    """
    new = {"dtype": torch.float64, "device": tokens.device}
    if positions is None or reach is None:
        sums = RotationAngles(
            torch.zeros(layers, 1, frequencies.shape[-1], len(EDGES), **new),
            torch.zeros(layers, 1, **new),
        )
        # No rotation, or positions that differ by rotary pair
        return sums, (nothing := torch.full((layers, len(tokens), 1), torch.nan, **new), nothing)
    # Rows of all layers beside those of a prompt: they are judged alike
    rows = positions.movedim(0, 1)
    several = [(rows, frequencies)]
    if frequencies.ndim == 3:
        several = [(rows[:, :, head, None], rates[0]) for head, rates in enumerate(frequencies)]
        frequencies = frequencies[:, 0]
    found = [
        rotation_angles(some.flatten(1, 2), rates, tokens, window, per_side)
        for some, rates in several
    ]
    counts, differences = (
        torch.cat([part.unflatten(0, (layers, -1)) for part in parts], 1)
        for parts in zip(*((each.pairs, each.difference) for each in found), strict=True)
    )
    unrotated = (reach[..., None] * frequencies.abs() <= STILL).to(torch.float64).mean(-1)
    if not is_whole(tokens):
        # -inf: a prompt in which no pair is seen
        none = reach.isinf()
        reach, unrotated = (part.masked_fill(none, torch.nan) for part in (reach, unrotated))
    if differ is not None:
        reach, unrotated = (
            part.masked_fill(differ[..., None], torch.nan) for part in (reach, unrotated)
        )
        unknown = torch.where(differ.any(1), torch.nan, 0.0)[:, None]
        counts, differences = counts + unknown[..., None, None], differences + unknown
    return RotationAngles(counts, differences), (reach, unrotated)


def _sum_over_prompts(by_prompt: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return count, sum and sum of squares of values over prompts, NaN left out."""
    sums = {}
    for name, values in by_prompt.items():
        known = ~values.isnan()
        # Only NaN means absent: infinities stay visible in the sums
        values = values.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
        sums[f"{name}_count"] = known.sum(1).to(torch.float64)
        sums[f"{name}_total"] = values.sum(1)
        sums[f"{name}_squares"] = values.square().sum(1)
    return sums


def _average(sums: Mapping[str, xr.Variable]) -> dict[str, xr.Variable]:
    """Return mean and standard deviation over prompts from the sums of `_sum_over_prompts`."""
    averages = {}
    for name in _BY_PROMPT:
        total, squares, count = (sums[f"{name}_{part}"] for part in ("total", "squares", "count"))
        known = count.where(count > 0)
        mean = averages[f"{name}_mean"] = total / known
        # Of a constant, rounding may leave a variance below 0
        averages[f"{name}_deviation"] = (squares / known - mean**2).clip(min=0) ** 0.5
    return averages
