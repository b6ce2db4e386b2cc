"""The difference of two schemes on a task, with its 95 % interval.

    over seeds      `judge.differences.between`: paired for equal seeds, else Welch's, and Student's
                    against a single run
    over prompts    paired by prompt if both records have scores by prompt for all seeds; else
                    Newcombe's for two shares of the prompts of one seed
    shown           from the lower of the two lower limits to the higher of the two upper limits;
                    shares are clipped to [-1, 1]

Seeds without variation, such as three at 1 against three at 0, have a standard error of 0, although
each score is an estimate from prompts. The interval over prompts then gives a width. One run
against one has no interval, because prompts of a single seed do not show the variation between
seeds. This module knows no scheme and no task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from position_papers.kit.judge.differences import (
    NORMAL_95,
    Difference,
    Sample,
    ShareDifference,
    between,
    paired_difference,
    share_difference,
)

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
NOT_LEARNED = "not learned at this recipe"
ONE_SEED = "one seed each"


@dataclass(frozen=True)
class Margin:
    """The mean of one scheme minus that of another."""

    difference: float
    low: float
    high: float
    """Limits of 95 %; NaN without an interval."""
    over: str
    """The units behind the limits, in words."""
    p_value: float = 1.0
    """Two-sided p-value: the larger one of the tests over seeds and over prompts.
    """

    def verdict(self, higher: bool) -> str:
        """Return the verdict on the first scheme.

        Args:
            higher: Whether a higher score is better.

        Returns:
            `BETTER` or `WORSE` if the interval excludes 0, else `UNDECIDED`.
        """
        if self.low > 0:
            return BETTER if higher else WORSE
        if self.high < 0:
            return WORSE if higher else BETTER
        return UNDECIDED


Prompts = Float[np.ndarray, " prompt"]


def margin(first: Sample, second: Sample, prompts: tuple[Prompts, Prompts] | None = None) -> Margin:
    """Compare two schemes.

    Args:
        first: Scores of the first scheme by seed.
        second: Scores of the second scheme. Equal seeds are paired.
        prompts: Scores of both on the same prompts, for all seeds; None if unknown.

    Returns:
        First minus second.
    """
    difference = first.mean - second.mean
    if max(len(first.seeds), len(second.seeds)) < 2:
        return Margin(difference, np.nan, np.nan, ONE_SEED)
    over_seeds = between(first, second)
    low, high = over_seeds.limits(NORMAL_95)
    rare = _two_sided(over_seeds)
    over_prompts = _over_prompts(first, second, prompts)
    if over_prompts is None:
        return Margin(difference, low, high, over_seeds.over, rare)
    below, above = over_prompts.limits(NORMAL_95)
    # The wider limit on each side
    over = (
        over_seeds.over
        if low <= below and high >= above
        else f"{over_seeds.over}, {over_prompts.over}"
    )
    rare = max(rare, _two_sided(over_prompts))
    low, high = min(low, below), max(high, above)
    if first.share and second.share:
        low, high = max(-1.0, low), min(1.0, high)
    return Margin(difference, low, high, over, rare)


def _over_prompts(
    first: Sample, second: Sample, prompts: tuple[Prompts, Prompts] | None
) -> Difference | None:
    if prompts is not None:
        paired = paired_difference(*prompts)
        if paired.standard_error > 0:  # the interval has no width if all prompts agree
            return replace(paired, over=f"{len(prompts[0])} paired prompts")
    if first.share and second.share:
        return share_difference(first.mean, second.mean, (first.count, second.count))
    return None


def _two_sided(difference: Difference) -> float:
    """Return the two-sided p-value of a difference."""
    above = difference.p_value()
    if isinstance(difference, ShareDifference):
        (first, second), counts = difference.shares, difference.counts
        below = share_difference(second, first, (counts[1], counts[0])).p_value()
    else:
        below = replace(difference, margin=-difference.margin).p_value()
    return min(1.0, 2 * min(above, below))
