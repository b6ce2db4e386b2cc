"""Three-axis linear approximation of a head's logits (Position Generalization sec. 3.1, eq. 2, 7, 8, app. A).

    min over a, b, c of  sum over seen pairs (W_ij - a_{i-j} - b_i - c_j)^2 + ridge |a, b, c|^2
    r = Pearson correlation of W_ij and a_{i-j} + b_i + c_j over seen pairs

W are the logits with 1/sqrt(d_head), as the model has them (soft cap and position bias included). Choices where the
paper leaves them: the axes are those of the ridge solution, which has no part in the three directions that leave the
map as it is (the level of two axes, and a common slope), so an axis means something up to its level and slope; pairs
outside a layer's window are not seen; a distance is a difference of token indices.

Also fitted: learned positions in the place of indices, `r_position`, for the schemes that learn them; on request the
attention weights (O(n^2 d) time). Controls, on request: `r_shuffled`, the distance axis shuffled (shuffled_axis);
`r2_held_out`, axes fitted on some rows judged on the others (held_out_rows). The paper's own control - freshly
initialised weights - is this measure on such a model.

Knows nothing about what a prompt says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xarray as xr
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.additive_map import additive_pairs
from repo_interp.measures.kernels.axis_fit import fit_axes, fit_correlation
from repo_interp.measures.kernels.held_out_rows import draw_rows, held_out_r2
from repo_interp.measures.kernels.logit_sums import attention_sums, logit_sums
from repo_interp.measures.kernels.position_axis import position_correlation
from repo_interp.measures.kernels.shuffled_axis import shuffle_distances
from repo_interp.measures.kernels.triangle_solver import Axes
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.statistics import Statistics
from repo_interp.positions.layouts import LEARNED

AXES = ("none", "first_prompt")
EXTRAS = ("attention", "position", "shuffled", "held_out")
_PER_PROMPT = {
    "r": ("correlation of logits and their three-axis fit", "1"),
    "r_attention": ("correlation of attention weights and their three-axis fit", "1"),
    "r_position": ("correlation of logits and their three-axis fit with distances of learned positions", "1"),
    "r_shuffled": ("correlation of logits and their three-axis fit with its distance axis shuffled", "1"),
    "r2_held_out": ("share of variance within held-out rows explained by axes fitted on the other rows", "1"),
}
_AXES = {
    "distance_axis": ("distance axis of the first prompt", "logits"),
    "query_axis": ("query axis of the first prompt", "logits"),
    "key_axis": ("key axis of the first prompt", "logits"),
}


@dataclass(frozen=True)
class ThreeAxis:
    """The measure `three_axis`."""

    axes: str = "none"
    """Whose axes are kept: "none", or those of the "first_prompt" of the analysis, prompt number 0."""
    extras: tuple[str, ...] = ("position",)
    """What else is measured, of "attention", "position", "shuffled", "held_out"."""
    ridge: float = 1e-6
    position_width: float = 1.0
    """Width of a cell of learned positions, in positions."""
    most_cells: int = 4096
    """`r_position` is NaN for a head whose positions reach over more cells than this in a prompt."""
    held_out_share: float = 0.5
    seed: int = 0
    """Of the shuffled distances and the held-out rows."""
    name: str = "three_axis"
    required_spans: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.axes not in AXES:
            raise InputError(f"axes is one of {', '.join(AXES)}, not {self.axes!r}")
        unknown = [extra for extra in self.extras if extra not in EXTRAS]
        if unknown:
            raise InputError(f"extras are of {', '.join(EXTRAS)}, not {unknown[0]!r}")
        if not (self.ridge > 0 and self.position_width > 0 and self.most_cells > 0):
            raise InputError("ridge, position_width and most_cells of three_axis must be positive")
        if not 0 < self.held_out_share < 1:
            raise InputError(f"held_out_share is a share between 0 and 1, not {self.held_out_share}")

    @property
    def parameters(self) -> Mapping[str, str | int | float]:
        """Every choice made."""
        return {
            "axes": self.axes,
            "extras": ", ".join(self.extras),
            "ridge": self.ridge,
            "position_width": self.position_width,
            "most_cells": self.most_cells,
            "held_out_share": self.held_out_share,
            "seed": self.seed,
        }

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Correlations [prompt, layer, head]; on request the axes of the first prompt."""
        sums = logit_sums(inputs)
        pairs = additive_pairs(inputs.valid[:, None], inputs.valid[:, None], inputs.window)
        axes = fit_axes(sums.lines, inputs.valid, inputs.window, self.ridge)
        values = {"r": fit_correlation(axes, sums.lines, sums.square, pairs)}
        if "attention" in self.extras:
            weights = attention_sums(inputs)
            fitted = fit_axes(weights.lines, inputs.valid, inputs.window, self.ridge)
            values["r_attention"] = fit_correlation(fitted, weights.lines, weights.square, pairs)
        if "position" in self.extras:
            values["r_position"] = self._by_position(inputs, sums)
        if "shuffled" in self.extras:
            shuffled = shuffle_distances(axes, pairs, self.seed)
            values["r_shuffled"] = fit_correlation(shuffled, sums.lines, sums.square, pairs)
        if "held_out" in self.extras:
            rows = draw_rows(inputs.valid, self.held_out_share, self.seed)
            values["r2_held_out"] = held_out_r2(sums, logit_sums(inputs, rows), rows, inputs.valid, inputs.window, self.ridge)
        labelled = {name: of_layer(inputs, ("prompt", "layer", "head"), value) for name, value in values.items()}
        return Statistics(per_prompt=xr.Dataset(labelled), sums=self._first_axes(inputs, axes))

    def _by_position(self, inputs: AttentionInputs, sums) -> Tensor:
        if inputs.scheme not in LEARNED:
            return torch.full_like(sums.square, torch.nan)
        return position_correlation(inputs, sums, self.position_width, self.most_cells, self.ridge)

    def _first_axes(self, inputs: AttentionInputs, axes: Axes) -> xr.Dataset:
        """Axes of prompt number 0; of length 0 in a batch without it, so that adding batches gives that prompt's."""
        if self.axes == "none":
            return xr.Dataset()
        values, distances, tokens = Axes(*(part[0, :, :0] for part in axes)), 0, 0
        for prompt in (inputs.prompts == 0).nonzero()[:, 0].tolist():
            valid = inputs.valid[prompt].nonzero()[:, 0].tolist()
            distances, tokens = valid[-1] - valid[0] + 1, valid[-1] + 1
            values = Axes(axes.distance[prompt], axes.query[prompt], axes.key[prompt])
        labels = {"distance": range(distances), "token": range(tokens)}
        return xr.Dataset(
            {
                name: of_layer(inputs, ("layer", "head", axis), part[:, : len(labels[axis])], **{axis: labels[axis]})
                for name, axis, part in zip(_AXES, ("distance", "token", "token"), values, strict=True)
            }
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `three_axis` of a run."""
        texts = {**_PER_PROMPT, **_AXES}
        measured = {**statistics.per_prompt.data_vars, **statistics.sums.data_vars}
        return xr.Dataset({name: described(measured[name], *text) for name, text in texts.items() if name in measured})
