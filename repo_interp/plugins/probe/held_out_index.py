r"""Held-out R squared of the token index in vectors of tokens, with two nulls.

    i^_t = b + w . x_t          w, b minimize sum (i_t - b - w . x_t)^2 + penalty n |w|^2
    R^2  = 1 - sum_p E_p / sum_p V_p
    E_p  = sum_t (i_t - i^_t)^2         of prompt p, by a fit to prompts of other folds
    V_p  = sum_t (i_t - mean_p i)^2

Folds are sets of whole prompts, since neighboring tokens reveal each other's index. The penalty is
the entry of `PENALTIES` with the least error on folds of the training prompts. Entries of x are
divided by their standard deviation, so that massive entries do not dominate. The interval is
Student's interval of a ratio of sums over prompts; for prompts of one length it equals the interval
of the mean of 1 - E_p / V_p.

Both nulls refit with another target, `DRAWS` times, and choose the penalty in the same way:

    shuffled    the index in a random order in every prompt
    smooth      the index in reverse order in randomly chosen prompts, each with probability 1/2

The first null tests whether anything is learned. Random walks pass it too often, because a fit to a
few slow curves follows any slow curve and predicts others by luck: of 160 sets of 6 to 24 random
walks, 20 exceeded 95 % of shuffled draws, but only 7 exceeded 95 % of smooth draws (8 expected).
The smooth null keeps the smoothness of stream and index and changes only their relation: if a
stream falls as often as it rises, like a random walk, both targets give the same distribution.
(Circular shifts would be a weaker null: they put a jump into the index, which is harder to fit than
a line.) A draw that reverses all prompts or none is as easy as the index itself. So with fewer than
6 prompts no result exceeds the smooth null, and with few prompts the null is high if R^2 is.

This module knows nothing about models.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from repo_interp.intervals import student_quantile
from repo_interp.measures.kernels.rounding import ROUNDING

PENALTIES = 10.0 ** np.arange(-4, 5)
"""Weights of |w|^2 relative to the mean squared error, for entries of variance 1."""
DRAWS = 99
NULLS = ("shuffled", "smooth")
FEWEST = 3
"""Least number of prompts: one is held out, one chooses the penalty, and one is fitted to."""
_SEED = 0


def held_out_index(
    vectors: Float[np.ndarray, "sample entry"],
    prompts: Int[np.ndarray, " sample"],
    index: Int[np.ndarray, " sample"],
    folds: int = 5,
) -> dict[str, Float[np.ndarray, "..."]]:
    """Predict the token index of prompts from vectors, by fits to other prompts.

    Args:
        vectors: Vectors of tokens.
        prompts: Prompt of every sample, 0 .. P - 1, ascending.
        index: Token index of every sample.
        folds: Number of sets of prompts, at least 3; at most one per prompt.

    Returns:
        Scalars `r_squared`, `r_squared_low`, `r_squared_high`, and `error`, the root mean squared
        error in tokens; `null_low` and `null_high` [null], which hold 90 % of the draws of `NULLS`.
        All are NaN for fewer than `FEWEST` prompts, or if no prompt has two samples.
    """
    count = int(prompts.max(initial=-1)) + 1
    starts = np.searchsorted(prompts, np.arange(count))
    if count < FEWEST or len(index) == count:
        names = ("r_squared", "r_squared_low", "r_squared_high", "error")
        none = {name: np.array(np.nan) for name in names}
        return none | {name: np.full(len(NULLS), np.nan) for name in ("null_low", "null_high")}
    targets = _targets(index.astype(float), prompts, starts)
    of_fold = np.arange(count) % min(folds, count)
    missed = _errors(_standardized(vectors), targets, of_fold[prompts])
    # [prompt, target]
    errors = np.add.reduceat(missed, starts)
    means = np.add.reduceat(targets, starts) / np.bincount(prompts)[:, None]
    variance = np.add.reduceat(np.square(targets - means[prompts]), starts)
    explained = 1 - errors.sum(0) / variance.sum(0)
    # Standard error of the ratio sum E / sum V, linearized at its value
    deviation = errors[:, 0] - (1 - explained[0]) * variance[:, 0]
    spread = np.sqrt(count / (count - 1) * np.square(deviation).sum()) / variance[:, 0].sum()
    half = student_quantile(count - 1) * spread
    low, high = np.quantile(explained[1:].reshape(len(NULLS), DRAWS), (0.05, 0.95), axis=1)
    return {
        "r_squared": explained[0],
        "r_squared_low": explained[0] - half,
        "r_squared_high": explained[0] + half,
        "error": np.sqrt(errors[:, 0].sum() / len(index)),
        "null_low": low,
        "null_high": high,
    }


def _targets(
    index: Float[np.ndarray, " sample"],
    prompts: Int[np.ndarray, " sample"],
    starts: Int[np.ndarray, " prompt"],
) -> Float[np.ndarray, "sample target"]:
    """Return the index, then draws of the nulls."""
    # The same draws for every layer
    random = np.random.default_rng(_SEED)
    ends = np.append(starts[1:], len(index))
    shuffled = [
        np.concatenate([random.permutation(index[a:b]) for a, b in zip(starts, ends, strict=True)])
        for _ in range(DRAWS)
    ]
    turned = (index[starts] + index[ends - 1])[prompts] - index
    coins = random.integers(0, 2, (DRAWS, len(starts)), dtype=bool)
    smooth = np.where(coins[:, prompts], turned, index)
    return np.stack([index, *shuffled, *smooth], axis=1)


def _standardized(vectors: Float[np.ndarray, "sample entry"]) -> Float[np.ndarray, "sample any"]:
    """Scale entries to variance 1, and reduce vectors to at most as many dimensions as samples."""
    means, spreads = vectors.mean(0), vectors.std(0)
    constant = np.square(spreads) <= ROUNDING * np.square(vectors).mean(0)
    scaled = np.where(constant, 0, vectors - means) / np.where(constant, 1, spreads)
    if scaled.shape[1] <= len(scaled):
        return scaled
    # A rotation into the span of the samples: a ridge fit is the same in any coordinates
    triangle: Any = np.linalg.qr(scaled.T, mode="r")
    return triangle.T


def _errors(
    vectors: Float[np.ndarray, "sample entry"],
    targets: Float[np.ndarray, "sample target"],
    folds: Int[np.ndarray, " sample"],
) -> Float[np.ndarray, "sample target"]:
    """Squared errors of every sample, by fits to the other folds, which also choose the penalty."""
    numbers = range(folds.max() + 1)
    # The column of ones gives sums and counts among the products.
    both = np.hstack([np.ones((len(vectors), 1)), vectors, targets])
    width = 1 + vectors.shape[1]
    products = np.stack([both[folds == one].T @ both[folds == one] for one in numbers])
    chosen = np.zeros((len(numbers), len(PENALTIES), targets.shape[1]))
    whole = products.sum(0)
    for one, other in combinations(numbers, 2):
        fits = _fits(whole - products[one] - products[other], width)
        # One fit without both folds: each helps to choose the penalty for the other.
        for judged, held in ((one, other), (other, one)):
            chosen[held] += _squares(products[judged], fits, width)
    errors = np.empty_like(targets)
    for one in numbers:
        best = chosen[one].argmin(0)
        weights = np.take_along_axis(_fits(whole - products[one], width), best[None, None], 0)[0]
        held = folds == one
        errors[held] = np.square(targets[held] - both[held, :width] @ weights)
    return errors


def _fits(
    products: Float[np.ndarray, "any any"], width: int
) -> Float[np.ndarray, "penalty width target"]:
    """The constant and the weights of ridge fits, by penalty."""
    count, means = products[0, 0], products[0, 1:] / products[0, 0]
    centered = products[1:, 1:] / count - np.outer(means, means)
    values, axes = np.linalg.eigh(centered[: width - 1, : width - 1])
    along = axes.T @ centered[: width - 1, width - 1 :]
    # Rounding may make an eigenvalue of 0 negative.
    shrunk = along / (values.clip(0) + PENALTIES[:, None])[..., None]
    weights = axes @ shrunk
    constant = means[width - 1 :] - means[: width - 1] @ weights
    return np.concatenate([constant[:, None], weights], axis=1)


def _squares(
    products: Float[np.ndarray, "any any"],
    fits: Float[np.ndarray, "penalty width target"],
    width: int,
) -> Float[np.ndarray, "penalty target"]:
    """Sums of squared errors of fits, from the products of held-out samples."""
    inner, cross = products[:width, :width], products[:width, width:]
    own = np.diagonal(products)[width:]
    return own + (fits * (inner @ fits - 2 * cross)).sum(1)
