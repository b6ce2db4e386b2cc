"""How far a row of numbers follows segments: the share of its variance between them, and whether its jumps are at their edges.

    eta^2 = sum_s n_s (mean_s - mean)^2 / sum_i (z_i - mean)^2
    F1 of the k largest |z_i - z_{i-1}| against k edges, each matched to at most one within the tolerance

As many jumps as edges are taken, so precision, recall and F1 are one number. Jumps of one size come in a random order that is given:
a row without a jump that stands out, such as the index, has the F1 of chance.

Knows nothing about where the rows or the edges come from.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def variance_between(values: Float[Tensor, "row token"], edges: Int[Tensor, "draw edge"]) -> Float[Tensor, "draw row"]:
    """eta^2 of every row for every layout of segments, from 0 to 1, float64; NaN where a row does not vary."""
    rows, tokens = values.shape
    draws = edges.shape[0]
    centred = values.double() - values.double().mean(-1, keepdim=True)
    total = centred.square().sum(-1)
    sums = torch.nn.functional.pad(centred.cumsum(-1), (1, 0))
    bounds = torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=tokens)
    segment = (sums[:, bounds.flatten()].view(rows, draws, -1)).diff(dim=-1)
    between = (segment.square() / bounds.diff(dim=-1)).sum(-1)
    varies = values.amax(-1) > values.amin(-1)
    return torch.where(varies, between.T / total, torch.nan)


def largest_jumps(
    values: Float[Tensor, "row token"], count: int, orders: Int[Tensor, "draw step"]
) -> Int[Tensor, "draw row edge"]:
    """Tokens behind the `count` largest steps of every row, ascending; of equal steps those that come first in each of `orders`."""
    steps = values.double().diff(dim=-1).abs()
    found = []
    for order in orders:
        ranked = steps[:, order].argsort(dim=-1, descending=True, stable=True)[:, :count]
        found.append(order[ranked].sort(dim=-1).values + 1)
    return torch.stack(found)


def has_ties(values: Float[Tensor, "row token"], count: int) -> bool:
    """Whether in some row more than `count` steps could be the `count` largest."""
    steps = values.double().diff(dim=-1).abs().sort(dim=-1, descending=True).values
    return count < steps.shape[-1] and bool((steps[:, count - 1] == steps[:, count]).any())


def matched(found: Int[Tensor, "... edge"], edges: Int[Tensor, "... edge"], tolerance: int) -> Float[Tensor, "..."]:
    """Share of `edges` that have a partner in `found` within `tolerance` tokens, none of them two; both ascending. Float64.

    The largest number of pairs, found by going along both lists at once; leading axes broadcast.
    """
    found, edges = torch.broadcast_tensors(found, edges)
    count = edges.shape[-1]
    padded_found = torch.nn.functional.pad(found, (0, 1))
    padded_edges = torch.nn.functional.pad(edges, (0, 1))
    at_found = torch.zeros(found.shape[:-1], dtype=torch.long, device=found.device)
    at_edge, pairs = at_found.clone(), at_found.clone()
    for _ in range(2 * count - 1):
        open_still = (at_found < count) & (at_edge < count)
        if not bool(open_still.any()):
            break
        difference = (padded_found.gather(-1, at_found[..., None]) - padded_edges.gather(-1, at_edge[..., None]))[..., 0]
        pair = open_still & (difference.abs() <= tolerance)
        pairs += pair
        at_found += pair | (open_still & (difference < -tolerance))
        at_edge += pair | (open_still & (difference > tolerance))
    return pairs.double() / count
