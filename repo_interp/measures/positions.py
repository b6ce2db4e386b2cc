"""Positions that a layer gives its tokens, and their range d = max z - min z.

RePo eq. 4-7, sec. 5.2, fig. 2, 6, 8.

z_i is the position of token i in a head: the index for RoPE, the output of f_phi for RePo, none
(NaN) for NoPE, where a constant for all tokens would give the same logits. Heads that share a key
share its position and are listed singly. `linear_r2` is the squared correlation of z_i and i: 1 for
the index, however it is scaled and shifted.

This module knows nothing about the effect of positions on attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.fitting import AnyPrompt, Layers, PromptLabels
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.seen_pairs import by_head, is_whole
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import HeadScore, Measure, Needs, Statistics

_TEXTS = {
    "position": "position of each token [positions]",
    "position_range": "largest minus smallest position of a prompt [positions]",
    "negative_share": "share of a prompt's tokens with a position below 0",
    "linear_r2": "share of positions' variance that a straight line has (R^2)",
}
_BY_PAIR = {"position_by_pair": "position of each token, by rotary pair [positions]"}


def position_range(
    positions: Float[Tensor, "... token"], valid: Bool[Tensor, "... token"]
) -> Float[Tensor, "..."]:
    """Return the largest minus the smallest position of the valid tokens.

    Args:
        positions: Positions along the last axis.
        valid: Mask of the tokens that are no padding.

    Returns:
        Ranges in positions; 0 for a constant head, -inf where no token is valid.
    """
    if is_whole(valid):
        return positions.amax(-1) - positions.amin(-1)
    infinity = float("inf")
    largest = positions.masked_fill(~valid, -infinity).amax(-1)
    smallest = positions.masked_fill(~valid, infinity).amin(-1)
    return largest - smallest


@dataclass(frozen=True)
class Positions(
    Measure,
    needs=Needs(tensors=("positions",), by_pair=True, nan=(*_TEXTS, *_BY_PAIR), documents=True),
):
    """The measure `positions`."""

    name: str = "positions"
    describes: ClassVar[str] = "of every token, by head"
    offers: ClassVar[str] = "head_positions head_scores prompt_tokens"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether positions are learned."""
        return layers.learned

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return positions [prompt, layer, head, token] and ranges [prompt, layer, head].

        NaN where a layer has no positions. Where they differ by rotary pair, `position_by_pair`
        has them, and the others are NaN.
        """
        positions, more = inputs.positions, {}
        if inputs.differ_by_pair and positions is not None:
            # Text has one position per token in any batch, also beside prompts with images.
            # Per prompt: then one number per token says it all, and NaN stands in the array by pair
            one = (positions == positions[..., :1]).flatten(1).all(1)[:, None, None]
            hidden = (~inputs.valid[:, None] | one)[..., None]
            shown = positions.float().masked_fill(hidden, torch.nan)
            more = {"position_by_pair": ("prompt layer head token component", shown)}
            positions = positions[..., 0].masked_fill(~one, torch.nan)
        if positions is None:
            positions = torch.full_like(inputs.valid[:, None], torch.nan, dtype=torch.float32)
        found = jointly(_of_layers, {"positions": positions}, [inputs.valid])
        record = {
            "position": ("prompt layer head token", found["position"]),
            "position_range": ("prompt layer head", found["position_range"]),
        }
        pairs = range(inputs.queries.shape[-1] // 2)
        labels = {"component": pairs} if more else {}
        return Statistics(per_prompt=arrays(inputs, record | more, **labels))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `positions` of a run."""
        group, labels = statistics.variables()
        axes = ("prompt", "layer", "head")
        below, fit = _negative_share_and_fit(group["position"].transpose(*axes, "token").values)
        texts = _TEXTS | (_BY_PAIR if "position_by_pair" in group else {})
        derived = {"negative_share": (axes, below), "linear_r2": (axes, fit)}
        return described_group(group | derived, texts, labels)

    def add_tokens(self, group: xr.Dataset, tokens: PromptLabels) -> xr.Dataset:
        """Return the group with the tokens of all prompts."""
        # Both have all prompts and tokens: `group.merge` would compare the labels
        other = tokens.of_prompts()
        variables = {**other.variables, **group.variables}
        coordinates = {name: variables[name] for name in {**group.coords, **other.coords}}
        return xr.Dataset(
            {name: variables[name] for name in (*group.data_vars, *other.data_vars)},
            xr.Coordinates(coordinates, {**other.xindexes, **group.xindexes}),
            group.attrs,
        )

    def head_scores(self, group: xr.Dataset) -> Mapping[str, HeadScore]:
        """Return the range of positions."""
        meaning = "the largest less the smallest position that the head gives"
        return {"position range": HeadScore(group["position_range"], meaning, by_index=True)}


def _of_layers(
    valid: Bool[Tensor, "prompt token"], positions: Float[Tensor, "layer prompt any token"]
) -> dict[str, Tensor]:
    """Positions and ranges of layers."""
    shown, rounded = by_head(valid), positions.float()
    return {
        "position": rounded if is_whole(shown) else rounded.masked_fill(~shown, torch.nan),
        # Ranges are differences of large numbers, taken before rounding for the file
        "position_range": position_range(positions.double(), shown),
    }


def _negative_share_and_fit(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of positions below 0, and the squared correlation with the token index.

    NaN is left out on both sides; with arrays, since aligning them takes longer than the sums.
    """
    known = ~np.isnan(positions)
    index = np.arange(positions.shape[-1], dtype=float)
    count = known.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = (positions < 0).sum(-1) / np.where(count > 0, count, np.nan)[..., 0]
        (of_positions, of_index) = (
            np.where(known, some - np.where(known, some, 0).sum(-1, keepdims=True) / count, 0)
            for some in (positions.astype(float), np.broadcast_to(index, positions.shape))
        )
        together = (of_positions * of_index).sum(-1)
        alone = (of_positions**2).sum(-1) * (of_index**2).sum(-1)
        fit = together**2 / alone
    return below, fit
