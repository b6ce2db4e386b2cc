"""Edges of segments, shuffled layouts to compare with, and scores of how rows follow them.

    edges e_1 < ... < e_k of n tokens: token e_m begins segment m; segment 0 begins at token 0
    eta^2 = sum_s n_s (mean_s - mean)^2 / sum_i (z_i - mean)^2
    F1 of the k largest |z_i - z_{i-1}| against k edges, matched one to one within the
    tolerance

A shuffled layout has the segments in random order, and then all edges moved by one random number of
tokens,

    e' = e + r,    r = 1 - n_0 .. n_k - 1    (n_0, n_k: tokens of the first and of the last segment)

so that it has as many edges at the same distances; moved too, since segments of one length are the
same in any order. Draws depend on the seed, the prompt's number and the kind alone. As many jumps
as edges are taken, so precision, recall and F1 are one number. Jumps of one size come in a random
order that is given: a row without a jump that stands out, such as the index, has the F1 of chance.

This module knows nothing about positions or attention.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval, MinLen
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.inputs import Spans
from repo_interp.measures.kernels.rounding import RELATIVE

Kinds = Annotated[tuple[str, ...], MinLen(1)]
"""Kinds of segments, at least one."""
Draws = Annotated[int, Interval(ge=1, le=10_000)]
"""Shuffled layouts to compare with."""
INSIDE, STARTS = "segments.", ".starts"
"""Spans `segments.K` and `segments.K.starts` of a kind K of segments."""


def segment_edges(
    spans: Spans, kind: str, row: int
) -> tuple[Int[Tensor, "member"], Int[Tensor, "edge"]]:
    """Return the tokens of a prompt in segments of a kind, and the edges between segments.

    Args:
        spans: Masks of the batch, with those of segments.
        kind: Kind of segments, such as "lines".
        row: Index of the prompt in the batch.

    Returns:
        Indices of the tokens that lie in segments; and the places in that list where a segment
        begins, 0 left out. Both are empty where the spans lack the kind.
    """
    inside = spans.get(INSIDE + kind)
    starts = spans.get(INSIDE + kind + STARTS)
    if inside is None or starts is None:
        nothing = torch.zeros(0, dtype=torch.long)
        return nothing, nothing
    members = inside[row].nonzero()[:, 0]
    # Places among the members, so that tokens between segments leave no gap
    begins = starts[row][members].nonzero()[:, 0]
    return members, begins[begins > 0]


def shuffled_edges(
    edges: Int[Tensor, "edge"], tokens: int, draws: int, random: np.random.Generator
) -> Int[Tensor, "draw edge"]:
    """Draw shuffled layouts of segments.

    Args:
        edges: Edges of the true layout, ascending.
        tokens: Number of tokens in all segments.
        draws: Number of layouts.
        random: Source of random numbers.

    Returns:
        Edges [draw, edge], ascending, on the device of `edges`.
    """
    lengths = np.diff(edges.cpu().numpy(), prepend=0, append=tokens)
    orders = np.stack([random.permutation(lengths) for _ in range(draws)])
    # The upper end is excluded: the first edge is at least 1, the last at most tokens - 1
    moved = random.integers(1 - orders[:, 0], orders[:, -1])
    return torch.as_tensor(np.cumsum(orders[:, :-1], axis=1) + moved[:, None], device=edges.device)


def generator(seed: int, prompt: int, kind: str = "") -> np.random.Generator:
    """Return the random numbers of one prompt and kind, independent of the batch.

    Args:
        seed: Seed of the measure.
        prompt: Number of the prompt in the run.
        kind: Kind of segments; empty: none.

    Returns:
        A generator seeded by all three.
    """
    # Numpy mixes a list of numbers into one seed; hash() of text differs from process to process
    return np.random.default_rng([seed, prompt, *kind.encode()])


def chance(drawn: Tensor, observed: Tensor) -> Tensor:
    """Return the share of draws that are at least as high as an observation.

        (1 + such draws) / (1 + draws)

    Args:
        drawn: Draws along axis 0.
        observed: Observations, of the shape of one draw.

    Returns:
        Shares of the shape of `observed`, float64; NaN where `observed` is NaN.
    """
    # Equal values that were summed in another order count as ties, not as lower
    at_least = (drawn >= observed - 1e-12).sum(0).double()
    return ((1 + at_least) / (1 + drawn.shape[0])).masked_fill(observed.isnan(), torch.nan)


def variance_between(
    values: Float[Tensor, "row token"], edges: Int[Tensor, "draw edge"]
) -> Float[Tensor, "draw row"]:
    """Return eta^2 of every row for every layout of segments.

    Args:
        values: Rows of numbers.
        edges: Edges of the layouts, ascending.

    Returns:
        Shares of variance from 0 to 1 [draw, row], float64; NaN where a row varies by rounding
        only.
    """
    rows, tokens = values.shape
    draws = edges.shape[0]
    # With mean 0, a segment's part of eta^2 is (its sum)^2 over its length
    centred = values.double() - values.double().mean(-1, keepdim=True)
    total = centred.square().sum(-1)
    sums = torch.nn.functional.pad(centred.cumsum(-1), (1, 0))
    bounds = torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=tokens)
    segment = (sums[:, bounds.flatten()].view(rows, draws, -1)).diff(dim=-1)
    between = (segment.square() / bounds.diff(dim=-1)).sum(-1)
    # The range of the numbers as given: after centring, rounding could not be told from variance
    known = values.amax(-1) - values.amin(-1) > RELATIVE * values.abs().amax(-1)
    return torch.where(known, between.T / total, torch.nan)


def largest_jumps(
    values: Float[Tensor, "row token"], count: int, orders: Int[Tensor, "draw step"]
) -> Int[Tensor, "draw row edge"]:
    """Return the tokens behind the largest steps of every row.

    Args:
        values: Rows of numbers.
        count: Number of steps to take per row.
        orders: Orders of the steps; of equal steps, the first in an order comes first.

    Returns:
        Tokens [draw, row, edge], ascending.
    """
    steps = values.double().diff(dim=-1).abs()
    jumps = []
    for order in orders:
        # A stable sort of shuffled steps: the given order decides between equal ones
        ranked = steps[:, order].argsort(dim=-1, descending=True, stable=True)[:, :count]
        # Step s leads from token s to s + 1, which is where a segment would begin
        jumps.append(order[ranked].sort(dim=-1).values + 1)
    return torch.stack(jumps)


def has_ties(values: Float[Tensor, "row token"], count: int) -> bool:
    """Return whether ties leave open which steps of a row are the largest.

    Args:
        values: Rows of numbers.
        count: Number of steps to take per row.

    Returns:
        True if in some row the steps of ranks `count` and `count` + 1 are equal.
    """
    steps = values.double().diff(dim=-1).abs().sort(dim=-1, descending=True).values
    return count < steps.shape[-1] and bool((steps[:, count - 1] == steps[:, count]).any())


def match_share(
    jumps: Int[Tensor, "... edge"], edges: Int[Tensor, "... edge"], tolerance: int
) -> Float[Tensor, "..."]:
    """Return the share of edges with a jump nearby, one jump per edge at most.

    The largest number of pairs, found by going along both lists at once. Leading axes broadcast.

    Args:
        jumps: Tokens of jumps, ascending.
        edges: Tokens of edges, ascending, as many as jumps.
        tolerance: Largest distance of a pair, in tokens.

    Returns:
        Shares from 0 to 1, float64.
    """
    jumps, edges = torch.broadcast_tensors(jumps, edges)
    count = edges.shape[-1]
    # One entry more: a list that has ended is still read, and `open_still` ignores it
    padded_jumps = torch.nn.functional.pad(jumps, (0, 1))
    padded_edges = torch.nn.functional.pad(edges, (0, 1))
    at_jumps = torch.zeros(jumps.shape[:-1], dtype=torch.long, device=jumps.device)
    at_edge, pairs = at_jumps.clone(), at_jumps.clone()
    for _ in range(2 * count - 1):
        open_still = (at_jumps < count) & (at_edge < count)
        if not bool(open_still.any()):
            break
        difference = (
            padded_jumps.gather(-1, at_jumps[..., None])
            - padded_edges.gather(-1, at_edge[..., None])
        )[..., 0]
        pair = open_still & (difference.abs() <= tolerance)
        pairs += pair
        at_jumps += pair | (open_still & (difference < -tolerance))
        at_edge += pair | (open_still & (difference > tolerance))
    return pairs.double() / count
