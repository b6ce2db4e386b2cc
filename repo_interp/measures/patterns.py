"""Constant, mono and hybrid stretches of positions (RePo sec. 5.2, fig. 3).

A prompt's positions are cut into chunks of C tokens. A chunk is

    constant (0)   all |z - mean of the chunk| <= epsilon
    mono (1)       else, strictly increasing or strictly decreasing
    hybrid (2)     else

with C = 16 and epsilon = 0.2 positions in the paper. Constant is asked first. A shorter last chunk is dropped, or kept by
`last_chunk="keep"`. -1 stands where a layer has no positions or a prompt no chunk. Shares over all heads count layers that learn
positions; index positions are mono by definition.

Counting with noise is hybrid too. So beside the classes stands the rank correlation of z and the token index (ours),

    trend          over the valid tokens of a prompt           counts_tokens    |trend| > .8 and above its null in every prompt
    chunk_trend    within whole chunks, mean over chunks       trend_null       95 % of |trend| of permuted positions
    trend_slope    least squares, in positions per token

Correlations of a constant head or chunk are undefined, and left out of means.

Knows nothing about what the positions mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.rank_trend import counts_tokens, rank_trend, slope, trend_null
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.layouts import LEARNED
from repo_interp.values import PositiveOrZero

PATTERNS = ("constant", "mono", "hybrid")
CHUNK_SIZES = (8, 16, 32, 64)
EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8)
_TEXTS = {
    "chunk_pattern": ("pattern of each chunk: 0 constant, 1 mono, 2 hybrid, -1 none", "1"),
    "pattern_share": ("share of a head's chunks with each pattern", "1"),
    "pattern_share_all": ("share of the chunks with each pattern, over the layers that learn positions", "1"),
    "trend": ("rank correlation of a head's positions and the token index", "1"),
    "trend_slope": ("least-squares slope of positions on the token index", "positions per token"),
    "trend_null": ("size of the trend that 95 % of permuted positions stay within", "1"),
    "chunk_trend": ("rank correlation with the token index within chunks, mean over chunks", "1"),
    "counts_tokens": ("1 where the size of the trend is above .8 and its null in every prompt, -1 without positions", "1"),
    "sensitivity": ("share of each pattern by chunk size and tolerance, over the layers that learn positions", "1"),
}


def chunk_patterns(
    positions: Float[Tensor, "... token"],
    valid: Bool[Tensor, "... token"],
    chunk_size: int = 16,
    epsilon: float = 0.2,
    last_chunk: str = "drop",
) -> Int[Tensor, "... chunk"]:
    """The pattern of every chunk of the valid tokens: 0 constant, 1 mono, 2 hybrid, -1 no chunk.

    Chunks count from a prompt's first valid token, on whichever side its padding stands. `last_chunk` is "drop" or "keep"; a kept
    chunk of one token is constant.
    """
    return _patterns(*_chunks(positions, valid, chunk_size, last_chunk), epsilon)


def _chunks(
    positions: Float[Tensor, "... token"], valid: Bool[Tensor, "... token"], chunk_size: int, last_chunk: str
) -> tuple[Bool[Tensor, "... chunk"], Float[Tensor, "... chunk"], Bool[Tensor, "... chunk"]]:
    """Of every chunk, whether it is one, its largest |z - mean|, and whether it strictly increases or decreases."""
    positions, valid = _from_first_valid(*torch.broadcast_tensors(positions.double(), valid))
    missing = -positions.shape[-1] % chunk_size
    chunks = torch.nn.functional.pad(positions, (0, missing)).unflatten(-1, (-1, chunk_size))
    present = torch.nn.functional.pad(valid, (0, missing)).unflatten(-1, (-1, chunk_size))
    tokens = present.sum(-1)
    mean = (chunks * present).sum(-1) / tokens.clamp_min(1)
    spread = (chunks - mean[..., None]).abs_().masked_fill_(~present, 0).amax(-1)
    step, both = chunks.diff(dim=-1), present[..., 1:] & present[..., :-1]
    mono = ((step > 0) | ~both).all(-1) | ((step < 0) | ~both).all(-1)
    enough = tokens == chunk_size if last_chunk == "drop" else tokens > 0
    return enough & torch.isfinite(mean), spread, mono


def _patterns(
    known: Bool[Tensor, "... chunk"], spread: Float[Tensor, "... chunk"], mono: Bool[Tensor, "... chunk"], epsilon: float
) -> Int[Tensor, "... chunk"]:
    pattern = torch.where(spread <= epsilon, 0, torch.where(mono, 1, 2))
    return torch.where(known, pattern, -1)


def _counts(
    known: Bool[Tensor, "... chunk"],
    spread: Float[Tensor, "... chunk"],
    mono: Bool[Tensor, "... chunk"],
    epsilons: Float[Tensor, "epsilon"],
) -> Int[Tensor, "epsilon pattern"]:
    """How many chunks have each pattern, for every tolerance at once."""
    constant = spread[..., None] <= epsilons
    mono = mono[..., None].expand_as(constant)
    of_patterns = torch.stack([constant, ~constant & mono, ~constant & ~mono], -1) & known[..., None, None]
    return of_patterns.flatten(0, -3).sum(0)


def _from_first_valid(positions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    first = valid.to(torch.int8).argmax(-1, keepdim=True)
    order = (torch.arange(valid.shape[-1], device=valid.device) + first) % valid.shape[-1]
    return positions.gather(-1, order), valid.gather(-1, order)


@dataclass(frozen=True)
class Patterns(Measure, needs=Needs(tensors=("positions",), nan=("trend", "trend_slope", "trend_null"))):
    """The measure `patterns`."""

    chunk_size: Annotated[int, Interval(ge=2, le=65_536)] = 16
    """C, tokens of a chunk."""
    epsilon: PositiveOrZero = 0.2
    """Tolerance of a constant chunk, in positions."""
    last_chunk: Literal["drop", "keep"] = "drop"
    """`drop` or `keep` a last chunk of fewer tokens."""
    name: str = "patterns"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Chunk patterns, trends, and where positions are learned the chunks of each pattern over a grid of sizes and tolerances."""
        positions = inputs.positions
        if positions is None:
            positions = torch.full_like(inputs.valid[:, None], torch.nan, dtype=torch.double)
        valid, sharing = inputs.valid[:, None], inputs.heads // positions.shape[1]
        chunks = chunk_patterns(positions, valid, self.chunk_size, self.epsilon, self.last_chunk)
        counts = np.zeros((len(CHUNK_SIZES), len(EPSILONS), len(PATTERNS)))
        if inputs.scheme in LEARNED:
            epsilons = torch.tensor(EPSILONS, dtype=torch.float64, device=positions.device)
            of_sizes = [_counts(*_chunks(positions, valid, size, self.last_chunk), epsilons) for size in CHUNK_SIZES]
            counts = sharing * torch.stack(of_sizes).cpu().numpy()
        of_head = ("prompt", "layer", "head")
        trends, null = np.full((2, *positions.shape[:2]), np.nan), np.full(len(positions), np.nan)
        within = np.zeros((2, positions.shape[1]))
        for row, (of_rows, present) in enumerate(zip(positions.double().cpu().numpy(), inputs.valid.cpu().numpy(), strict=True)):
            values = of_rows[:, present]
            whole = values[:, : values.shape[1] // self.chunk_size * self.chunk_size]
            of_chunks = rank_trend(whole.reshape(len(values), -1, self.chunk_size))
            trends[:, row], null[row] = (rank_trend(values), slope(values)), trend_null(values.shape[1])
            within += np.nansum(of_chunks, axis=1), np.isfinite(of_chunks).sum(1)
        trends, within = np.repeat(trends, sharing, axis=-1), np.repeat(within, sharing, axis=-1)
        per_prompt = {
            "trend": (of_head, trends[0]),
            "trend_slope": (of_head, trends[1]),
            "trend_null": (of_head[:2], null),
            "chunk_pattern": ((*of_head, "chunk"), chunks.to(torch.int8).repeat_interleave(sharing, dim=1)),
        }
        sums = {
            "chunk_trend": (of_head[1:], within[0]),
            "chunk_trend_chunks": (of_head[1:], within[1]),
            "sensitivity_chunks": (("layer", "chunk_size", "epsilon", "pattern"), counts),
            "learned": (("layer",), np.array(float(inputs.scheme in LEARNED))),
        }
        return Statistics(
            per_prompt=arrays(inputs, per_prompt, chunk=range(chunks.shape[-1])),
            sums=arrays(inputs, sums, chunk_size=CHUNK_SIZES, epsilon=EPSILONS, pattern=PATTERNS),
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `patterns` of a run. Shares are NaN where there is no chunk."""
        of_prompts, sums = statistics.per_prompt, statistics.sums
        chunk_pattern = of_prompts["chunk_pattern"]
        counts = xr.concat([(chunk_pattern == code).sum(("prompt", "chunk")) for code in range(len(PATTERNS))], dim="pattern")
        counts = counts.assign_coords(pattern=list(PATTERNS)).transpose("layer", "head", "pattern")
        learned = sums["learned"] > 0
        shares = {
            "pattern_share": counts,
            "pattern_share_all": counts.where(learned, 0).sum(("layer", "head")),
            "sensitivity": sums["sensitivity_chunks"].sum("layer"),
        }
        trend, null = of_prompts["trend"].transpose("prompt", "layer", "head"), of_prompts["trend_null"].isel(layer=0, drop=True)
        counts = np.where(trend.notnull().any("prompt"), counts_tokens(trend.values, null.values), -1)
        measured = {"chunk_pattern": chunk_pattern} | {name: _share(of) for name, of in shares.items()}
        measured |= {
            "trend": trend,
            "trend_slope": of_prompts["trend_slope"],
            "trend_null": null,
            "chunk_trend": sums["chunk_trend"] / sums["chunk_trend_chunks"].where(sums["chunk_trend_chunks"] > 0),
            "counts_tokens": (trend.dims[1:], counts.astype(np.int8)),
        }
        return described_group(measured, _TEXTS)


def _share(counts: xr.DataArray) -> xr.DataArray:
    total = counts.sum("pattern")
    return (counts / total.where(total > 0)).astype(np.float64)
