"""Whether numbers rise or fall with their index: Spearman's rank correlation, and that of permuted numbers.

    trend = corr(rank(z_i), i)        null: the 95 % quantile of |trend| over permutations of z

A rank correlation of permuted numbers depends on how many there are; ties leave its variance, 1 / (n - 1), as it is. So one null,
drawn from a fixed seed, serves all rows of n numbers. Knows nothing about positions.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import rankdata

DRAWS = 200
"""Permutations of the null."""
QUANTILE = 0.95
COUNTS = 0.8
"""Size of the trend above which numbers count."""


def rank_trend(values: Float[np.ndarray, "*row token"]) -> Float[np.ndarray, "*row"]:
    """Return Spearman's correlation of every row with its index; NaN where a row does not vary or holds a NaN."""
    index = centred_index(values.shape[-1])
    ranks = rankdata(values, axis=-1) - (len(index) + 1) / 2
    with np.errstate(invalid="ignore"):
        return ranks @ index / np.sqrt(np.square(ranks).sum(-1) * (index @ index))


def slope(values: Float[np.ndarray, "*row token"]) -> Float[np.ndarray, "*row"]:
    """Return the least-squares slope of every row on its index; NaN for a single token."""
    index = centred_index(values.shape[-1])
    with np.errstate(invalid="ignore"):
        return values @ index / (index @ index)


def centred_index(tokens: int) -> Float[np.ndarray, " token"]:
    """Return 0 .. tokens - 1 less its mean."""
    return np.arange(tokens) - (tokens - 1) / 2


@cache
def trend_null(tokens: int) -> float:
    """Return the size of trend that 95 % of permutations of so many tokens stay within; NaN for a single token."""
    random, index = np.random.default_rng(0), centred_index(tokens)
    drawn = [abs(random.permutation(index) @ index) for _ in range(DRAWS)]
    return float(np.quantile(drawn, QUANTILE) / (index @ index)) if tokens > 1 else float("nan")


def counts_tokens(trend: Float[np.ndarray, "prompt *head"], null: Float[np.ndarray, " prompt"]) -> Bool[np.ndarray, "*head"]:
    """Return where the size of `trend` is above `COUNTS` and above its null in every prompt."""
    limit = np.fmax(null, COUNTS).reshape(-1, *[1] * (trend.ndim - 1))
    return np.all(np.abs(trend) > limit, axis=0)
