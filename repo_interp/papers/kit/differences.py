"""The mean difference of two quantities with its standard error, over seeds where both have several, else over the prompts of both.

    significant(difference) when mean > 2 standard errors

Knows nothing about what is compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SIGNIFICANT = 2.0
"""Standard errors that a difference has to be above."""


class Difference(NamedTuple):
    """The mean of one quantity minus the mean of another, and the standard error of that."""

    margin: float
    standard_error: float
    over: str
    """What the error is taken over, in words."""

    def exceeds(self, bound: float = 0.0, errors: float = SIGNIFICANT) -> bool:
        """Whether the margin is above `bound`, and above so many standard errors."""
        return bool(self.margin > errors * self.standard_error and self.margin > bound)

    def falls_short(self, errors: float = SIGNIFICANT) -> bool:
        """Whether the margin is below zero by more than so many standard errors."""
        return bool(self.margin < -errors * self.standard_error)


def difference(
    first: Float[np.ndarray, " seed"],
    second: Float[np.ndarray, " seed"],
    first_prompts: Float[np.ndarray, " prompt"],
    second_prompts: Float[np.ndarray, " prompt"],
) -> Difference:
    """`first` minus `second`: over seeds where both have at least two, else over the prompts that both were given."""
    if min(len(first), len(second)) > 1:
        error = np.sqrt(np.var(first, ddof=1) / len(first) + np.var(second, ddof=1) / len(second))
        return Difference(float(np.mean(first) - np.mean(second)), float(error), f"{len(first)} and {len(second)} seeds")
    return paired_difference(first_prompts, second_prompts)


def paired_difference(first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]) -> Difference:
    """`first` minus `second`, prompt by prompt."""
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    error = differences.std(ddof=1) / np.sqrt(len(differences)) if len(differences) > 1 else np.inf
    return Difference(float(differences.mean()), float(error), f"{len(differences)} prompts")
