"""Fake-distance logits of one query and their two axes (Position Generalization sec. 3.2, eq. 3, 9-13, app. B).

    W'_dj = scale q R(d) k_j^T = scale Re sum_r q_r conj(k_jr) exp(i theta_r d)     d, j = 0 .. n-1,  un-rotated q and k in complex pairs
    a_d = row mean - grand mean / 2,     b_j = column mean - grand mean / 2,     r = Pearson(W', a_d + b_j)

what the model itself gives the query when a key is d back (`sign="causal"`; the paper's formula, taken literally, turns the other way:
"printed"). Without W': a needs the mean key only, b the mean rotation, and with k centred, G = sum_j k k^T,

    sum W'^2 = 1/2 Re sum_rs (q_r conj(q_s) conj(G1_rs) S(theta_r - theta_s) + q_r q_s conj(G2_rs) S(theta_r + theta_s))

G1 = sum_j k_r conj(k_s), G2 = sum_j k_r k_s, S(w) = sum_d exp(i w d), a geometric series. O(n d^2) once a head, O(d^2) a query.

Choices. A distance is in positions: 0 .. n-1, whatever positions the layer learned (`distances="tokens"`), or n steps over those that the
last query really sees, z_last - z_j (`distances="positions"`; the same for RoPE). Several queries: the last ones; r is their mean. A NoPE
layer gives the same logit at every distance, so r = 1 exactly, which says nothing; `nope_base` asks instead what rotating by RoPE of that
base would give. Position logits (ALiBi and the like) are added to what they add to: r = 1 again without rotation, as the paper argues in
sec. 3.3; at distance d they are those of the last row for the key d back. Logits are those before a soft cap.

Knows nothing about what a prompt says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xarray as xr
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.over_heads import MEMORY
from repo_interp.measures.statistics import Statistics
from repo_interp.positions.rotary import expand_heads

SIGNS = {"causal": 1.0, "printed": -1.0}
DISTANCES = ("tokens", "positions")
AXES = ("none", "first_prompt")
_DESCRIBED = {
    "r": ("correlation of fake-distance logits and the sum of their two axes", "1"),
    "position_axis": ("position axis of the last query of the first prompt", "logits"),
    "semantic_axis": ("semantic axis of the last query of the first prompt", "logits"),
}


@dataclass(frozen=True)
class KeyMoments:
    """What a prompt's keys amount to, a head. Float64, 0 for invalid tokens."""

    count: Int[Tensor, "prompt"]
    mean: Complex[Tensor, "prompt head component"]
    gram: Float[Tensor, "prompt head d_head d_head"]
    """Of the centred keys, halves of a pair d_head / 2 apart."""


@dataclass(frozen=True)
class Grid:
    """Distances start + step t, t = 0 .. count - 1, in positions; count differs between prompts."""

    start: Float[Tensor, "prompt any"]
    step: Float[Tensor, "prompt any"]
    count: Int[Tensor, "prompt"]

    def turns(self, frequencies: Float[Tensor, "..."]) -> Complex[Tensor, "prompt any ..."]:
        """sum over the distances of exp(i frequency distance)."""
        shape = (*self.start.shape, *[1] * frequencies.dim())
        start, step, count = self.start.view(shape), self.step.view(shape), self.count.view(-1, *[1] * (len(shape) - 1))
        turn = torch.remainder(frequencies * step + torch.pi, 2 * torch.pi) - torch.pi
        whole = turn.abs() < 1e-15
        size = torch.where(whole, count, (count * turn / 2).sin() / torch.where(whole, 1, (turn / 2).sin()))
        return torch.polar(torch.ones_like(turn), frequencies * start + (count - 1) * turn / 2) * size


@dataclass(frozen=True)
class FakeDistance:
    """The measure `fake_distance`."""

    queries: int = 1
    """How many queries, from the last one back."""
    sign: str = "causal"
    distances: str = "tokens"
    axes: str = "first_prompt"
    """Whose axes are kept: "none", or those of the "first_prompt" of the analysis, prompt number 0."""
    nope_base: float = 0.0
    """0: NoPE layers as they are. Otherwise the RoPE base by which they are asked to rotate."""
    name: str = "fake_distance"
    required_spans: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, value, known in (
            ("sign", self.sign, tuple(SIGNS)),
            ("distances", self.distances, DISTANCES),
            ("axes", self.axes, AXES),
        ):
            if value not in known:
                raise InputError(f"{option} is one of {', '.join(known)}, not {value!r}")
        if self.queries < 1 or self.nope_base < 0:
            raise InputError("fake_distance wants at least one query and a nope_base of at least 0")

    @property
    def parameters(self) -> Mapping[str, str | int | float]:
        """Every choice made."""
        return {
            "queries": self.queries,
            "sign": self.sign,
            "distances": self.distances,
            "axes": self.axes,
            "nope_base": self.nope_base,
        }

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """r [prompt, layer, head]; on request the axes of the first prompt."""
        moments = key_moments(inputs)
        queries, present = _last_queries(inputs, self.queries)
        queries = queries * (inputs.logit_scale * inputs.attention_scaling**2)
        frequencies = self._frequencies(inputs)
        grid = self._grid(inputs)
        bias = _bias_by_distance(inputs)
        r = fake_correlation(queries, moments, frequencies, grid, bias)
        r = torch.where(present[:, None], r, torch.nan).nanmean(-1)
        return Statistics(
            per_prompt=xr.Dataset({"r": of_layer(inputs, ("prompt", "layer", "head"), r)}),
            sums=self._first_axes(inputs, queries[:, :, -1], moments, frequencies, grid, bias),
        )

    def _frequencies(self, inputs: AttentionInputs) -> Float[Tensor, "component"]:
        """Radians a position, with the sign of the rotation; 0 where nothing is rotated."""
        components, device = inputs.queries.shape[-1] // 2, inputs.queries.device
        if inputs.frequencies is not None:
            frequencies = inputs.frequencies.to(device=device, dtype=torch.float64)
        elif self.nope_base and inputs.scheme == "nope":
            steps = torch.arange(components, dtype=torch.float64, device=device)
            frequencies = self.nope_base ** (-steps / components)
        else:
            frequencies = torch.zeros(components, dtype=torch.float64, device=device)
        return SIGNS[self.sign] * frequencies

    def _grid(self, inputs: AttentionInputs) -> Grid:
        count = inputs.valid.sum(-1)
        one = torch.ones(len(count), 1, dtype=torch.float64, device=count.device)
        if self.distances == "tokens" or inputs.head_positions is None:
            return Grid(torch.zeros_like(one), one, count)
        positions, valid = inputs.head_positions.to(torch.float64), inputs.valid[:, None]
        last = positions.gather(-1, _last_tokens(inputs.valid, 1)[0][:, None].expand(-1, positions.shape[1], -1))
        nearest = last[..., 0] - positions.masked_fill(~valid, -torch.inf).amax(-1)
        furthest = last[..., 0] - positions.masked_fill(~valid, torch.inf).amin(-1)
        return Grid(nearest, (furthest - nearest) / (count[:, None] - 1).clamp(min=1), count)

    def _first_axes(self, inputs, queries, moments, frequencies, grid, bias) -> xr.Dataset:
        """Axes of prompt number 0, of length 0 in a batch that has it not: added up over batches they are that prompt's."""
        if self.axes == "none":
            return xr.Dataset()
        batch = (inputs.prompts == 0).nonzero()[:, 0].tolist()
        if batch:
            position, semantic = _axes(inputs, batch[0], queries, moments, frequencies, grid, bias)
        else:
            position = semantic = torch.zeros(inputs.heads, 0)
        of_distance, of_token = range(position.shape[-1]), range(semantic.shape[-1])
        return xr.Dataset(
            {
                "position_axis": of_layer(inputs, ("layer", "head", "distance"), position, distance=of_distance),
                "semantic_axis": of_layer(inputs, ("layer", "head", "token"), semantic, token=of_token),
            }
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `fake_distance` of a run."""
        measured = {**statistics.per_prompt.data_vars, **statistics.sums.data_vars}
        return xr.Dataset({name: described(array, *_DESCRIBED[name]) for name, array in measured.items()})


def fake_correlation(
    queries: Float[Tensor, "prompt head query d_head"],
    keys: KeyMoments,
    frequencies: Float[Tensor, "component"],
    grid: Grid,
    bias: Float[Tensor, "prompt head distance"] | None = None,
) -> Float[Tensor, "prompt head query"]:
    """Correlation of W' and its two axes, of every query; `queries` un-rotated and scaled. NaN where W' does not vary."""
    query, count = _complex(queries), grid.count[:, None, None].to(torch.float64)
    differences = grid.turns(frequencies[:, None] - frequencies)
    totals = grid.turns(frequencies[:, None] + frequencies)
    mean_turn = grid.turns(frequencies) / count

    def square(values: Complex[Tensor, "prompt head query component"], first: Tensor, second: Tensor) -> Tensor:
        crossed = (values @ first * values.conj()).sum(-1) + (values @ second * values).sum(-1)
        return crossed.real / 2

    xx, xy, yy = _quarters(keys.gram)
    first = torch.complex(xx + yy, xy - xy.mT) * differences
    second = torch.complex(xx - yy, -xy - xy.mT) * totals
    within = square(query, first, second)
    of_mean = query * keys.mean.conj()[:, :, None]
    column = _real(query * mean_turn[:, :, None])
    by_key = count * ((column @ keys.gram) * column).sum(-1)
    if bias is None:
        mean = (of_mean * mean_turn[:, :, None]).sum(-1).real
        by_distance = count * (square(of_mean, differences, totals) - count * mean**2)
    else:
        by_distance = count * _scatter(_distance_effect(of_mean, frequencies, grid, bias), grid.count)
    total = by_distance + within
    varies = total > 64 * torch.finfo(torch.float64).eps * count**2 * queries.square().sum(-1)
    return torch.where(varies, ((by_distance + by_key) / total).clamp(0, 1).sqrt(), torch.nan)


def key_moments(inputs: AttentionInputs) -> KeyMoments:
    """Count, mean and Gram of the un-rotated valid keys, some tokens at a time; products in their dtype, sums in float64."""
    keys, valid = inputs.keys, inputs.valid
    prompts, kv_heads, tokens, width = keys.shape
    exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
    count = valid.sum(-1)
    at_once = max(1, MEMORY // (prompts * kv_heads * width * 8))
    blocks = [
        (keys[:, :, start : start + at_once], ~valid[:, None, start : start + at_once, None])
        for start in range(0, tokens, at_once)
    ]
    total = torch.zeros(prompts, kv_heads, width, dtype=torch.float64, device=keys.device)
    for some, hidden in blocks:
        total += some.masked_fill(hidden, 0).sum(2, dtype=torch.float64)
    mean = total / count.clamp(min=1)[:, None, None]
    gram = torch.zeros(prompts, kv_heads, width, width, dtype=torch.float64, device=keys.device)
    for some, hidden in blocks:
        centred = (some.to(exact) - mean[:, :, None].to(exact)).masked_fill(hidden, 0)
        gram += centred.mT @ centred
    return KeyMoments(count, expand_heads(_complex(mean), inputs.heads), expand_heads(gram, inputs.heads))


def _axes(
    inputs, prompt: int, queries, moments, frequencies, grid, bias
) -> tuple[Float[Tensor, "head distance"], Float[Tensor, "head token"]]:
    """Both axes of one prompt of the batch, for one query a head."""
    some = slice(prompt, prompt + 1)
    here = Grid(grid.start[some], grid.step[some], grid.count[some])
    of_mean = _complex(queries[some]) * moments.mean[some].conj()
    some_bias = torch.zeros(1, inputs.heads, int(here.count[0])).to(of_mean.real) if bias is None else bias[some]
    by_distance = _distance_effect(of_mean[:, :, None], frequencies, here, some_bias)[0, :, 0, : int(here.count[0])]
    grand = by_distance.mean(-1, keepdim=True)
    turned = _real(_complex(queries[some]) * here.turns(frequencies) / here.count[0])[0]
    tokens = int(inputs.valid[prompt].nonzero()[-1]) + 1
    keys = expand_heads(inputs.keys[some, :, :tokens], inputs.heads)[0].to(torch.float64)
    by_key = (keys @ turned[..., None])[..., 0] + (grand - (of_mean * here.turns(frequencies) / here.count[0]).sum(-1).real[0, :, None])
    by_key = torch.where(inputs.valid[prompt, :tokens], by_key - grand / 2, 0)
    return by_distance - grand / 2, by_key


def _distance_effect(
    of_mean: Complex[Tensor, "prompt head query component"],
    frequencies: Float[Tensor, "component"],
    grid: Grid,
    bias: Float[Tensor, "prompt head distance"],
) -> Float[Tensor, "prompt head query distance"]:
    """Row means of W': the mean key at every distance of the grid, and the position logits there."""
    steps = torch.arange(bias.shape[-1], dtype=torch.float64, device=bias.device)
    distances = grid.start[..., None] + grid.step[..., None] * steps
    angles = distances[..., None] * frequencies
    return of_mean.real @ angles.cos().mT - of_mean.imag @ angles.sin().mT + bias[:, :, None]


def _bias_by_distance(inputs: AttentionInputs) -> Float[Tensor, "prompt head distance"] | None:
    """Position logits of the last valid row for the valid key d back; 0 beyond the first."""
    if inputs.position_logits is None:
        return None
    last = _last_tokens(inputs.valid, 1)[0][:, 0]
    tokens, number = _last_tokens(inputs.valid, inputs.valid.shape[1])
    rows, place = last.unique(return_inverse=True)
    logits = inputs.position_logits(rows).to(torch.float64).expand(len(last), -1, -1, -1)
    of_last = logits[torch.arange(len(last), device=last.device), :, place]
    backwards = of_last.gather(-1, tokens.flip(-1)[:, None].expand_as(of_last))
    return torch.where(number.flip(-1)[:, None], backwards, 0)


def _scatter(values: Float[Tensor, "prompt head query distance"], count: Int[Tensor, "prompt"]) -> Tensor:
    """sum (value - mean)^2 over the first `count` distances."""
    inside = torch.arange(values.shape[-1], device=values.device) < count[:, None, None, None]
    mean = torch.where(inside, values, 0).sum(-1, keepdim=True) / count[:, None, None, None]
    return torch.where(inside, values - mean, 0).square().sum(-1)


def _last_queries(
    inputs: AttentionInputs, number: int
) -> tuple[Float[Tensor, "prompt head query d_head"], Bool[Tensor, "prompt query"]]:
    """The last `number` valid queries of every prompt in float64, and which there are."""
    tokens, present = _last_tokens(inputs.valid, number)
    index = tokens[:, None, :, None].expand(-1, inputs.heads, -1, inputs.queries.shape[-1])
    queries = inputs.queries.gather(2, index).to(torch.float64)
    return torch.where(present[:, None, :, None], queries, 0), present


def _last_tokens(
    valid: Bool[Tensor, "prompt token"], number: int
) -> tuple[Int[Tensor, "prompt query"], Bool[Tensor, "prompt query"]]:
    """Indices of the last `number` valid tokens in order, and which there are: missing ones come first."""
    number = min(number, valid.shape[1])
    order = valid.to(torch.int8).argsort(dim=-1, stable=True)[:, -number:]
    return order, valid.gather(-1, order)


def _complex(features: Float[Tensor, "... d_head"]) -> Complex[Tensor, "... component"]:
    half = features.shape[-1] // 2
    return torch.complex(features[..., :half].to(torch.float64), features[..., half:].to(torch.float64))


def _real(values: Complex[Tensor, "... component"]) -> Float[Tensor, "... d_head"]:
    return torch.cat([values.real, values.imag], -1)


def _quarters(gram: Float[Tensor, "... d_head d_head"]) -> tuple[Tensor, Tensor, Tensor]:
    half = gram.shape[-1] // 2
    return gram[..., :half, :half], gram[..., :half, half:], gram[..., half:, half:]
