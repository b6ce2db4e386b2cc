"""Spearman's rank correlation of numbers with their index.

    trend = corr(rank(z_i), i)

Numbers that differ by rounding alone (`rounding.equal_within`), and those between them, share their
mean rank: the order of equal numbers would be that of a batch's rounding. This module knows nothing
about positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.measures.kernels.rounding import equal_within
from repo_interp.measures.kernels.seen_pairs import is_whole


@dataclass(frozen=True)
class Index:
    """Index 0 .. n - 1 less its mean for the n `present` tokens, which stand first; else 0."""

    present: Bool[Tensor, "*any token"]

    @cached_property
    def missing(self) -> Bool[Tensor, "*any token"] | None:
        """Mask of tokens that are not present; None where all are."""
        return None if is_whole(self.present) else ~self.present

    @cached_property
    def count(self) -> Int[Tensor, "*any 1"]:
        """Number n of present tokens."""
        return self.present.sum(-1, keepdim=True)

    @cached_property
    def values(self) -> Float[Tensor, "*any token"]:
        """The index, float64."""
        steps = torch.arange(
            self.present.shape[-1], dtype=torch.float64, device=self.present.device
        )
        return (steps - (self.count - 1) / 2) * self.present

    @cached_property
    def square(self) -> Float[Tensor, "*any"]:
        """Sum of the squared index."""
        return self.values.square().sum(-1)


def rank_trend(
    values: Float[Tensor, "*any token"],
    index: Index | None = None,
    equal: Float[Tensor, "*any 1"] | None = None,
) -> Float[Tensor, "*any"]:
    """Return Spearman's rank correlation of every row with its index.

    Args:
        values: Numbers [..., token].
        index: Tokens that count; None for all.
        equal: Difference up to which neighbors in rank are equal; None: `equal_within` the row.

    Returns:
        Correlations [...], float64; NaN where a row does not vary, or by rounding alone.
    """
    index = _all(values.shape[-1], values.device) if index is None else index
    equal = equal_within(values, index.missing) if equal is None else equal
    values = (
        values.contiguous()
        if index.missing is None
        # Missing numbers sort behind all others and change no rank of those
        else values.masked_fill(index.missing, torch.inf)
    )
    ordered = values.sort(-1).values
    # The least of the numbers that are equal to one another, in the place of each of them
    repeats = torch.nn.functional.pad(ordered.diff(dim=-1) <= equal, (1, 0))
    least = ordered.masked_fill(repeats, -torch.inf).cummax(-1).values
    # A number's mean rank is between how many are below its equals and how many are not above them
    until = torch.searchsorted(least, values, right=True)
    below = torch.searchsorted(least, least.gather(-1, until - 1))
    # Twice the rank less its mean: a factor of 2 falls out of a correlation
    ranks = below + until - index.count
    ranks = ranks if index.missing is None else ranks * index.present
    # Both sides have mean 0 over the present tokens, so no means are subtracted
    return (ranks * index.values).sum(-1) / (ranks.square().sum(-1) * index.square).sqrt()


@lru_cache(maxsize=8)
def _all(tokens: int, device: torch.device) -> Index:
    return Index(torch.ones(tokens, dtype=torch.bool, device=device))


def slope(values: Float[Tensor, "*any token"], index: Index) -> Float[Tensor, "*any"]:
    """Return the least-squares slope of every row on its index.

    Args:
        values: Numbers [..., token].
        index: Tokens that count.

    Returns:
        Slopes [...], in units of `values` per token; NaN for a single token.
    """
    known = values if index.missing is None else values.masked_fill(index.missing, 0)
    return (known * index.values).sum(-1) / index.square
