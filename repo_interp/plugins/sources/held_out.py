"""Squared errors of ridge regressions on held-out samples.

    y_i = sum_c x_ic b_c + a_{k(i)} + e_i
            minimizing |e|^2 + shrinkage (|b|^2 + |a|^2) over the other folds

The normal matrix of the categories k is diagonal, so their effects a are eliminated and the normal
equations of b are solved exactly. A shift of all samples of a prompt is neither an error nor
variance. This module knows nothing about the meaning of predictors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import sparse
from scipy.linalg import solve

Rows = Float[np.ndarray, "any row"]
"""Numbers of several rows, per sample, fold or column."""
Codes = Int[np.ndarray, " sample"]
Marks = Bool[np.ndarray, " sample"]


def one_hot(codes: Codes) -> sparse.csr_array:
    """Return indicator columns of codes.

    Args:
        codes: A code per sample.

    Returns:
        Matrix [sample, different code], 1 where a sample has the code; codes ascend.
    """
    different, columns = np.unique(codes, return_inverse=True)
    return sparse.csr_array(
        (np.ones(len(codes)), (np.arange(len(codes)), columns)), shape=(len(codes), len(different))
    )


@dataclass(frozen=True)
class HeldOut:
    """Prompt and fold of every sample, and whether its error counts; fits use all samples."""

    prompts: Codes
    folds: Codes
    judged: Marks
    shrinkage: float

    def squares(self, values: Rows) -> Rows:
        """Return sums of squares within prompts over the judged samples.

        Args:
            values: Numbers [sample, row].

        Returns:
            Sums [fold, row] of squared deviations from the prompt's mean; NaN without judged
            samples.
        """
        if not self.judged.any():
            return np.full((1, values.shape[1]), np.nan)
        values, of_prompt = values[self.judged], one_hot(self.prompts[self.judged])
        # Means of the judged samples only: a shift of them within a prompt is not an error
        means = (of_prompt.T @ values) / of_prompt.sum(axis=0)[:, None]
        return one_hot(self.folds[self.judged]).T @ np.square(values - of_prompt @ means)

    def errors(self, values: Rows, columns: sparse.csr_array, categories: sparse.csr_array) -> Rows:
        """Return squared errors of regressions on held-out samples.

        Args:
            values: Numbers [sample, row] to predict.
            columns: Predictors [sample, column].
            categories: Indicators [sample, category], at most one per sample.

        Returns:
            Sums [fold, row] of squared errors within prompts over the judged samples.
        """
        # Starts with the values; the fitted parts are subtracted fold by fold
        errors = values.copy()
        for fold in np.unique(self.folds) if values.size else ():
            # Regressions also use samples that are not judged: only `squares` leaves them out
            held, fitted = self.folds == fold, self.folds != fold
            effects = ridge(values[fitted], columns[fitted], categories[fitted], self.shrinkage)
            errors[held] -= columns[held] @ effects[0] + categories[held] @ effects[1]
        return self.squares(errors)


def ridge(
    values: Rows, columns: sparse.csr_array, categories: sparse.csr_array, shrinkage: float
) -> tuple[Rows, Rows]:
    """Return the effects of a ridge regression on columns and categories.

    Args:
        values: Numbers [sample, row] to predict.
        columns: Predictors [sample, column].
        categories: Indicators [sample, category], at most one per sample.
        shrinkage: Weight of the squared effects, above 0.

    Returns:
        Effects [column, row] and [category, row].
    """
    # With at most one category per sample Z'Z is diagonal, the counts. The normal matrix of the
    # columns is the Schur complement X'X - X'Z (Z'Z + s)^-1 Z'X, dense [column, column]
    weight = 1 / (categories.sum(axis=0) + shrinkage)
    cross: Any = columns.T @ categories
    weighted, sums = cross * weight, categories.T @ values
    normal = (columns.T @ columns - weighted @ cross.T).toarray()
    np.fill_diagonal(normal, normal.diagonal() + shrinkage)
    # Shrinkage above 0 makes it positive definite: Cholesky
    effects = solve(normal, columns.T @ values - weighted @ sums, assume_a="pos")
    return effects, weight[:, None] * (sums - cross.T @ effects)
