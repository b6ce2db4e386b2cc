"""The difference of two quantities with its standard error: over seeds where one has several, else over prompts.

    equal seeds         paired: s = sd(x1 - x2) / sqrt(n), n - 1 degrees of freedom; a seed is a block of data order and first weights
    other seeds         Welch: s^2 = s1^2 / n1 + s2^2 / n2, with Welch and Satterthwaite's degrees of freedom
    beside a single run Student: s^2 = s1^2 (1 / n1 + 1), n1 - 1 degrees of freedom; the single run's spread is taken to be s1
    prompt by prompt    paired: s = sd(x1 - x2) / sqrt(n), n - 1 degrees of freedom
    shares of prompts   Newcombe (1998, method 10): both shares' Wilson limits, so that 0 % and 100 % have an error too
    significant         margin > t s,   t the quantile of Student's distribution at the level of `SIGNIFICANT` normal standard errors
    several rows        Holm (1979): of n p-values of one claim, the k-th smallest counts n - k + 1 times

The level stays the same where samples are few: 2 standard errors of a normal sample are 2.4 at 10 degrees of freedom and 4.5 at 2.
Knows nothing about what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from scipy import optimize, stats

SIGNIFICANT = 2.0
"""Standard errors of a normal sample that a difference has to be above; fewer degrees of freedom ask for more, at the same level."""


MOST_SEEDS = 1000
"""Where more would be needed, no number of seeds is named."""
RAREST = 38.0
"""Standard errors beyond which a probability is 0 in floating point."""


@dataclass(frozen=True)
class Difference:
    """The mean of one quantity minus the mean of another, and the standard error of that."""

    margin: float
    standard_error: float
    over: str
    """What the error is taken over, in words."""
    degrees: float = np.inf
    """Degrees of freedom of the standard error."""
    seeds: int = 0
    """Training seeds that the error is taken over, of the side that has fewer; 0 where it is not over seeds."""

    def limits(self, errors: float = SIGNIFICANT) -> tuple[float, float]:
        """Lower and upper limit of the difference at the level of so many normal standard errors."""
        reach = quantile(errors, self.degrees) * self.standard_error
        return self.margin - reach, self.margin + reach

    def p_value(self) -> float:
        """How probable so large a difference is where there is none, one-sided."""
        if self.standard_error == 0:
            return 0.0 if self.margin > 0 else 1.0
        return float(stats.t.sf(self.margin / self.standard_error, self.degrees))

    def exceeds(self, bound: float = 0.0, errors: float = SIGNIFICANT) -> bool:
        """Whether the margin is above `bound`, and its lower limit above zero."""
        return bool(self.limits(errors)[0] > 0 and self.margin > bound)

    def seeds_to_decide(self, bound: float = 0.0, errors: float = SIGNIFICANT) -> int:
        """How many seeds would tell on which side of `bound` the difference lies, if it and its spread stay; 0 where none would."""
        if self.seeds < 2 or not 0 < self.standard_error < np.inf:
            return 0
        away = self.margin if self.margin > bound else bound - self.margin
        counts = np.arange(self.seeds + 1, MOST_SEEDS)
        degrees = self.degrees * (counts - 1) / (self.seeds - 1)
        reach = stats.t.isf(level(errors), degrees) * self.standard_error * np.sqrt(self.seeds / counts)
        return int(counts[away > reach][0]) if (away > reach).any() else 0

    def falls_short(self, errors: float = SIGNIFICANT) -> bool:
        """Whether the upper limit is below zero."""
        return bool(self.limits(errors)[1] < 0)


@dataclass(frozen=True)
class ShareDifference(Difference):
    """The difference of two shares of prompts, each answered or not."""

    shares: tuple[float, float] = (0.0, 0.0)
    counts: tuple[int, int] = (0, 0)

    def limits(self, errors: float = SIGNIFICANT) -> tuple[float, float]:
        """Newcombe's limits, from those of both shares."""
        (first, second), (low, high) = self.shares, zip(*map(wilson, self.shares, self.counts, (errors,) * 2), strict=True)
        down = np.hypot(first - low[0], high[1] - second)
        up = np.hypot(high[0] - first, second - low[1])
        return self.margin - float(down), self.margin + float(up)

    def p_value(self) -> float:
        """The level at which the lower limit reaches zero, one-sided."""
        if self.margin <= 0:
            return 1.0 if self.margin < 0 else 0.5
        if self.limits(RAREST)[0] > 0:
            return level(RAREST)
        found = optimize.root_scalar(lambda errors: self.limits(errors)[0], bracket=(0.0, RAREST), xtol=1e-12)
        return level(found.root)


def level(errors: float) -> float:
    """The one-sided p-value of so many normal standard errors."""
    return float(stats.norm.sf(errors))


def quantile(errors: float, degrees: float) -> float:
    """How many standard errors with `degrees` of freedom are as rare as `errors` normal ones."""
    return errors if np.isinf(degrees) else float(stats.t.isf(level(errors), degrees))


def wilson(share: float, count: int, errors: float = 1.0) -> tuple[float, float]:
    """Wilson's limits of a share of `count` prompts, at the level of so many normal standard errors."""
    middle = (share + errors**2 / (2 * count)) / (1 + errors**2 / count)
    reach = errors / (1 + errors**2 / count) * np.sqrt(share * (1 - share) / count + errors**2 / (4 * count**2))
    return max(0.0, float(middle - reach)), min(1.0, float(middle + reach))


def share_difference(first: float, second: float, counts: tuple[int, int]) -> ShareDifference:
    """`first` minus `second`, shares of so many prompts."""
    one, other = ((high - low) / 2 for low, high in map(wilson, (first, second), counts))
    over = f"{counts[0]} and {counts[1]} prompts"
    return ShareDifference(first - second, float(np.hypot(one, other)), over, shares=(first, second), counts=counts)


def welch_difference(first: Float[np.ndarray, " sample"], second: Float[np.ndarray, " sample"], over: str) -> Difference:
    """`first` minus `second`, independent samples of at least two each; `over` says what of."""
    counts = np.array([len(first), len(second)])
    parts = np.array([np.var(values, ddof=1) for values in (first, second)]) / counts
    error, weights = float(np.sqrt(parts.sum())), counts - 1
    degrees = float(parts.sum() ** 2 / (parts**2 / weights).sum()) if error > 0 else float(weights.sum())
    return Difference(float(np.mean(first) - np.mean(second)), error, over, degrees)


def seed_difference(first: Float[np.ndarray, " seed"], second: Float[np.ndarray, " seed"]) -> Difference:
    """`first` minus `second`, over training seeds. Of a single run it is supposed that others would spread as those of the other side do.

    Raises ValueError where neither has two seeds.
    """
    counts = [len(first), len(second)]
    over = f"{counts[0]} and {counts[1]} seeds"
    if max(counts) < 2:
        raise ValueError("neither has several seeds")
    if min(counts) > 1:
        return replace(welch_difference(first, second, over), seeds=min(counts))
    several = max(first, second, key=len)
    error = float(np.std(several, ddof=1) * np.sqrt(1 + 1 / len(several)))
    return Difference(float(np.mean(first) - np.mean(second)), error, over, len(several) - 1, seeds=len(several))


def paired_seeds(first: Float[np.ndarray, " seed"], second: Float[np.ndarray, " seed"]) -> Difference:
    """`first` minus `second`, seed by seed: both were trained with the same seeds."""
    return replace(
        paired_difference(first, second), over=f"{len(first)} paired seeds" if len(first) > 1 else "one seed", seeds=len(first)
    )


def paired_difference(first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]) -> Difference:
    """`first` minus `second`, prompt by prompt."""
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if len(differences) < 2:
        return Difference(float(differences.mean()), np.inf, f"{len(differences)} prompts")
    error = float(stats.sem(differences))
    return Difference(float(differences.mean()), error, f"{len(differences)} prompts", len(differences) - 1)


def holm(p_values: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Holm's correction for several rows of one claim: the k-th smallest p-value of n times n - k + 1, never falling; not cut at 1.

    Works on multiples of a level as on p-values.
    """
    order = np.argsort(p_values)
    scaled = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted
