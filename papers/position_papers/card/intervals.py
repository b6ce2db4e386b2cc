"""The difference of two schemes on a task, with its 95 % interval.

    over seeds      `judge.differences.between`: paired where the seeds are the same ones, else
                    Welch's, and Student's beside a single run
    over prompts    Newcombe's of two shares of prompts, of the prompts of one seed
    shown           from the lower of both lower limits to the higher of both higher ones, of shares
                    cut to [-1, 1]

Seeds that do not spread - three at 1 against three at 0 - have a standard error of 0, though
prompts stand behind each; so the interval over prompts keeps a width. One run against one has no
interval: prompts of a single seed tell nothing about the next seed. Knows no scheme and no task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from position_papers.kit.judge.differences import (
    NORMAL_95,
    Difference,
    Sample,
    ShareDifference,
    between,
    share_difference,
)

WIN, LOSS, UNDECIDED = "win", "loss", "undecided"
NOT_LEARNED = "not learned at this recipe"
ONE_SEED = "one seed each"


@dataclass(frozen=True)
class Margin:
    """The mean of one scheme minus that of another."""

    difference: float
    low: float
    high: float
    """Limits of 95 %; NaN where nothing gives one."""
    over: str
    """What the limits are taken over, in words."""
    p_value: float = 1.0
    """How probable so large a difference is where there is none, to either side: the larger one of
    seeds and of prompts.
    """

    def verdict(self, higher: bool) -> str:
        """Whether the first one is better.

        Args:
            higher: Whether a higher score is better.

        Returns:
            `WIN` or `LOSS` where the interval excludes 0, else `UNDECIDED`.
        """
        if self.low > 0:
            return WIN if higher else LOSS
        if self.high < 0:
            return LOSS if higher else WIN
        return UNDECIDED


def margin(first: Sample, second: Sample) -> Margin:
    """Compare two schemes.

    Args:
        first: Scores of one by seed.
        second: Those of the other. Seeds with the same number are paired.

    Returns:
        First minus second.
    """
    difference = first.mean - second.mean
    if max(len(first.seeds), len(second.seeds)) < 2:
        return Margin(difference, np.nan, np.nan, ONE_SEED)
    over_seeds = between(first, second)
    low, high = over_seeds.limits(NORMAL_95)
    rare = _two_sided(over_seeds)
    if not (first.share and second.share):
        return Margin(difference, low, high, over_seeds.over, rare)
    over_prompts = share_difference(first.mean, second.mean, (first.count, second.count))
    below, above = over_prompts.limits(NORMAL_95)
    # Whichever is the wider one on a side
    over = (
        over_seeds.over
        if low <= below and high >= above
        else f"{over_seeds.over}, {over_prompts.over}"
    )
    rare = max(rare, _two_sided(over_prompts))
    return Margin(difference, max(-1.0, min(low, below)), min(1.0, max(high, above)), over, rare)


def _two_sided(difference: Difference) -> float:
    """The p-value of a difference to either side."""
    above = difference.p_value()
    if isinstance(difference, ShareDifference):
        (first, second), counts = difference.shares, difference.counts
        below = share_difference(second, first, (counts[1], counts[0])).p_value()
    else:
        below = replace(difference, margin=-difference.margin).p_value()
    return min(1.0, 2 * min(above, below))
