"""Dependence of a head's preferences on distance (Wu et al. 2026, arXiv 2609.39929).

With q and k one query and a key that it sees, before rotation,

    c_r  = s a_r^2 (q_r + i q_r') conj(k_r + i k_r')    of rotary pair r
    l(d) = Re sum_r c_r exp(i theta_r d)                the logit of the key at distance d

    semantic_stability      share of distances d from 0 to E, at equal steps, at which the preferred
                            one of two keys at d = 0 is still preferred
    positional_sensitivity  mean over d of |l(d + 1) - l(d)| / |c|
    high_share              r_H = |c of pairs with theta_r > 2 pi / L| / |c|
    frequency_entropy       -sum_r p_r log p_r / log R,  p_r = |c_r|^2 / |c|^2

s is the logit scale, a_r the factor of the rotation, |c| the norm over the R pairs that rotate, L
the training length, E the extent of the layer's positions in the prompt (tokens - 1 for the token
index). The paper estimates the stability by a Gaussian; here d takes `distances` values.
`random_stability` and `random_sensitivity` are the same with random phases of c.

This module knows nothing about the meaning of tokens and the use of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Complex, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_heads
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.samples import draw_keys, places_of, spread_places
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import Count, Seed, Tokens

_TEXTS = {
    "semantic_stability": "share of distances that keep a preference",
    "random_stability": "share that keep it with random phases",
    "positional_sensitivity": "change of a logit per position, over its norm",
    "random_sensitivity": "change per position with random phases",
    "high_share": "r_H: norm of high frequencies over that of all",
    "frequency_entropy": "entropy of the rotary pairs, over its maximum",
    "compared": "pairs of keys that are compared [pairs]",
}


@dataclass(frozen=True)
class Stability(Measure, needs=Needs(tokens=3, nan=tuple(_TEXTS), documents=True)):
    """The measure `stability`."""

    queries: Count = 8
    """Queries of a prompt, at equal steps through its second half."""
    keys: Annotated[int, Interval(ge=2, le=4096)] = 16
    """Keys per query, drawn from the keys that it sees."""
    distances: Annotated[int, Interval(ge=2, le=65_536)] = 128
    """Number of tested distances."""
    seed: Seed = 0
    """Seed of the drawn keys and phases."""
    training_length: Tokens | None = None
    """L, in tokens; None: the checkpoint's."""
    name: str = "stability"
    describes: ClassVar[str] = "preferences that change with distance"

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Return a gap for layers without rotation, and for terms added to the rotated logits."""
        if not _rotates(inputs):
            return Gap("do not rotate")
        more = inputs.position_logits is not None
        return Gap("add others", "the rotated part of logits alone") if more else None

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Reduce sampled queries and keys of each prompt to one number per head."""
        if not _rotates(inputs):
            shape = (len(_TEXTS), len(inputs.prompts), inputs.heads)
            values = torch.full(shape, torch.nan, dtype=torch.float64, device=inputs.valid.device)
        else:
            assert inputs.frequencies is not None
            parts = [inputs]
            if inputs.frequencies.ndim == 3:  # each head by its own, all with the same draws
                parts = [select_heads(inputs, [head]) for head in range(inputs.heads)]
            found = [
                torch.cat([self._of_prompt(part, row, chosen) for part in parts], -1)
                for row, places in enumerate(places_of(inputs.valid))
                for chosen in [spread_places(places, self.queries, 0.5)]
            ]
            values = torch.stack(found, dim=1)
        record = {tuple(_TEXTS): ("prompt layer head", values)}
        return Statistics(per_prompt=arrays(inputs, record))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `stability` of a run."""
        return described_group(statistics.per_prompt, _TEXTS)

    def _of_prompt(
        self, inputs: AttentionInputs, row: int, chosen: list[int]
    ) -> Float[Tensor, "variable head"]:
        generator, device = torch.Generator().manual_seed(self.seed), inputs.valid.device
        rows = torch.tensor(chosen, device=device)
        keys = draw_keys(inputs.visible(rows)[row], self.keys, generator)
        coefficients = _coefficients(inputs, row, rows, keys)
        assert inputs.frequencies is not None and inputs.positions is not None
        frequencies = inputs.frequencies.to(torch.float64)
        positions = inputs.positions[row].to(torch.float64)
        padding = ~inputs.valid[row]
        extent = (
            positions.masked_fill(padding, -torch.inf).max()
            - positions.masked_fill(padding, torch.inf).min()
        )
        steps = torch.linspace(0, 1, self.distances, dtype=torch.float64, device=device)
        # [distance, component]: one grid for all heads of the layer
        angles = (steps * extent)[:, None] * frequencies
        shape = coefficients.shape[1:]
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        # Drawn on the processor, so that the null is the same on any device
        phases = 2 * torch.pi * drawn.to(device)
        turning = frequencies != 0
        power = coefficients.abs().square() * turning
        total = power.sum(-1)
        # L in tokens, as in the bands of `components`
        length = inputs.compared_length(self.training_length or 1)
        high = (power * (frequencies.abs() > 2 * math.pi / length)).sum(-1)
        shares = power / total[..., None]
        # xlogy(0, 0) is 0. With a single pair log R would be 0, hence at least 2
        entropy = -torch.xlogy(shares, shares).sum(-1) / turning.sum().double().clamp_min(2).log()
        stable, changing, compared = _responses(coefficients, angles, frequencies)
        # A pair without rotation has no random phase
        random = torch.polar(coefficients.abs(), phases.expand(coefficients.shape))
        random = torch.where(turning, random, coefficients)
        random_stable, random_changing, _ = _responses(random, angles, frequencies)
        cells = (
            # Divided by |c|, the norm of the coefficients of rotating pairs
            *(part / total.sqrt() for part in (changing, random_changing)),
            (high / total).sqrt(),
            entropy,
        )
        means = (cell.nanmean((-2, -1)) for cell in cells)
        return torch.stack([stable, random_stable, *means, compared])


def _rotates(inputs: AttentionInputs) -> bool:
    return inputs.positions is not None and inputs.frequencies is not None


def _coefficients(
    inputs: AttentionInputs, row: int, rows: Int[Tensor, "row"], keys: Int[Tensor, "row any"]
) -> Complex[Tensor, "head row any component"]:
    """Coefficients c_r of sampled queries and keys of a prompt, complex128."""
    queries = inputs.queries[row, :, rows].double()
    of_keys = expand_heads(inputs.keys[row : row + 1], inputs.heads)[0][:, keys].double()
    query, key = (torch.complex(*features.chunk(2, dim=-1)) for features in (queries, of_keys))
    return query[:, :, None] * key.conj() * (inputs.logit_scale * inputs.pair_scaling)


def _responses(
    coefficients: Complex[Tensor, "head row any component"],
    angles: Float[Tensor, "distance component"],
    frequencies: Float[Tensor, "component"],
) -> tuple[Float[Tensor, "head"], Float[Tensor, "head row any"], Float[Tensor, "head"]]:
    """Stability of heads, change per position of pairs, and number of pairs of different keys."""
    waves = torch.polar(torch.ones_like(angles), angles).T
    # l(d + 1) - l(d) = Re sum c (e^{i theta} - 1) e^{i theta d}; expm1 keeps digits of slow pairs
    steps = torch.expm1(1j * frequencies)
    changing = ((coefficients * steps) @ waves).real.abs().mean(-1)
    # Keys are random, so neighbors are random pairs; an odd key is left out
    pairs = coefficients[:, :, : coefficients.shape[2] // 2 * 2].unflatten(2, (-1, 2))
    difference = ((pairs[..., 0, :] - pairs[..., 1, :]) @ waves).real.flatten(1, 2)
    has_order = difference[..., :1] != 0  # A key drawn twice has no preference
    kept = (difference.sign() == difference[..., :1].sign()) & has_order
    compared = has_order.sum((1, 2)).double()
    return kept.double().mean(-1).sum(-1) / compared, changing, compared
