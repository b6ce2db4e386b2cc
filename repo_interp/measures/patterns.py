"""Constant, mono and hybrid stretches of positions (RePo sec. 5.2, fig. 3).

A prompt's positions are cut into chunks of C tokens. A chunk is

    constant (0)   all |z - mean of the chunk| <= epsilon
    mono (1)       else, strictly increasing or strictly decreasing
    hybrid (2)     else

with C = 16 and epsilon = 0.2 positions in the paper. Constant is asked first. A shorter last chunk
is dropped, or kept by `last_chunk="keep"`. -1 stands where a layer has no positions or a prompt no
chunk. Shares over all heads count layers that learn positions; index positions are mono by
definition.

Counting with noise is hybrid too. So beside the classes stands the rank correlation of z and the
token index (ours),

    trend          over the valid tokens of a prompt
    chunk_trend    within whole chunks, mean over chunks
    trend_null     95 % of |trend| of permuted positions
    counts_tokens  |trend| > .8 and above its null in every prompt
    trend_slope    least squares, in positions per token

Correlations of a constant head or chunk are undefined, and left out of means.

Knows nothing about the meaning of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.rank_trend import (
    Index,
    counts_tokens,
    rank_trend,
    slope,
    trend_null,
)
from repo_interp.measures.kernels.rounding import equal_within
from repo_interp.measures.kernels.seen_pairs import by_head, extents, made_of, once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.values import PositiveOrZero

PATTERNS = ("constant", "mono", "hybrid")
CHUNK_SIZES = (8, 16, 32, 64)
EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8)
_TEXTS = {
    "chunk_pattern": "pattern of each chunk: 0 constant, 1 mono, 2 hybrid, -1 none",
    "pattern_share": "share of a head's chunks with each pattern",
    "pattern_share_all": (
        "share of the chunks with each pattern, over the layers that learn positions"
    ),
    "trend": "rank correlation of a head's positions and the token index",
    "trend_slope": "least-squares slope of positions on the token index [positions per token]",
    "trend_null": "size of the trend that 95 % of permuted positions stay within",
    "chunk_trend": "rank correlation with the token index within chunks, mean over chunks",
    "counts_tokens": (
        "1 where the size of the trend is above .8 and its null in every prompt, -1 without "
        "positions"
    ),
    "sensitivity": (
        "share of each pattern by chunk size and tolerance, over the layers that learn positions"
    ),
}


def chunk_patterns(
    positions: Float[Tensor, "... token"],
    valid: Bool[Tensor, "... token"],
    chunk_size: int = 16,
    epsilon: float = 0.2,
    last_chunk: str = "drop",
) -> Int[Tensor, "... chunk"]:
    """Classify every chunk of the valid tokens by how its positions run.

    Chunks count from a prompt's first valid token, on whichever side its padding stands.

    Args:
        positions: Positions along the last axis.
        valid: Mask of the tokens that are no padding.
        chunk_size: Tokens per chunk.
        epsilon: Tolerance of the patterns, in positions.
        last_chunk: Whether to "drop" or "keep" a last chunk of fewer tokens; a kept chunk of one
            token is constant.

    Returns:
        Per chunk 0 constant, 1 mono, 2 hybrid, -1 no chunk.
    """
    found = _chunks(*_from_first_valid(positions, valid), (chunk_size,), last_chunk)
    return _patterns(found, epsilon)


@dataclass(frozen=True)
class _Chunks:
    """Chunks of several sizes, one size after the other."""

    of_size: dict[int, slice]
    size: Int[Tensor, "chunk"]
    values: Float[Tensor, "... chunk token"]
    full: Bool[Tensor, "... chunk"]
    known: Bool[Tensor, "... chunk"]
    """Whether it is one: full, or kept."""
    spread: Float[Tensor, "... chunk"]
    """Largest |z - mean|."""
    mono: Bool[Tensor, "... chunk"]
    """Whether it strictly increases or decreases."""


def _chunks(
    positions: Float[Tensor, "... token"],
    valid: Bool[Tensor, "... token"],
    sizes: tuple[int, ...],
    last_chunk: str,
) -> _Chunks:
    of_size, index, size = _places(positions.shape[-1], sizes, positions.device)
    # The padded entry stands for "no token": index `tokens`, never valid
    chunks, present = (
        torch.nn.functional.pad(values, (0, 1))[..., index] for values in (positions, valid)
    )
    tokens, missing = present.sum(-1), ~present
    mean = (chunks * present).sum(-1) / tokens.clamp_min(1)
    spread = (chunks - mean[..., None]).abs_().masked_fill_(missing, 0).amax(-1)
    # Valid tokens stand first: where a token is there, so is the one before it.
    step, after = chunks.diff(dim=-1), missing[..., 1:]
    # Steps into missing tokens hold for either direction
    mono = ((step > 0) | after).all(-1) | ((step < 0) | after).all(-1)
    full = tokens == size
    # x - x is 0 for finite x alone: layers without positions (NaN) have no chunk
    known = (full if last_chunk == "drop" else tokens > 0) & (mean - mean == 0)
    return _Chunks(of_size, size, chunks, full, known, spread, mono)


@lru_cache(maxsize=16)
def _places(
    tokens: int, sizes: tuple[int, ...], device: torch.device
) -> tuple[dict[int, slice], Int[Tensor, "chunk token"], Int[Tensor, "chunk"]]:
    """Return slices of the chunks per size, the tokens of every chunk, and its size.

    Token number `tokens` stands for none.
    """
    step, of_size, index = torch.arange(max(sizes), device=device), {}, []
    for size in sizes:
        starts = torch.arange(0, tokens, size, device=device)[:, None]
        first = sum(map(len, index))
        of_size[size] = slice(first, first + len(starts))
        index.append((starts + step).where(step < size, tokens).clamp_max(tokens))
    size_of = torch.cat(
        [
            torch.full((len(some),), size, device=device)
            for size, some in zip(sizes, index, strict=True)
        ]
    )
    return of_size, torch.cat(index), size_of


def _patterns(chunks: _Chunks, epsilon: float) -> Int[Tensor, "... chunk"]:
    # Arithmetic in place of branches: 0 constant, 1 mono, 2 hybrid, -1 unknown, without a wait
    return chunks.known * ((chunks.spread > epsilon) * (2 - chunks.mono.long()) + 1) - 1


def _counts(chunks: _Chunks) -> Float[Tensor, "size epsilon pattern"]:
    """Count chunks by size and pattern, for all tolerances at once."""
    epsilons, of_size = once("grid", lambda: _grid(chunks.size), chunks.size)
    # [..., chunk, epsilon]: only constant depends on the tolerance, so nothing is classified again
    varied = (chunks.spread[..., None] > epsilons) & chunks.known[..., None]
    mono, known = varied & chunks.mono[..., None], chunks.known[..., None].expand_as(varied)
    of_chunks = torch.stack([known, varied, mono], -1).flatten(0, -4).sum(0, dtype=torch.float64)
    # [size, chunk] x [chunk, epsilon and 3 counts]
    known, varied, mono = torch.mm(of_size, of_chunks.flatten(1)).unflatten(1, (-1, 3)).unbind(-1)
    return torch.stack([known - varied, mono, varied - mono], -1)


def _grid(
    size: Int[Tensor, "chunk"],
) -> tuple[Float[Tensor, "epsilon"], Float[Tensor, "size chunk"]]:
    """Return the tolerances, and the chunks by size."""
    of_size = size == torch.tensor(CHUNK_SIZES, device=size.device)[:, None]
    return torch.tensor(EPSILONS, dtype=torch.float64, device=size.device), of_size.to(
        torch.float64
    )


def _from_first_valid(positions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    order, present = once("first valid", lambda: _order(valid), valid)
    positions, order = torch.broadcast_tensors(positions.double(), order)
    return positions.gather(-1, order), present


def _order(
    valid: Bool[Tensor, "... token"],
) -> tuple[Int[Tensor, "... token"], Bool[Tensor, "... token"]]:
    """The tokens of every prompt from its first valid one on, and which of these are valid."""
    first = valid.to(torch.int8).argmax(-1, keepdim=True)
    order = (torch.arange(valid.shape[-1], device=valid.device) + first) % valid.shape[-1]
    return order, made_of(valid, valid.gather(-1, order))


@dataclass(frozen=True)
class Patterns(
    Measure, needs=Needs(tensors=("positions",), nan=("trend", "trend_slope", "trend_null"))
):
    """The measure `patterns`."""

    chunk_size: Annotated[int, Interval(ge=2, le=65_536)] = 16
    """C, tokens of a chunk."""
    epsilon: PositiveOrZero = 0.2
    """Tolerance of a constant chunk, in positions."""
    last_chunk: Literal["drop", "keep"] = "drop"
    """`drop` or `keep` a last chunk of fewer tokens."""
    name: str = "patterns"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return chunk patterns and trends.

        Where positions are learned, also counts of patterns over a grid of sizes and tolerances.
        """
        learned, positions = inputs.learned, inputs.positions
        if positions is None:
            positions = torch.full_like(inputs.valid[:, None], torch.nan, dtype=torch.double)
        shown = by_head(inputs.valid)
        aligned, present = _from_first_valid(positions, shown)
        index = once("index", lambda: Index(present), shown)
        # The grid's chunks serve the patterns too, where the size asked for is one of the grid
        sizes = CHUNK_SIZES if learned and self.chunk_size in CHUNK_SIZES else (self.chunk_size,)
        found, counts = (
            _chunks(aligned, present, sizes, self.last_chunk),
            np.zeros((len(CHUNK_SIZES), len(EPSILONS), len(PATTERNS))),
        )
        if learned:
            grid = (
                found
                if sizes is CHUNK_SIZES
                else _chunks(aligned, present, CHUNK_SIZES, self.last_chunk)
            )
            # Heads that share positions count singly, as in `chunk_pattern`
            counts = (inputs.heads // positions.shape[1]) * _counts(grid).double()
        some = found.of_size[self.chunk_size]
        # Rounding is that of the row, in chunks too; the index has none
        equal = equal_within(aligned, index.missing) if learned else aligned.new_zeros(1, 1)
        of_chunks = rank_trend(
            found.values[..., some, : self.chunk_size], equal=equal[..., None]
        ).masked_fill_(~found.full[..., some], torch.nan)
        trend = rank_trend(aligned, index, equal)
        if inputs.positions is None:
            of_chunks, trend = of_chunks.fill_(torch.nan), trend.fill_(torch.nan)
        # Sum and number of chunks that have a trend (NaN differs from itself): a mean that merges
        within = torch.stack([of_chunks.nansum((0, -1)), (of_chunks == of_chunks).sum((0, -1))])
        trends = torch.stack([trend, slope(aligned, index)])
        null = np.array([trend_null(count) for _, _, count in extents(inputs.valid)])
        per_prompt = {
            ("trend", "trend_slope"): ("prompt layer head", trends),
            "trend_null": ("prompt layer", null),
            "chunk_pattern": (
                "prompt layer head chunk",
                _patterns(found, self.epsilon)[..., some].to(torch.int8),
            ),
        }
        sums = {
            ("chunk_trend", "chunk_trend_chunks"): ("layer head", within),
            "sensitivity_chunks": ("layer chunk_size epsilon pattern", counts),
            # As a sum over batches, so above 0 where any batch learned
            "learned": ("layer", np.array(float(learned))),
        }
        return Statistics(
            per_prompt=arrays(inputs, per_prompt, chunk=range(some.stop - some.start)),
            sums=arrays(inputs, sums, chunk_size=CHUNK_SIZES, epsilon=EPSILONS, pattern=PATTERNS),
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `patterns` of a run. Shares are NaN where there is no chunk."""
        of_prompts, sums = statistics.per_prompt, statistics.sums
        chunk_pattern = of_prompts["chunk_pattern"]
        counts = xr.concat(
            [(chunk_pattern == code).sum(("prompt", "chunk")) for code in range(len(PATTERNS))],
            dim="pattern",
        )
        counts = counts.assign_coords(pattern=list(PATTERNS)).transpose("layer", "head", "pattern")
        learned = sums["learned"] > 0
        shares = {
            "pattern_share": counts,
            # Index positions are mono by definition and would drown the others
            "pattern_share_all": counts.where(learned, 0).sum(("layer", "head")),
            "sensitivity": sums["sensitivity_chunks"].sum("layer"),
        }
        trend, null = (
            of_prompts["trend"].transpose("prompt", "layer", "head"),
            of_prompts["trend_null"].isel(layer=0, drop=True),
        )
        # A layer without positions has no trend in any prompt
        counts = np.where(
            trend.notnull().any("prompt"), counts_tokens(trend.values, null.values), -1
        )
        measured = {"chunk_pattern": chunk_pattern} | {
            name: _share(of) for name, of in shares.items()
        }
        measured |= {
            "trend": trend,
            "trend_slope": of_prompts["trend_slope"],
            "trend_null": null,
            "chunk_trend": sums["chunk_trend"]
            / sums["chunk_trend_chunks"].where(sums["chunk_trend_chunks"] > 0),
            "counts_tokens": (trend.dims[1:], counts.astype(np.int8)),
        }
        return described_group(measured, _TEXTS)


def _share(counts: xr.DataArray) -> xr.DataArray:
    total = counts.sum("pattern")
    return (counts / total.where(total > 0)).astype(np.float64)
