"""Angles theta_r |z_i - z_j| by which positions rotate components, over seen pairs.

With the index as position the angle grows with distance, whatever the text; learned positions
decide it themselves, and may leave slow components all but unrotated.

- histogram over fixed bins of the angle, per component, and sum of |z_i - z_j|: over all seen pairs
  while a prompt has at most `per_side` tokens, else over the grid of `per_side` queries x
  `per_side` distances evenly spread over those there are, every prompt weighted by its number of
  seen pairs
- largest |z_i - z_j| of a seen pair: over all of them, from running extremes

An angle lies in a bin where |z_i - z_j| lies between the bin's edges divided by theta_r, so one
sort into the edges of all components serves them all. This module knows nothing about queries, keys
or logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.measures.kernels.seen_pairs import is_whole, once, pair_counts
from repo_interp.runtime.memory import SHARED, memory_for

EDGES = (
    0.0,
    0.01,
    0.1,
    math.pi / 4,
    math.pi / 2,
    math.pi,
    2 * math.pi,
    4 * math.pi,
    8 * math.pi,
    16 * math.pi,
)
"""Lower edges of the bins in radians; the last one is open."""

PER_SIDE = 256
"""Queries and distances looked at in a longer prompt: about 30,000 pairs."""


_BITS = 44
"""Trailing bits of a number, of 64, without which it says its cell: 256 cells to an octave."""


@dataclass(frozen=True)
class RotationAngles:
    """Rotation angles of a layer per row of positions, float64.

    The axis `any` is a head, a key-value head, or one for all heads.
    """

    pairs: Float[Tensor, "any component angle"]
    """Seen pairs of all prompts, by component and by bin of the angle (`EDGES`)."""
    difference: Float[Tensor, "any"]
    """Sum of |z_i - z_j| over the seen pairs of all prompts, in positions."""


def rotation_angles(
    positions: Float[Tensor, "prompt any token"],
    frequencies: Float[Tensor, "component"],
    tokens: Bool[Tensor, "prompt token"],
    window: int | None = None,
    per_side: int = PER_SIDE,
) -> RotationAngles:
    """Return the histogram of rotation angles over seen pairs.

    Args:
        positions: Positions [prompt, any, token]; `any` is a head, a key-value head, or one for all
            heads.
        frequencies: Radians per position of every component.
        tokens: Mask of the tokens that take part.
        window: Tokens that a query sees, itself included; None: all earlier tokens.
        per_side: Most queries, and most distances per query, that are sampled per prompt.

    Returns:
        Counts of pairs per component over `EDGES`, and sums of position differences, both over
        prompts.
    """
    in_order, below, upto = once("edges", lambda: _edges(frequencies), frequencies)
    weights, unseen, tokens_of = once(
        ("sampled", window, per_side), lambda: _sampled_pairs(tokens, window, per_side), tokens
    )
    counts, total = [], []
    for rows in positions.to(torch.float64).split(
        max(1, memory_for(weights.device, SHARED) // (32 * weights.numel())), dim=1
    ):
        some, sizes = rows.shape[1], weights.shape[1:]
        at_query, at_key = rows.gather(-1, tokens_of.expand(-1, some, -1)).split(
            [sizes[0], sizes.numel()], -1
        )
        difference = (
            (at_query[..., None] - at_key.unflatten(-1, sizes)).abs_().masked_fill_(unseen, 0)
        )
        # One sort of the edges of all components, in positions, serves them all.
        below_edge = _by_cells if memory_for(weights.device, 0) else _by_bits
        counts.append(below_edge(difference, weights, in_order))
        total.append((weights[:, None] * difference).sum((0, 2, 3)))
    # Cumulative counts at every edge of every component, put back from sorted order; a bin is a
    # difference of two of them.
    counted = torch.cat(counts) if counts[1:] else counts[0]
    return RotationAngles(
        counted[:, upto] - counted[:, below], torch.cat(total) if total[1:] else total[0]
    )


def _by_cells(
    difference: Float[Tensor, "prompt any query distance"],
    weights: Float[Tensor, "prompt query distance"],
    edges: Float[Tensor, "edge"],
) -> Float[Tensor, "any cell"]:
    """Weight of the pairs up to the end of every cell: none, below each edge, and all."""
    cells = torch.bucketize(difference, edges, right=True).add_(1)
    weight = weights[:, None].expand_as(difference)
    counted = torch.zeros(cells.shape[1], len(edges) + 2, dtype=torch.float64, device=edges.device)
    counted.scatter_add_(1, *(part.transpose(0, 1).flatten(1) for part in (cells, weight)))
    return counted.cumsum(-1)


def _by_bits(
    difference: Float[Tensor, "prompt any query distance"],
    weights: Float[Tensor, "prompt query distance"],
    edges: Float[Tensor, "edge"],
) -> Float[Tensor, "any cell"]:
    """As `_by_cells`, on a processor, in a tenth of the time: pairs are counted, not weighed."""

    def seen_pairs() -> tuple[list[np.ndarray], Tensor]:
        # Pairs of a prompt that are seen weigh the same
        of_prompts = weights.flatten(1)
        return [np.flatnonzero(some) for some in of_prompts.numpy()], of_prompts.amax(-1)

    seen, weight = once("seen", seen_pairs, weights)
    below = [
        counts_below(rows.take(places, -1), edges.numpy())
        for places, rows in zip(seen, difference.flatten(2).numpy(), strict=True)
    ]
    ends = torch.nn.functional.pad(torch.from_numpy(np.stack(below)), (1, 1))
    ends[..., -1] = torch.from_numpy(np.array([[len(places)] for places in seen]))
    return (ends * weight[:, None, None]).sum(0)


def counts_below(
    rows: Float[np.ndarray, "row number"], edges: Float[np.ndarray, " edge"]
) -> Int[np.ndarray, "row edge"]:
    """Count the numbers of every row below each edge.

    The leading bits of numbers that are not negative, as integers, are in the order of the numbers:
    cells of 256 to an octave. Only numbers in a cell with an edge are compared with edges.

    Args:
        rows: Numbers, none negative.
        edges: Ascending positive numbers, perhaps infinite at the end.

    Returns:
        Counts [row, edge]; NaN is below none.
    """
    finite, count = edges[np.isfinite(edges)], len(rows)
    # One long line of cells, those of a row after those of the row before: the first of a row is
    # below all edges, the last behind them
    at_edge = finite.view(np.int64) >> _BITS
    first, last = (at_edge[0], at_edge[-1]) if len(finite) else (0, 0)
    cells, at_edge = int(last - first) + 3, at_edge - (first - 1)
    cell = rows.view(np.int64) >> _BITS
    cell -= first - 1
    np.minimum(np.maximum(cell, 0, out=cell), cells - 1, out=cell)
    cell += np.arange(count)[:, None] * cells
    cell = cell.reshape(-1)
    counts = np.bincount(cell, minlength=count * cells).reshape(count, cells)
    with_edge = np.zeros_like(counts, dtype=bool)
    with_edge[:, at_edge] = True
    places = np.flatnonzero(with_edge.reshape(-1).take(cell))
    counts[with_edge] = 0
    # Of these numbers, how many edges each has passed
    passed = np.searchsorted(edges, rows.reshape(-1)[places], side="right")
    of_row = places // max(1, rows.shape[1]) * (len(edges) + 1)
    below = np.bincount(passed + of_row, minlength=count * (len(edges) + 1))
    below = below.reshape(count, -1).cumsum(-1)[:, :-1]
    below[:, : len(finite)] += counts.cumsum(-1)[:, at_edge]
    below[:, len(finite) :] = np.isfinite(rows).sum(-1)[:, None]
    return below


def _edges(frequencies: Float[Tensor, "component"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted edges of all bins in positions, and the cells below and in every bin."""
    edges = (
        torch.tensor(EDGES[1:], dtype=torch.float64, device=frequencies.device)
        / frequencies.to(torch.float64).abs()[:, None]
    )
    in_order = edges.flatten().sort()
    # Cell 0 is before the first edge of all, and nothing; the last one behind the last.
    ends = 1 + in_order.indices.argsort().view(edges.shape)
    first, last = torch.zeros_like(ends[:, :1]), torch.full_like(ends[:, :1], edges.numel() + 1)
    return in_order.values, torch.cat([first, ends], 1), torch.cat([ends, last], 1)


def largest_difference(
    positions: Float[Tensor, "prompt any token"],
    tokens: Bool[Tensor, "prompt token"],
    window: int | None = None,
) -> Float[Tensor, "prompt any"]:
    """Return the largest |z_i - z_j| over all seen pairs.

    Args:
        positions: Positions [prompt, any, token]; `any` is a head, a key-value head, or one for all
            heads.
        tokens: Mask of the tokens that take part.
        window: Tokens that a query sees, itself included; None: all earlier tokens.

    Returns:
        Differences [prompt, any], in positions; -inf where no pair is seen.
    """
    return once(
        ("reach", window), lambda: _largest_difference(positions, tokens, window), positions, tokens
    )


def _largest_difference(
    positions: Tensor, tokens: Tensor, window: int | None
) -> Float[Tensor, "prompt any"]:
    hidden = None if is_whole(tokens) else ~tokens[:, None]
    # |z_i - z_j| is the larger of z_j - z_i and z_i - z_j: the running maxima of z and of -z.
    both = torch.stack([positions, -positions]).to(torch.float64)
    reach = (
        _running_maximum(both if hidden is None else both.masked_fill(hidden, -torch.inf), window)
        - both
    )
    return (reach if hidden is None else reach.masked_fill(hidden, -torch.inf)).amax((0, -1))


def _running_maximum(
    values: Float[Tensor, "... token"], window: int | None
) -> Float[Tensor, "... token"]:
    """Return running maxima within the window, from both ends of blocks."""
    tokens = values.shape[-1]
    if window is None or window >= tokens:
        return values.cummax(-1).values
    padded = torch.nn.functional.pad(values, (0, -tokens % window), value=-torch.inf).unflatten(
        -1, (-1, window)
    )
    # A window reaches over at most two blocks: the end of one and the beginning of the next.
    onward = padded.cummax(-1).values.flatten(-2)[..., :tokens]
    until = padded.flip(-1).cummax(-1).values.flip(-1).flatten(-2)[..., : tokens - window + 1]
    return torch.maximum(onward, torch.nn.functional.pad(until, (window - 1, 0), value=-torch.inf))


def _sampled_pairs(
    tokens: Bool[Tensor, "prompt token"], window: int | None, per_side: int
) -> tuple[
    Float[Tensor, "prompt query distance"],
    Bool[Tensor, "prompt 1 query distance"],
    Int[Tensor, "prompt 1 token"],
]:
    """Return weights of a grid of queries and distances, the unseen pairs, and the tokens.

    Weights are 0 where a cell holds no seen pair; tokens are the queries, then their keys.
    """
    length = tokens.shape[-1]
    indices = torch.arange(length, device=tokens.device)
    # Valid tokens first, in order, whichever side the padding is on.
    in_order = torch.where(tokens, indices, length).sort(-1).values.clamp(max=length - 1)
    last = torch.where(tokens, indices, 0).amax(-1)
    reach = (last - in_order[:, 0] + 1).clamp(max=length if window is None else window)
    rank, is_query = _evenly(tokens.sum(-1), min(length, per_side), per_side)
    distance, is_distance = _evenly(reach, min(length, per_side), per_side)
    query = in_order.gather(-1, rank)
    key = query[:, :, None] - distance[:, None, :]
    seen = (key >= 0) & is_query[:, :, None] & is_distance[:, None, :]
    key = key.clamp_(min=0)
    seen &= tokens.gather(-1, key.flatten(1)).view_as(key)
    # A prompt counts by its number of seen pairs, not by the number of sampled ones.
    weight = pair_counts(tokens, window).total / seen.sum((1, 2)).clamp(min=1)
    return (
        seen * weight[:, None, None],
        ~seen[:, None],
        torch.cat([query, key.flatten(1)], 1)[:, None],
    )


def _evenly(
    counts: Int[Tensor, "prompt"], places: int, most: int
) -> tuple[Int[Tensor, "prompt place"], Bool[Tensor, "prompt place"]]:
    """Return up to `most` evenly spread numbers below every count, and the places in use."""
    place = torch.arange(places, device=counts.device)
    counts = counts[:, None]
    spread = (place * (counts - 1).clamp(min=0) + max(1, most - 1) // 2) // max(1, most - 1)
    return torch.where(counts <= most, place, spread).minimum(
        (counts - 1).clamp(min=0)
    ), place < counts
