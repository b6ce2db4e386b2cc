"""Which rotary pairs carry a head's logits, and how far they rotate (Position Generalization sec. 3.4, theorem 2).

Component r of a query or key is a complex number (dimensions r and r + d_head/2 before rotation); a pair of tokens
adds |k_r| |q_r| cos(start angle + theta_r distance) to the logit (fig. 4, 9). Observation 1 names slow dominating
components, without numbers; here component r is one where

    prominent   s query_norm key_norm >= `prominence` x their median over the head's components; s = attention_scaling^2
    stable      key_deviation <= `stability` x |mean key|
    slow        max_rotation <= `slow`
    still       max_rotation <= `still`, asked where the start angle is within `near_pi` of pi (the proof's case 1)

max_rotation is theta_r times L, min(window, training length), for schemes whose positions are the token index, and theta_r
times the largest |z_i - z_j| of a seen pair, over all prompts, for those that learn positions. Norms and means are
over the tokens of all prompts, deviations about the mean of each prompt. `closed_form_r` correlates the logits with
theorem 2's f + g from the slow dominating components that the prompt itself has (see closed_form); NaN where there
is none. Layers that rotate nothing have no rotary pairs: NaN, and slow_dominating -1.

Knows nothing about what a prompt says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.closed_form import ClosedForm, Semantic
from repo_interp.measures.kernels.heads import Reduction, reduced
from repo_interp.measures.kernels.memory import CORE, memory_for
from repo_interp.measures.kernels.rotation_angles import largest_difference
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.layouts import LEARNED
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import PositiveOrZero, Tokens

_MEANS = {
    "query_norm": ("mean norm of the query's pair", "1"),
    "key_norm": ("mean norm of the key's pair", "1"),
    "query_mean_re": ("real part of the mean query pair", "1"),
    "query_mean_im": ("imaginary part of the mean query pair", "1"),
    "key_mean_re": ("real part of the mean key pair", "1"),
    "key_mean_im": ("imaginary part of the mean key pair", "1"),
    "query_deviation": ("mean distance of the query's pair from its mean in the prompt", "1"),
    "key_deviation": ("mean distance of the key's pair from its mean in the prompt", "1"),
}
_OTHERS = {
    "start_angle": ("angle from the mean key pair to the mean query pair", "rad"),
    "max_rotation": ("largest rotation of the pair", "rad"),
    "slow_dominating": ("whether the component is slow dominating: 1 yes, 0 no, -1 no rotary pairs", "1"),
    "closed_form_r": ("correlation of logits and f + g from the slow dominating components", "1"),
}


@dataclass(frozen=True)
class PairStatistics:
    """Means over tokens of the pairs of a head, one entry per component, float64."""

    query_norm: Float[Tensor, "*head component"]
    key_norm: Float[Tensor, "*head component"]
    query_mean: Complex[Tensor, "*head component"]
    key_mean: Complex[Tensor, "*head component"]
    query_deviation: Float[Tensor, "*head component"]
    key_deviation: Float[Tensor, "*head component"]


@dataclass(frozen=True)
class Rotation(Measure, needs=Needs(nan=("closed_form_r", "max_rotation"))):
    """The measure `rotation`."""

    training_length: Tokens | None = None
    """Tokens that the model was trained on; none: `analyze` takes it from the checkpoint, and without it layers with index
    positions are not measured."""
    prominence: PositiveOrZero = 2.0
    """Least norm product of a prominent component, in medians of its head."""
    stability: PositiveOrZero = 0.5
    """Largest deviation of a stable component, in lengths of its mean key."""
    slow: PositiveOrZero = 2 * math.pi
    """Radians: at most one whole rotation."""
    still: PositiveOrZero = math.pi / 4
    """Radians: how little a component that starts near $\\pi$ may turn."""
    near_pi: Annotated[float, Interval(ge=0, le=math.pi)] = math.pi / 4
    """Radians: how near to $\\pi$ counts as near."""
    semantic: Semantic = "signed"
    """The g of the closed form: "signed" or "printed"."""
    name: str = "rotation"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Sums over tokens of each component; rotations and closed-form correlations of each prompt."""
        tokens = inputs.valid.sum(-1).to(torch.float64)
        if _rotates(inputs):
            statistics, rotation, closed_form = self._pairs(inputs)
            (correlation,), weight = reduced(inputs, [closed_form]), tokens[:, None, None]
        else:
            nothing = torch.full((*inputs.queries.shape[:2], inputs.queries.shape[-1] // 2), torch.nan, dtype=torch.float64)
            statistics, rotation, correlation, weight = _nothing(nothing), nothing, nothing[..., 0], 1
        means = {
            "query_norm": statistics.query_norm,
            "key_norm": statistics.key_norm,
            "query_mean_re": statistics.query_mean.real,
            "query_mean_im": statistics.query_mean.imag,
            "key_mean_re": statistics.key_mean.real,
            "key_mean_im": statistics.key_mean.imag,
            "query_deviation": statistics.query_deviation,
            "key_deviation": statistics.key_deviation,
        }
        of_component = ("layer", "head", "component")
        components = range(rotation.shape[-1])
        sums = {name: (of_component, (weight * mean).sum(0)) for name, mean in means.items()}
        others = {"tokens": (("layer",), tokens.sum()), "scaling": (("layer", "component"), tokens.sum() * inputs.pair_scaling)}
        per_prompt = {
            "max_rotation": (("prompt", *of_component), rotation),
            "closed_form_r": (("prompt", "layer", "head"), correlation),
        }
        return Statistics(
            per_prompt=arrays(inputs, per_prompt, component=components),
            sums=arrays(inputs, sums | others, component=components),
        )

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[Reduction, ...]:
        """The closed form's correlation with the logits."""
        return (self._pairs(inputs)[2],) if _rotates(inputs) else ()

    def _pairs(self, inputs: AttentionInputs) -> tuple[PairStatistics, Tensor, ClosedForm]:
        """Statistics and rotations of pairs, and the closed form of those that are slow dominating: kept with `inputs`."""
        if self not in inputs.results:
            statistics, rotation = pair_statistics(inputs), max_rotation(inputs, self.training_length)
            chosen = self.slow_dominating(statistics, rotation, inputs.pair_scaling)
            inputs.results[self] = statistics, rotation, ClosedForm(chosen, statistics.key_mean, self.semantic)
        return inputs.results[self]

    def slow_dominating(
        self, pairs: PairStatistics, rotation: Float[Tensor, "*head component"], scaling: Float[Tensor, "*any component"]
    ) -> Bool[Tensor, "*head component"]:
        """Whether each component is prominent, stable, slow, and still where it starts near pi."""
        product = pairs.query_norm * pairs.key_norm * scaling
        prominent = product >= self.prominence * product.median(-1, keepdim=True).values
        stable = pairs.key_deviation <= self.stability * pairs.key_mean.abs()
        start = (pairs.query_mean * pairs.key_mean.conj()).angle().abs()
        still = (torch.pi - start > self.near_pi) | (rotation <= self.still)
        return prominent & stable & (rotation <= self.slow) & still

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `rotation` of a run."""
        sums, per_prompt = statistics.sums, statistics.per_prompt
        group = {name: sums[name] / sums["tokens"] for name in _MEANS}
        key_mean = group["key_mean_re"] + 1j * group["key_mean_im"]
        query_mean = group["query_mean_re"] + 1j * group["query_mean_im"]
        rotation = per_prompt["max_rotation"].max("prompt")
        pairs = PairStatistics(
            *(torch.from_numpy(group[name].values) for name in ("query_norm", "key_norm")),
            *(torch.from_numpy(mean.values) for mean in (query_mean, key_mean)),
            *(torch.from_numpy(group[name].values) for name in ("query_deviation", "key_deviation")),
        )
        rotation = rotation.transpose(*key_mean.dims)
        scaling = torch.from_numpy((sums["scaling"] / sums["tokens"]).values)[:, None]
        slow = self.slow_dominating(pairs, torch.from_numpy(rotation.values), scaling).numpy().astype(np.int8)
        product = query_mean * key_mean.conj()
        group["start_angle"] = product.copy(data=np.angle(product.values))
        group["max_rotation"] = rotation
        group["slow_dominating"] = rotation.copy(data=np.where(np.isnan(rotation.values), -1, slow).astype(np.int8))
        group["closed_form_r"] = per_prompt["closed_form_r"]
        return described_group(group, _MEANS | _OTHERS)


def _rotates(inputs: AttentionInputs) -> bool:
    return inputs.frequencies is not None and inputs.positions is not None


def _nothing(nan: Float[Tensor, "*head component"]) -> PairStatistics:
    nowhere = torch.complex(nan, nan)
    return PairStatistics(nan, nan, nowhere, nowhere, nan, nan)


def pair_statistics(inputs: AttentionInputs) -> PairStatistics:
    """Statistics [prompt, head, component] over the valid tokens of every prompt; NaN where it has none."""
    queries = _moments(inputs.queries, inputs.valid)
    keys = [expand_heads(part, inputs.heads) for part in _moments(inputs.keys, inputs.valid)]
    ordered = [part for both in zip(queries, keys, strict=True) for part in both]
    return PairStatistics(*ordered)


def max_rotation(inputs: AttentionInputs, training_length: int | None) -> Float[Tensor, "prompt head component"]:
    """Largest rotation of each component in radians: by learned positions, or over the length that the layer compared in training.

    InputError where the training length is needed and not given.
    """
    assert inputs.frequencies is not None and inputs.positions is not None
    if inputs.scheme in LEARNED:
        reach = expand_heads(largest_difference(inputs.positions, inputs.valid, inputs.window), inputs.heads)
    elif training_length is None:
        raise InputError("the largest rotation of RoPE depends on the training length; give training_length in tokens")
    else:
        shape, length = inputs.queries.shape[:2], float(inputs.compared_length(training_length))
        reach = torch.full(shape, length, dtype=torch.float64, device=inputs.valid.device)
    return reach[..., None] * inputs.frequencies.to(reach)


def _moments(
    features: Float[Tensor, "prompt head token d_head"], valid: Bool[Tensor, "prompt token"]
) -> tuple[
    Float[Tensor, "prompt head component"],
    Complex[Tensor, "prompt head component"],
    Float[Tensor, "prompt head component"],
]:
    """Mean norm, mean, and mean distance from the mean, of each pair over the valid tokens."""
    prompts, heads, tokens, width = features.shape
    exact = torch.float64 if features.dtype == torch.float64 else torch.float32
    count = valid.sum(-1, dtype=torch.float64)[:, None, None]
    at_once = max(1, memory_for(features.device, CORE) // (prompts * heads * width * exact.itemsize))
    stretches = [slice(start, start + at_once) for start in range(0, tokens, at_once)]
    hidden = None if bool(valid.all()) else ~valid[:, None, :, None]

    def known(of: Tensor, some: slice) -> Tensor:
        return of if hidden is None else of.masked_fill(hidden[:, :, some], 0)

    norm, mean, deviation = 0.0, 0.0, 0.0
    for some in stretches:
        part = known(features[:, :, some].to(exact), some)
        norm = norm + _pair_norm(part).sum(-2).to(torch.float64) / count
        mean = mean + part.sum(-2).to(torch.float64) / count
    assert isinstance(mean, Tensor)
    level = mean[..., None, :].to(exact)
    for some in stretches:
        distance = known(_pair_norm(features[:, :, some].to(exact) - level), some)
        deviation = deviation + distance.sum(-2).to(torch.float64) / count
    assert isinstance(norm, Tensor) and isinstance(deviation, Tensor)
    return norm, torch.complex(*mean.chunk(2, -1)), deviation


def _pair_norm(features: Float[Tensor, "... d_head"]) -> Float[Tensor, "... component"]:
    first, second = features.chunk(2, -1)
    return (first * first).addcmul_(second, second).sqrt_()
