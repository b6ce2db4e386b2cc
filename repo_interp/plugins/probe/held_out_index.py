r"""Held-out R squared of the token index in vectors of tokens, with two nulls.

    i^_t = b + w . x_t          w, b minimize sum (i_t - b - w . x_t)^2 + penalty n |w|^2
    R^2  = 1 - sum_p E_p / sum_p V_p
    E_p  = sum_t (i_t - i^_t)^2         of prompt p, by a fit to prompts of other folds
    V_p  = sum_t (i_t - mean_p i)^2

Folds are sets of whole prompts, since neighboring tokens tell each other's index. The penalty is
that of `PENALTIES` with the least error on folds of the training prompts. Entries of x are divided
by their standard deviation, so that a massive entry outweighs no other. The interval is that of a
ratio of sums over prompts, Student's; of prompts of one length, that of the mean of
1 - E_p / V_p.

Nulls refit with another target, `DRAWS` times, their penalties chosen in the same way.

    shuffled    the index in another order in every prompt
    smooth      the index from its last value to its first one, in prompts that a coin chooses

The first asks whether anything is learned. Walks pass it too often, since a fit to a few slow
curves follows any slow curve, and is right about others by luck: of 160 sets of 6 to 24 random
walks 20 were beyond 95 % of shuffled draws, 7 beyond 95 % of smooth ones (8 expected). The smooth
null keeps stream and index as slow as they are, and changes only what they have to do with each
other: a stream that is as likely to fall as to rise in every prompt, as a walk is, has one and the
same distribution with either target, whatever its smoothness. (Circular shifts would be weaker:
they put a jump into the index, which is harder to follow than a line.) Coins that fall alike leave
the index itself, so that of fewer than 6 prompts nothing is beyond the smooth null; and coins that
fall nearly alike leave part of it, so that of few prompts it is high where R^2 is.

Knows nothing about models.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from repo_interp.intervals import student_quantile
from repo_interp.measures.kernels.rounding import ROUNDING

PENALTIES = 10.0 ** np.arange(-4, 5)
"""Weights of |w|^2 beside the mean squared error, of entries of variance 1."""
DRAWS = 99
NULLS = ("shuffled", "smooth")
FEWEST = 3
"""Prompts: one is held out, one chooses the penalty, one is fitted to."""
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
        folds: Sets of prompts, at least 3; as many as prompts where these are fewer.

    Returns:
        `r_squared`, `r_squared_low`, `r_squared_high`, and `error`, the root mean squared error in
        tokens, all []; `null_low` and `null_high`, between which 90 % of draws of `NULLS` are
        [null]. NaN of fewer than `FEWEST` prompts, or where no prompt has two samples.
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
    # Of the ratio sum E / sum V, linear about its value
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
    """The index, then draws of the nulls."""
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
    """Vectors of entries of variance 1, in as many dimensions as there are samples at most."""
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
    """Squared errors of every sample, by fits to other folds with penalties that these chose."""
    numbers = range(folds.max() + 1)
    # With a constant: its row and column of the products hold sums and counts
    both = np.hstack([np.ones((len(vectors), 1)), vectors, targets])
    width = 1 + vectors.shape[1]
    products = np.stack([both[folds == one].T @ both[folds == one] for one in numbers])
    chosen = np.zeros((len(numbers), len(PENALTIES), targets.shape[1]))
    whole = products.sum(0)
    for one, other in combinations(numbers, 2):
        fits = _fits(whole - products[one] - products[other], width)
        # One fit without both: each chooses for the other
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
    # Rounding may put a value of 0 below it
    shrunk = along / (values.clip(0) + PENALTIES[:, None])[..., None]
    weights = axes @ shrunk
    constant = means[width - 1 :] - means[: width - 1] @ weights
    return np.concatenate([constant[:, None], weights], axis=1)


def _squares(
    products: Float[np.ndarray, "any any"],
    fits: Float[np.ndarray, "penalty width target"],
    width: int,
) -> Float[np.ndarray, "penalty target"]:
    """Sums of squared errors of fits, from products of the samples that they are judged on."""
    inner, cross = products[:width, :width], products[:width, width:]
    own = np.diagonal(products)[width:]
    return own + (fits * (inner @ fits - 2 * cross)).sum(1)
