"""Fake-distance fit of a head's logits (Position Generalization sec. 3.2, eq. 3, 9-13, app. B).

    W'_dj = w(d, q, k_j): the logit of a query and key j if the key were d tokens back
            d, j = 0 .. n-1
    W'_dj ~ a_d + b_j,   r = Pearson correlation        (fake_logits: how, without making W')

The rotation by d has the sign of the model, which sees i - j = d (`sign="causal"`); the paper's
formula, taken literally, rotates the other way (`sign="printed"`). Choices:

- A distance is in positions: 0 .. n-1 for any learned positions (`distances="tokens"`), or n steps
  over the differences z_last - z_j that the last query sees (`distances="positions"`). Both are
  equal for RoPE.
- The query is the query of the last token, as in the paper. With several queries, the last ones, r
  is the mean.
- A NoPE layer has the same logit at every distance, so r = 1 exactly and tells nothing.
  `nope_base` rotates such layers by RoPE with that base instead.
- A term that depends only on positions (as in ALiBi) is the last row's term for the key d tokens
  back; without rotation r = 1 again, as the paper argues (sec. 3.3). A term that depends on
  contents, or a transform that reads positions (as in xPos), is not known from a turn by the
  distance: such layers are NaN.
- Logits include 1/sqrt(d_head), and are taken before a soft cap. All valid tokens are keys, even
  outside the layer's window.

Both axes together bound the distance at which a head can attend by contents (after CoPE sec. 3.1,
where "attend to the last x" fails once distance outweighs contents):

    reach = smallest d with max_{d' <= d} a_d' - a_d > max_j b_j - median_j b_j

At the reach, the best key loses to a nearer key with median content. It is NaN if there is no such
d within the first prompt.

This module knows nothing about the contents of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.gap import BEYOND_ROTATION, Gap
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.seen_pairs import extents, once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.plugins.fake_distance.fake_logits import (
    DistanceTurns,
    KeyMoments,
    distance_turns,
    fake_axes,
    fake_fit,
    key_moments,
    mean_rotated,
    products_with_keys,
)
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import Count, PositiveOrZero

SIGNS = {"causal": 1.0, "printed": -1.0}
BY_CONTENT = f"{BEYOND_ROTATION}, which a turn by the distance does not give"
_DESCRIBED = {
    "r": "correlation of fake-distance logits and the sum of their two axes",
    "semantic_share": "share of the semantic axis in the variance of both axes",
    "position_axis": "position axis of the last query of the first prompt [logits]",
    "semantic_axis": "semantic axis of the last query of the first prompt [logits]",
    "reach": "distance from which a nearer key of median content wins [tokens]",
}


@dataclass(frozen=True)
class FakeDistance(
    Measure, needs=Needs(nan=("r", "semantic_share", "position_axis", "semantic_axis"))
):
    """The measure `fake_distance`."""

    queries: Count = 1
    """Number of queries, the last ones of a prompt."""
    sign: Literal["causal", "printed"] = "causal"
    """`causal`: rotation as in the model; `printed`: as in the paper's formula, literally."""
    distances: Literal["tokens", "positions"] = "tokens"
    """`tokens`: $0 .. n-1$; `positions`: $n$ steps over the distances that the last query sees."""
    axes: Literal["none", "first_prompt"] = "first_prompt"
    """Axes that are kept: "none", or those of the "first_prompt" of the analysis, number 0."""
    nope_base: PositiveOrZero = 0.0
    """RoPE base by which NoPE layers are rotated for this measure; 0: they are not rotated."""
    name: str = "fake_distance"
    describes: ClassVar[str] = "the same for one query at every distance"
    topic: ClassVar[str] = "generalization"

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Return a gap for layers whose logits do not follow from a rotation by the distance."""
        return Gap(BY_CONTENT) if inputs.logits_by_content else None

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return `r` and `semantic_share` [prompt, layer, head]; the axes of the first prompt."""
        moments = key_moments(inputs.keys, inputs.valid)
        queries, present = last_queries(inputs, self.queries)
        bias, turns, row = bias_by_distance(inputs), self._turns(inputs), inputs.row_of_first_prompt
        row = None if self.axes == "none" else row
        tensors = {"queries": queries, "gram": moments.gram, "mean": moments.mean}
        tensors |= {} if bias is None else {"bias": bias}
        tokens = count = 0
        if row is not None:
            _, tokens, count = extents(inputs.valid)[row]
            # -1: queries are in token order, and the paper uses the last one
            last = mean_rotated(queries, turns)[row, :, -1]
            tensors["columns"] = products_with_keys(last, inputs.keys[row, :, :tokens])
        found = jointly(
            _fits, tensors, [self, inputs.valid, present, turns, row, inputs.logits_by_content]
        )
        names = {"r": "prompt layer head", "semantic_share": "prompt layer head"}
        axes = {"position_axis": "layer head distance", "semantic_axis": "layer head token"}
        per_prompt = {name: (axes, found[name]) for name, axes in names.items()}
        first = {} if row is None else {name: (where, found[name]) for name, where in axes.items()}
        return Statistics(
            per_prompt=arrays(inputs, per_prompt),
            first_prompt=arrays(
                inputs, first, distance=np.arange(float(count)), token=np.arange(float(tokens))
            ),
        )

    def _frequencies(self, inputs: AttentionInputs) -> Float[Tensor, "component"]:
        """Radians per position, with the sign of the rotation; 0 without rotation."""
        components, device = inputs.queries.shape[-1] // 2, inputs.queries.device
        if inputs.frequencies is not None:
            frequencies = inputs.frequencies.to(device=device, dtype=torch.float64)
        elif self.nope_base and inputs.scheme == "nope":
            steps = torch.arange(components, dtype=torch.float64, device=device)
            # RoPE's theta_r = base^(-2 r / d_head), r below d_head / 2
            frequencies = self.nope_base ** (-steps / components)
        else:
            # No rotation: rows of W' are equal, and r is 1
            frequencies = torch.zeros(components, dtype=torch.float64, device=device)
        return SIGNS[self.sign] * frequencies

    def _turns(self, inputs: AttentionInputs) -> DistanceTurns:
        if self.distances == "tokens" or inputs.positions is None:
            shared = () if inputs.frequencies is None else (inputs.frequencies,)
            # Without frequencies, the scheme decides between the base of NoPE and no rotation
            name = "turns", self, inputs.scheme if not shared else ""
            return once(name, lambda: self._by_tokens(inputs), inputs.valid, *shared)
        frequencies, positions = (
            self._frequencies(inputs),
            expand_heads(inputs.positions, inputs.heads),
        )
        positions, hidden = positions.to(torch.float64), ~inputs.valid[:, None]
        last, _ = _last_tokens(inputs.valid, 1)
        last = positions.gather(-1, last[:, None].expand(-1, positions.shape[1], -1))[..., 0]
        # A learned position may exceed the last token's, so distances may be negative
        nearest = last - positions.masked_fill(hidden, -torch.inf).amax(-1)
        furthest = last - positions.masked_fill(hidden, torch.inf).amin(-1)
        # n distances for n tokens, so that W' is square as with `distances="tokens"`
        step = (furthest - nearest) / (inputs.valid.sum(-1)[:, None] - 1).clamp(min=1)
        return distance_turns(nearest, step, inputs.valid, frequencies)

    def _by_tokens(self, inputs: AttentionInputs) -> DistanceTurns:
        unit = torch.ones(len(inputs.valid), 1, dtype=torch.float64, device=inputs.valid.device)
        return distance_turns(0 * unit, unit, inputs.valid, self._frequencies(inputs))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `fake_distance` of a run."""
        group, labels = statistics.variables()
        if "position_axis" in group:
            group["reach"] = _reach(
                group["position_axis"], group["semantic_axis"], labels["distance"]
            )
        return described_group(group, _DESCRIBED, labels)


def _fits(
    measure: FakeDistance,
    valid: Bool[Tensor, "prompt token"],
    present: Bool[Tensor, "prompt query"],
    turns: DistanceTurns,
    row: int | None,
    by_content: bool,
    queries: Float[Tensor, "layer prompt head query d_head"],
    gram: Float[Tensor, "layer prompt kv_head d_head d_head"],
    mean: Float[Tensor, "layer prompt kv_head d_head"],
    bias: Float[Tensor, "layer prompt head distance"] | None = None,
    columns: Float[Tensor, "layer head token"] | None = None,
) -> dict[str, Tensor]:
    """Correlations and shares of layers, and the axes of the prompt at `row`."""
    fit = fake_fit(queries, KeyMoments(mean, gram), turns, bias)
    found = {"r": fit.correlation, "semantic_share": fit.semantic_share}
    if measure.queries > 1:
        found = {
            # A prompt with fewer queries has the mean of these
            name: values.masked_fill(~present[:, None], torch.nan).nanmean(-1, keepdim=True)
            for name, values in found.items()
        }
    found = {name: values[..., 0] for name, values in found.items()}
    if columns is not None and row is not None:
        _, tokens, count = extents(valid)[row]
        level = 0.0 if bias is None else bias[:, row, :, :count].mean(-1, keepdim=True)
        position, semantic = fake_axes(fit.rows[:, row, :, -1, :count], columns, level)
        if tokens > count:
            # Keys of padding on the left do not count
            semantic = semantic.masked_fill(~valid[row, :tokens], 0)
        found |= {"position_axis": position, "semantic_axis": semantic}
    if by_content:
        found = {name: torch.full_like(values, torch.nan) for name, values in found.items()}
    return found


def _reach(position: xr.Variable, semantic: xr.Variable, distance: np.ndarray) -> xr.Variable:
    """Distance from which a key of median content wins [layer, head]; NaN if it never does."""
    along = position.transpose("layer", "head", "distance").values
    # Difference from the best nearer distance
    lost = np.maximum.accumulate(along, axis=-1) - along
    margin = (semantic.max("token") - semantic.median("token")).transpose("layer", "head")
    # Equality up to rounding does not count
    beyond = lost > margin.values[..., None] * (1 + 1e-9)
    # argmax of booleans is the first True, or 0 without one
    reach = np.where(beyond.any(-1), distance[beyond.argmax(-1)], np.nan)
    return margin.copy(data=reach)


def bias_by_distance(inputs: AttentionInputs) -> Float[Tensor, "prompt head distance"] | None:
    """Return position logits of the last valid row by distance.

    Args:
        inputs: A layer and a batch.

    Returns:
        Position logits [prompt, head, distance], float64, for the valid key `distance` keys back, 0
        beyond the first; None if the scheme adds nothing.
    """
    if inputs.position_logits is None:
        return None
    last = _last_tokens(inputs.valid, 1)[0][:, 0]
    # All tokens, valid ones last and in order; flipped, entry d is the key d valid tokens back
    tokens, number = _last_tokens(inputs.valid, inputs.valid.shape[1])
    # Position logits cost per row, and prompts of a batch mostly share their last row
    rows, place = last.unique(return_inverse=True)
    logits = inputs.position_logits(rows).to(torch.float64).expand(len(last), -1, -1, -1)
    of_last = logits[torch.arange(len(last), device=last.device), :, place]
    backwards = of_last.gather(-1, tokens.flip(-1)[:, None].expand_as(of_last))
    return torch.where(number.flip(-1)[:, None], backwards, 0)


def last_queries(
    inputs: AttentionInputs, number: int
) -> tuple[Float[Tensor, "prompt head query d_head"], Bool[Tensor, "prompt query"]]:
    """Return the last valid queries of all prompts, un-rotated and scaled.

    Args:
        inputs: A layer and a batch.
        number: Queries per prompt.

    Returns:
        Queries [prompt, head, query, d_head], float64, times the logit's scale, in token order; and
        the mask [prompt, query] of existing queries.
    """
    tokens, present = _last_tokens(inputs.valid, number)
    index = tokens[:, None, :, None].expand(-1, inputs.heads, -1, inputs.queries.shape[-1])
    # The scaling of both sides is applied to the query, so that keys are shared unchanged
    name, scaling = ("scale", inputs.logit_scale), inputs.pair_scaling
    scale = once(name, lambda: inputs.logit_scale * scaling.repeat(2), scaling)
    queries = inputs.queries.gather(2, index).to(torch.float64) * scale
    if min(count for _, _, count in extents(inputs.valid)) < number:
        queries = queries.masked_fill(~present[:, None, :, None], 0)
    return queries, present


def _last_tokens(
    valid: Bool[Tensor, "prompt token"], number: int
) -> tuple[Int[Tensor, "prompt query"], Bool[Tensor, "prompt query"]]:
    """Return indices of the last valid tokens in order, and a mask of them; missing ones first."""

    def find() -> tuple[Tensor, Tensor]:
        # Stable: padding on either side first, then valid tokens in their order
        order = valid.to(torch.int8).argsort(dim=-1, stable=True)[:, -number:]
        return order, valid.gather(-1, order)

    return once(("last", number), find, valid)
