"""Constant, mono and hybrid stretches of positions (RePo sec. 5.2, fig. 3).

A prompt's positions are cut into chunks of C tokens. A chunk is

    constant (0)   all |z - mean of the chunk| <= epsilon
    mono (1)       else, strictly increasing or strictly decreasing
    hybrid (2)     else

with C = 16 and epsilon = 0.2 positions in the paper. Constant is asked first. A shorter last chunk
is dropped, or kept by `last_chunk="keep"`. -1 stands where a layer has no positions or a prompt no
chunk. Shares over all heads count layers that learn positions; index positions are mono by
definition.

Counting with noise is hybrid too. So beside the classes stands the order that positions tell (ours),

    order          2 share(z_{i+d} > z_i) - 1 by distance d, on powers of two; equal ones count half
    resolution     least d from which 90 % of pairs stand in one order, the same in every prompt
                   (`kernels.order`)
    counts_tokens  resolution of at most 4 tokens

and the rank correlation of z and the token index, which depends on the length of the text: in a
text alone a random walk reaches .8,

    trend          over the valid tokens of a prompt
    chunk_trend    within whole chunks, mean over chunks
    trend_slope    least squares, in positions per token

Correlations of a constant head or chunk are undefined, and left out of means.

This module knows nothing about the meaning of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.fitting import AnyPrompt, Layers
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.order import (
    COUNTS,
    DISTANCES,
    DOUBLING,
    PARTS,
    OrderSums,
    told_by,
)
from repo_interp.measures.kernels.rank_trend import Index, rank_trend, slope
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
    "chunk_trend": "rank correlation with the token index within chunks, mean over chunks",
    "order": (
        "how far the later of two tokens has the higher position, by tokens between them: 1 "
        "always, 0 no order, -1 never"
    ),
    "resolution": (
        "least distance from which 90 % of pairs stand in one order, the same in every prompt "
        "[tokens]"
    ),
    "order_told": (
        "largest order that holds from some distance on, the same in every prompt; .8 is 90 % of "
        "pairs"
    ),
    "order_prompts": "prompts long enough to judge a resolution by [prompts]",
    "counts_tokens": (f"1 where the resolution is at most {COUNTS} tokens, -1 without positions"),
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


def _counts(chunks: _Chunks) -> Float[Tensor, "layer size epsilon pattern"]:
    """Count chunks of layers by size and pattern, for all tolerances at once."""
    epsilons, of_size = once("grid", lambda: _grid(chunks.size), chunks.size)
    # [layer, ..., chunk, epsilon]: only constant depends on the tolerance, so nothing is classified again
    varied = (chunks.spread[..., None] > epsilons) & chunks.known[..., None]
    mono, known = varied & chunks.mono[..., None], chunks.known[..., None].expand_as(varied)
    of_chunks = torch.stack([known, varied, mono], -1).flatten(1, -4).sum(1, dtype=torch.float64)
    # [size, chunk] x [layer, chunk, epsilon and 3 counts]
    known, varied, mono = (of_size @ of_chunks.flatten(2)).unflatten(-1, (-1, 3)).unbind(-1)
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
class Patterns(Measure, needs=Needs(tensors=("positions",), nan=("trend", "trend_slope", "order"))):
    """The measure `patterns`."""

    chunk_size: Annotated[int, Interval(ge=2, le=65_536)] = 16
    """C, tokens of a chunk."""
    epsilon: PositiveOrZero = 0.2
    """Tolerance of a constant chunk, in positions."""
    last_chunk: Literal["drop", "keep"] = "drop"
    """`drop` or `keep` a last chunk of fewer tokens."""
    name: str = "patterns"
    describes: ClassVar[str] = "constant, monotonic or mixed stretches of them"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether positions are learned."""
        return layers.learned

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return chunk patterns and trends.

        Where positions are learned, also counts of patterns over a grid of sizes and tolerances.
        """
        learned, positions = inputs.learned, inputs.positions
        placed = positions is not None
        if positions is None:
            positions = torch.full_like(inputs.valid[:, None], torch.nan, dtype=torch.double)
        found = jointly(
            _of_layers,
            {"positions": positions},
            # Heads that share positions count singly, as in `chunk_pattern`
            [self, inputs.valid, placed, learned, inputs.heads // positions.shape[1]],
            temporaries=256,
        )
        counts = (
            found["sensitivity_chunks"]
            if learned
            else np.zeros((len(CHUNK_SIZES), len(EPSILONS), len(PATTERNS)))
        )
        per_prompt = {
            ("trend", "trend_slope"): ("prompt layer head", found["trends"]),
            "order": ("prompt layer head distance", found["order"]),
            "chunk_pattern": ("prompt layer head chunk", found["chunk_pattern"]),
        }
        sums = {
            ("chunk_trend", "chunk_trend_chunks"): ("layer head", found["within"]),
            tuple(f"order_{part}" for part in PARTS): ("layer head lag", found["told"]),
            "sensitivity_chunks": ("layer chunk_size epsilon pattern", counts),
            # As a sum over batches, so above 0 where any batch learned
            "learned": ("layer", np.array(float(learned))),
        }
        longest = max(count for _, _, count in extents(inputs.valid))
        return Statistics(
            per_prompt=arrays(
                inputs,
                per_prompt,
                chunk=range(-(-positions.shape[-1] // self.chunk_size)),
                distance=DOUBLING[: np.searchsorted(DOUBLING, longest)],
            ),
            sums=arrays(
                inputs,
                sums,
                lag=DISTANCES,
                chunk_size=CHUNK_SIZES,
                epsilon=EPSILONS,
                pattern=PATTERNS,
            ),
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `patterns` of a run. Shares are NaN where there is no chunk."""
        given, labels = statistics.variables()
        chunk_pattern = given["chunk_pattern"].transpose("prompt", "layer", "head", "chunk")
        # [layer, head, pattern]
        counts = np.stack(
            [(chunk_pattern.values == code).sum((0, 3)) for code in range(len(PATTERNS))], -1
        )
        learned = given["learned"].values > 0
        grid = ("chunk_size", "epsilon", "pattern")
        sensitivity = given["sensitivity_chunks"].transpose("layer", *grid).values.sum(0)
        trend = given["trend"].transpose("prompt", "layer", "head")
        told = OrderSums(
            *(given[f"order_{name}"].transpose("layer", "head", "lag").values for name in PARTS)
        )
        resolution = told.resolution
        # A layer without positions has no order in any prompt
        known = ~np.isnan(given["order"].transpose("layer", "head", ...).values).all((2, 3))
        group = {
            "chunk_pattern": given["chunk_pattern"],
            "pattern_share": (("layer", "head", "pattern"), _share(counts)),
            # Index positions are mono by definition and would drown the others
            "pattern_share_all": ("pattern", _share(counts[learned].sum((0, 1)))),
            "sensitivity": (grid, _share(sensitivity)),
            "trend": trend,
            "trend_slope": given["trend_slope"],
            "chunk_trend": given["chunk_trend"]
            / given["chunk_trend_chunks"].where(given["chunk_trend_chunks"] > 0),
            "order": given["order"].transpose("prompt", "layer", "head", "distance"),
            "resolution": (("layer", "head"), resolution),
            "order_told": (("layer", "head"), told.told),
            "order_prompts": (("layer", "head"), told.texts.max(-1).astype(int)),
            "counts_tokens": (
                ("layer", "head"),
                np.where(known, resolution <= COUNTS, -1).astype(np.int8),
            ),
        }
        return described_group(group, _TEXTS, labels)


def _of_layers(
    measure: Patterns,
    valid: Bool[Tensor, "prompt token"],
    placed: bool,
    learned: bool,
    heads_each: int,
    positions: Float[Tensor, "layer prompt any token"],
) -> dict[str, Tensor]:
    """Trends, orders and patterns of layers."""
    shown = by_head(valid)
    aligned, present = _from_first_valid(positions, shown)
    index = once("index", lambda: Index(present), shown)
    # The grid's chunks serve the patterns too, where the size asked for is one of the grid
    sizes = CHUNK_SIZES if learned and measure.chunk_size in CHUNK_SIZES else (measure.chunk_size,)
    found, counts = _chunks(aligned, present, sizes, measure.last_chunk), {}
    if learned:
        grid = (
            found
            if sizes is CHUNK_SIZES
            else _chunks(aligned, present, CHUNK_SIZES, measure.last_chunk)
        )
        counts = {"sensitivity_chunks": heads_each * _counts(grid)}
    some = found.of_size[measure.chunk_size]
    # Rounding is that of the row, in chunks too; the index has none
    equal = equal_within(aligned, index.missing) if learned else aligned.new_zeros(1, 1)
    of_chunks = rank_trend(
        found.values[..., some, : measure.chunk_size], equal=equal[..., None]
    ).masked_fill_(~found.full[..., some], torch.nan)
    trend = rank_trend(aligned, index, equal)
    if not placed:
        of_chunks, trend = of_chunks.fill_(torch.nan), trend.fill_(torch.nan)
    counts_of = np.array([count for _, _, count in extents(valid)])
    order, told = told_by(aligned, present, counts_of, equal)
    return counts | {
        "trends": torch.stack([trend, slope(aligned, index)], 1),
        # Sum and number of chunks that have a trend (NaN differs from itself): a mean that merges
        "within": torch.stack(
            [of_chunks.nansum((1, -1)), (of_chunks == of_chunks).sum((1, -1))], 1
        ),
        "order": order,
        "told": told,
        "chunk_pattern": _patterns(found, measure.epsilon)[..., some].to(torch.int8),
    }


def _share(counts: np.ndarray) -> np.ndarray:
    """Counts over their sum along the last axis; NaN where it is 0."""
    total = counts.sum(-1, keepdims=True)
    return counts / np.where(total > 0, total, np.nan)
