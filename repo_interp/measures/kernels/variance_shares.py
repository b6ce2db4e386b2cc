"""How much of a quantity's variance within prompts each group of predictors explains on prompts that were held out.

    y_i = sum_c x_ic b_c + c_prompt + e_i        one fit per fold by ridge regression, |y - x b|^2 + shrinkage |b|^2, all centred per prompt
    R^2(S) = 1 - SSE(S) / SSE(none)              S: groups of predictors; SSE: over the prompts of every fold, from the fit to the others
    share_g = sum_{S without g} |S|! (G - |S| - 1)! / G! (R^2(S and g) - R^2(S))        the mean over all orders of adding groups

The shares are Shapley's: of collinear groups none is served first, and they sum to R^2 of all groups, whatever its sign. In sample this is
the decomposition of Lindeman, Merenda and Gold (1980; "LMG", Groemping 2007); of predictiveness on held-out data that of Williamson and
Feng (2020). R^2 on held-out prompts is negative where a fit predicts worse than the prompt's mean; so may shares be.

Everything is centred per prompt, predictions too: what shifts a whole prompt is no variance. The regression is solved by conjugate
gradients on the sparse normal matrix, whose few dense columns are inverted together as a part of the preconditioner.

Knows nothing about what the predictors are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import sparse

TOLERANCE = 1e-6
"""Of the normal equations' residual, relative to their right side."""
MOST_ITERATIONS = 400
FLAT = 1e-12
"""Variance within prompts, relative to the mean square, below which a row is constant."""


@dataclass(frozen=True)
class Predictors:
    """Columns of predictors, and the group that each belongs to."""

    columns: sparse.csr_array
    """[sample, column], float64."""
    groups: Int[np.ndarray, " column"]
    dense: Bool[np.ndarray, " column"]
    """Columns that are no indicators of a category; there should be few."""


@dataclass(frozen=True)
class Explained:
    """What groups explain of every row; NaN for a row without variance within prompts, or without a sample that counts."""

    share: Float[np.ndarray, "row group"]
    alone: Float[np.ndarray, "row group"]
    """R^2 of one group without the others."""
    unique: Float[np.ndarray, "row group"]
    """What R^2 of all groups loses without one."""
    r_squared: Float[np.ndarray, " row"]
    """R^2 of all groups: the sum of their shares."""
    error: Float[np.ndarray, " row"]
    """Standard error of R^2 over folds."""


def explained(
    values: Float[np.ndarray, "row sample"],
    predictors: Predictors,
    group_count: int,
    prompts: Int[np.ndarray, " sample"],
    folds: Int[np.ndarray, " sample"],
    counted: Bool[np.ndarray, " sample"],
    shrinkage: float = 1.0,
) -> Explained:
    """Shares of the variance of every row of `values`. `prompts`, `folds`: the number of each sample's, from 0; a prompt lies in one fold.

    `counted`: the samples that are judged when their fold is held out; all are fitted to.
    """
    subsets = [subset for size in range(group_count + 1) for subset in combinations(range(group_count), size)]
    number = int(folds.max()) + 1
    errors = np.zeros((number, len(subsets), len(values)))
    for fold in range(number):
        held = np.flatnonzero((folds == fold) & counted)
        errors[fold] = _errors(values, predictors, subsets, prompts, np.flatnonzero(folds != fold), held, shrinkage)
    size = np.maximum(np.square(values).sum(1), np.finfo(float).tiny)
    total = np.where(errors[:, 0].sum(0) > FLAT * size, errors[:, 0].sum(0), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        r_squared = {subset: 1 - errors[:, place].sum(0) / total for place, subset in enumerate(subsets)}
        by_fold = 1 - errors[:, -1] / np.where(errors[:, 0] > 0, errors[:, 0], np.nan)
    share = np.zeros((len(values), group_count))
    for group in range(group_count):
        for subset in (one for one in subsets if group not in one):
            weight = factorial(len(subset)) * factorial(group_count - len(subset) - 1) / factorial(group_count)
            share[:, group] += weight * (r_squared[tuple(sorted((*subset, group)))] - r_squared[subset])
    known = np.isfinite(by_fold).sum(0)
    centred = np.nan_to_num(by_fold - np.nanmean(np.where(known > 0, by_fold, 0.0), axis=0))
    variance = np.square(centred).sum(0) / np.maximum(known - 1, 1)
    return Explained(
        share,
        np.stack([r_squared[(group,)] for group in range(group_count)], axis=1),
        np.stack([r_squared[subsets[-1]] - r_squared[without] for without in reversed(subsets[-1 - group_count : -1])], axis=1),
        r_squared[subsets[-1]],
        np.where((known > 1) & np.isfinite(total), np.sqrt(variance / np.maximum(known, 1)), np.nan),
    )


def _errors(
    values: Float[np.ndarray, "row sample"],
    predictors: Predictors,
    subsets: list[tuple[int, ...]],
    prompts: Int[np.ndarray, " sample"],
    fitted: Int[np.ndarray, " fitted"],
    held: Int[np.ndarray, " held"],
    shrinkage: float,
) -> Float[np.ndarray, "subset row"]:
    """Squared errors over the `held` samples of fits to the `fitted` ones, by every subset of groups."""
    own, mean = predictors.columns[fitted], _means(prompts[fitted])
    targets = values[:, fitted].T
    targets = targets - mean.T @ (mean @ targets)
    means = mean @ own
    normal = sparse.csr_array(own.T @ own)
    right = own.T @ targets
    held_mean = _means(prompts[held])
    asked, observed = predictors.columns[held], values[:, held].T
    observed = observed - held_mean.T @ (held_mean @ observed)
    errors = [np.square(observed).sum(0)]
    for subset in subsets[1:]:
        chosen = np.flatnonzero(np.isin(predictors.groups, subset) & (normal.diagonal() > 0))
        system = _Normal(normal[chosen][:, chosen], sparse.csr_array(means[:, chosen]), predictors.dense[chosen], shrinkage)
        predicted = asked[:, chosen] @ system.solve(right[chosen])
        misses = observed - (predicted - held_mean.T @ (held_mean @ predicted))
        errors.append(np.square(misses).sum(0))
    return np.stack(errors)


def _means(prompts: Int[np.ndarray, " sample"]) -> sparse.csr_array:
    """M [prompt, sample] with M.T @ M x the mean of x over each sample's prompt."""
    _, rows, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    shape = (len(counts), len(prompts))
    return sparse.csr_array((counts[rows] ** -0.5, (rows, np.arange(len(prompts)))), shape=shape)


class _Normal:
    """The matrix X'X - (MX)'(MX) + shrinkage of a ridge regression that is centred per prompt."""

    def __init__(
        self, gram: sparse.csr_array, means: sparse.csr_array, dense: Bool[np.ndarray, " column"], shrinkage: float
    ) -> None:
        self._gram, self._means, self._shrinkage = gram, means, shrinkage
        self._dense = np.flatnonzero(dense)
        squares = np.asarray(means.multiply(means).sum(axis=0)).ravel()
        self._scale = gram.diagonal() - squares + shrinkage
        block, own = gram[self._dense][:, self._dense].toarray(), means[:, self._dense].toarray()
        self._inverse = np.linalg.inv(block - own.T @ own + shrinkage * np.eye(len(self._dense)))

    def __matmul__(self, vectors: Float[np.ndarray, "column row"]) -> Float[np.ndarray, "column row"]:
        return self._gram @ vectors - self._means.T @ (self._means @ vectors) + self._shrinkage * vectors

    def solve(self, right: Float[np.ndarray, "column row"]) -> Float[np.ndarray, "column row"]:
        """Conjugate gradients for all right sides at once."""
        solution = np.zeros_like(right)
        residual = right.copy()
        direction = conditioned = self._conditioned(residual)
        power = (residual * conditioned).sum(0)
        wanted = TOLERANCE * np.sqrt(np.square(right).sum(0))
        for _ in range(MOST_ITERATIONS):
            if (np.sqrt(np.square(residual).sum(0)) <= wanted).all():
                break
            image = self @ direction
            curvature = (direction * image).sum(0)
            step = np.where(curvature > 0, power / np.where(curvature > 0, curvature, 1.0), 0.0)
            solution += step * direction
            residual -= step * image
            conditioned = self._conditioned(residual)
            before, power = power, (residual * conditioned).sum(0)
            direction = conditioned + np.where(before > 0, power / np.where(before > 0, before, 1.0), 0.0) * direction
        return solution

    def _conditioned(self, residual: Float[np.ndarray, "column row"]) -> Float[np.ndarray, "column row"]:
        conditioned = residual / self._scale[:, None]
        conditioned[self._dense] = self._inverse @ residual[self._dense]
        return conditioned
