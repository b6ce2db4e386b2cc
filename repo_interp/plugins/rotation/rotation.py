"""Rotary pairs that dominate a head's logits, and how far they rotate.

Position Generalization sec. 3.4, theorem 2.

Component r of a query or key is a complex number (dimensions r and r + d_head/2 before rotation); a
pair of tokens adds |k_r| |q_r| cos(start angle + theta_r distance) to the logit (fig. 4, 9).
Observation 1 names slow dominating components, without numbers. Here component r is one if

    prominent   s query_norm key_norm >= `prominence` x their median over the head's components;
                s = attention_scaling^2
    stable      key_deviation <= `stability` x |mean key|
    slow        max_rotation <= `slow`
    still       max_rotation <= `still`, required only if the start angle is within `near_pi` of pi
                (the proof's case 1)

For layers with the token index as position, max_rotation is theta_r L with L = min(window, training
length). For layers that learn positions it is theta_r times the largest |z_i - z_j| of a seen pair
over all prompts. Norms and means are over the tokens of all prompts; deviations are from a prompt's
mean. `closed_form_r` correlates the logits with theorem 2's f + g from the slow dominating
components of the same prompt (see closed_form); it is NaN without such components. Layers without
rotation have NaN, and slow_dominating -1.

`query_dimension_norm` and `key_dimension_norm` are the mean |q_d|, |k_d| of dimension d ("massive
values" are in few dimensions).

This module knows nothing about the contents of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.heads import Reduction, reduced
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.rotation_angles import largest_difference
from repo_interp.measures.kernels.seen_pairs import extents, is_whole, once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.plugins.rotation.closed_form import ClosedForm, Semantic
from repo_interp.positions.rotary import expand_heads
from repo_interp.runtime.memory import CORE, memory_for
from repo_interp.values import PositiveOrZero, Tokens

_MEANS = {
    "query_norm": "mean norm of the query's pair",
    "key_norm": "mean norm of the key's pair",
    "query_mean_re": "real part of the mean query pair",
    "query_mean_im": "imaginary part of the mean query pair",
    "key_mean_re": "real part of the mean key pair",
    "key_mean_im": "imaginary part of the mean key pair",
    "query_deviation": "mean distance of the query's pair from its mean in the prompt",
    "key_deviation": "mean distance of the key's pair from its mean in the prompt",
}
_DIMENSIONS = {
    "query_dimension_norm": "mean size of the query's number in a dimension",
    "key_dimension_norm": "mean size of the key's number in a dimension",
}
"""Pair r has the dimensions r and r + half the axis."""
_HALVES = ("first", "second")
# Order of the rows of `PairStatistics`: six of the queries, then six of the keys
_ORDER = [
    name
    for side in ("query", "key")
    for name in (*_MEANS, *(f"{side}_{half}" for half in _HALVES))
    if name.startswith(side)
]
_OTHERS = {
    "start_angle": "angle from the mean key pair to the mean query pair [rad]",
    "max_rotation": "largest rotation of the pair [rad]",
    "slow_dominating": "whether the component is slow dominating: 1 yes, 0 no, -1 no rotary pairs",
    "closed_form_r": "correlation of logits and f + g from the slow dominating components",
}


@dataclass(frozen=True)
class PairStatistics:
    """Means over tokens of the pairs of a head, one entry per component, float64."""

    queries: Float[Tensor, "6 *head component"]
    """Mean norm, mean (real and imaginary part), mean distance from the mean, and the mean absolute
    values of both parts.
    """
    keys: Float[Tensor, "6 *head component"]


@dataclass(frozen=True)
class Rotation(Measure, needs=Needs(nan=("closed_form_r", "max_rotation"))):
    """The measure `rotation`."""

    training_length: Tokens | None = None
    """Tokens that the model was trained on; none: `analyze` takes it from the checkpoint, and
    without it layers with index positions are not measured.
    """
    prominence: PositiveOrZero = 2.0
    """Least norm product of a prominent component, in medians of its head."""
    stability: PositiveOrZero = 0.5
    """Largest deviation of a stable component, in lengths of its mean key."""
    slow: PositiveOrZero = 2 * math.pi
    """Largest rotation of a slow component, in radians; at most one whole turn."""
    still: PositiveOrZero = math.pi / 4
    """Largest rotation of a component that starts near $\\pi$, in radians."""
    near_pi: Annotated[float, Interval(ge=0, le=math.pi)] = math.pi / 4
    """Largest distance of a start angle from $\\pi$ that counts as near, in radians."""
    semantic: Semantic = "signed"
    """The g of the closed form: "signed" or "printed"."""
    name: str = "rotation"
    describes: ClassVar[str] = "slow rotary pairs that dominate"
    topic: ClassVar[str] = "generalization"

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Layers that do not rotate."""
        return None if _rotates(inputs) else Gap("do not rotate")

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return sums over tokens per component, and rotations and correlations per prompt."""
        valid, scaling = inputs.valid, inputs.pair_scaling
        tokens = once("tokens", lambda: valid.sum(-1, dtype=torch.float64)[:, None, None], valid)
        total = float(sum(count for _, _, count in extents(valid)))
        if _rotates(inputs):
            statistics, rotation, closed_form = self._pairs(inputs)
            (correlation,), weight = reduced(inputs, [closed_form]), tokens
        else:
            shape = (*inputs.queries.shape[:2], inputs.queries.shape[-1] // 2)
            rotation = torch.full(shape, torch.nan, dtype=torch.float64, device=tokens.device)
            # NaN for the six statistics of queries and of keys
            nothing = rotation.expand(6, *shape)
            statistics, correlation, weight = PairStatistics(nothing, nothing), rotation[..., 0], 1
        found = jointly(_sums, vars(statistics), [weight])
        components = range(rotation.shape[-1])
        sums = {tuple(_ORDER): ("layer head component", found["means"])}
        # Weighted by tokens like the norms: division by the sum of tokens restores it
        weighted = once(("weighted", total), lambda: total * scaling, scaling)
        others = {
            "tokens": ("layer", np.array(total)),
            "scaling": ("layer component", weighted),
        }
        per_prompt = {
            "max_rotation": ("prompt layer head component", rotation),
            "closed_form_r": ("prompt layer head", correlation),
        }
        return Statistics(
            per_prompt=arrays(inputs, per_prompt, component=components),
            sums=arrays(inputs, sums | others, component=components),
        )

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[Reduction, ...]:
        """The closed form's correlation with the logits."""
        # Called before `observe`, which calls `_pairs` again: `_pairs` caches one layer
        return (self._pairs(inputs)[2],) if _rotates(inputs) else ()

    def _pairs(self, inputs: AttentionInputs) -> tuple[PairStatistics, Tensor, ClosedForm]:
        """Return statistics, rotations and closed form of a layer, kept with `inputs`."""
        if self not in inputs.results:
            statistics, rotation = (
                pair_statistics(inputs),
                max_rotation(inputs, self.training_length),
            )
            chosen = self.slow_dominating(statistics, rotation, inputs.pair_scaling)
            inputs.results[self] = (
                statistics,
                rotation,
                ClosedForm(chosen, statistics.keys[1:3], self.semantic),
            )
        return inputs.results[self]

    def slow_dominating(
        self,
        pairs: PairStatistics,
        rotation: Float[Tensor, "*head component"],
        scaling: Float[Tensor, "*any component"],
    ) -> Bool[Tensor, "*head component"]:
        """Return which components are prominent, stable, slow, and still near pi.

        Args:
            pairs: Statistics of the pairs.
            rotation: Largest rotation of every component, in radians.
            scaling: Squared attention scaling of every component.

        Returns:
            Mask of the components that satisfy all four conditions of the module.
        """
        query_norm, *query_mean, _ = pairs.queries[:4]
        key_norm, *key_mean, key_deviation = pairs.keys[:4]
        product, query_mean, key_mean = (
            query_norm * key_norm * scaling,
            torch.complex(*query_mean),
            torch.complex(*key_mean),
        )
        # Relative to the median of the head: norms differ between heads and models
        prominent = product >= self.prominence * product.median(-1, keepdim=True).values
        stable = key_deviation <= self.stability * key_mean.abs()
        start = (query_mean * key_mean.conj_physical()).angle().abs()
        # Only a component that starts near pi must be still (the proof's case 1).
        still = (torch.pi - start > self.near_pi) | (rotation <= self.still)
        return prominent & stable & (rotation <= self.slow) & still

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `rotation` of a run."""
        given, labels = statistics.variables()
        axes = ("layer", "head", "component")
        group = {name: (given[name] / given["tokens"]).transpose(*axes) for name in _ORDER}
        pairs = PairStatistics(
            *torch.from_numpy(np.stack([group[name].values for name in _ORDER])).chunk(2)
        )
        for side in ("query", "key"):
            # Half-split: dimension r of the first half, then r + d_head / 2 of the second
            halves = np.concatenate([group[f"{side}_{half}"].values for half in _HALVES], -1)
            group[f"{side}_dimension_norm"] = xr.Variable(("layer", "head", "dimension"), halves)
        query_mean, key_mean = (
            group[f"{side}_mean_re"].values + 1j * group[f"{side}_mean_im"].values
            for side in ("query", "key")
        )
        rotation = given["max_rotation"].max("prompt").transpose(*axes)
        scaling = torch.from_numpy((given["scaling"] / given["tokens"]).values)[:, None]
        # Chosen again from all prompts: `observe` chooses per prompt
        slow = self.slow_dominating(pairs, torch.from_numpy(rotation.values), scaling).numpy()
        found = {
            "start_angle": (axes, np.angle(query_mean * key_mean.conj())),
            "max_rotation": rotation,
            "slow_dominating": (
                axes,
                np.where(np.isnan(rotation.values), -1, slow).astype(np.int8),
            ),
            "closed_form_r": given["closed_form_r"],
        }
        labels["dimension"] = np.arange(halves.shape[-1])
        return described_group(group | found, _MEANS | _DIMENSIONS | _OTHERS, labels)


def _sums(
    weight: Float[Tensor, "prompt 1 1"] | int,
    queries: Float[Tensor, "layer 6 prompt head component"],
    keys: Float[Tensor, "layer 6 prompt head component"],
) -> dict[str, Tensor]:
    """Means of a prompt times its tokens: sums over tokens, which merge."""
    # [layer, 12, head, component]
    return {"means": (weight * torch.stack([queries, keys], 1)).sum(3).flatten(1, 2)}


def _rotates(inputs: AttentionInputs) -> bool:
    return inputs.frequencies is not None and inputs.positions is not None


def pair_statistics(inputs: AttentionInputs) -> PairStatistics:
    """Return means over the tokens of the rotary pairs of every head.

    Args:
        inputs: A layer and a batch.

    Returns:
        Statistics [prompt, head, component] over the valid tokens; NaN for a prompt without any.
    """
    # On an accelerator queries and keys are concatenated, which halves the launches.
    if memory_for(inputs.valid.device, 0):
        queries, keys = _moments((inputs.queries, inputs.keys), inputs.valid).split(
            [inputs.heads, inputs.kv_heads], 2
        )
    else:
        queries, keys = (
            _moments((features,), inputs.valid) for features in (inputs.queries, inputs.keys)
        )
    if inputs.kv_heads < inputs.heads:
        # expand_heads repeats axis 1, so statistic and prompt are flattened to one axis
        keys = expand_heads(keys.flatten(0, 1), inputs.heads).unflatten(0, keys.shape[:2])
    return PairStatistics(queries, keys)


def max_rotation(
    inputs: AttentionInputs, training_length: int | None
) -> Float[Tensor, "prompt head component"]:
    """Return the largest rotation of every component.

    Layers that learn positions rotate by the largest difference of a seen pair, other layers by the
    largest distance of the layer in training.

    Args:
        inputs: A layer that rotates, and a batch.
        training_length: Tokens that the model was trained on; may be None if positions are
            learned.

    Returns:
        Radians [prompt, head, component], float64.

    Raises:
        InputError: `training_length` is None, and the positions are not learned.
    """
    assert inputs.frequencies is not None and inputs.positions is not None
    if inputs.learned:
        reach = expand_heads(
            largest_difference(inputs.positions, inputs.valid, inputs.window), inputs.heads
        )
    elif training_length is None:
        raise InputError(
            "the largest rotation of RoPE depends on the training length; give "
            "training_length in tokens"
        )
    else:
        shape, length = inputs.queries.shape[:2], float(inputs.compared_length(training_length))
        reach = torch.full(shape, length, dtype=torch.float64, device=inputs.valid.device)
    frequencies = inputs.frequencies.to(reach).abs()
    return reach[..., None] * (frequencies if frequencies.ndim == 1 else frequencies[:, 0])


def _moments(
    features: tuple[Float[Tensor, "prompt some token d_head"], ...],
    valid: Bool[Tensor, "prompt token"],
) -> Float[Tensor, "6 prompt head component"]:
    """Return the statistics of every rotary pair, in the order of `PairStatistics`."""
    (prompts, _, tokens, width), heads = features[0].shape, sum(part.shape[1] for part in features)
    exact = torch.promote_types(features[0].dtype, torch.float32)
    count = once("count", lambda: valid.sum(-1, dtype=torch.float64)[:, None, None], valid)
    at_once = max(1, memory_for(valid.device, CORE) // (prompts * heads * width * exact.itemsize))
    hidden = None if is_whole(valid) else ~valid[:, None, :, None]

    def stretch(start: int) -> Tensor:
        parts = [part[:, :, start : start + at_once].to(exact) for part in features]
        return torch.cat(parts, 1) if parts[1:] else parts[0]

    def mean(of: Callable[[Tensor], Tensor]) -> Tensor:
        sums = []
        for start in range(0, tokens, at_once):
            # If one stretch holds all tokens, it is converted and concatenated once for all means
            part = of(whole if whole is not None else stretch(start))
            part = (
                part
                if hidden is None
                else part.masked_fill(hidden[:, :, start : start + at_once], 0)
            )
            sums.append(part.sum(-2).to(torch.float64))
        return (torch.stack(sums).sum(0) if sums[1:] else sums[0]) / count

    whole = stretch(0) if at_once >= tokens else None
    # Deviations need the mean first: a second pass over the features.
    level = mean(lambda part: part)
    # In the dtype of the features, or the difference would be a float64 copy
    rounded = level[..., None, :].to(exact)
    norm, deviation = mean(_pair_norm), mean(lambda part: _pair_norm(part - rounded))
    sizes = mean(torch.abs)
    return torch.stack([norm, *level.chunk(2, -1), deviation, *sizes.chunk(2, -1)])


def _pair_norm(features: Float[Tensor, "... d_head"]) -> Float[Tensor, "... component"]:
    first, second = features.chunk(2, -1)
    return (first * first).addcmul_(second, second).sqrt_()
