"""Scores as samples over training seeds or over prompts, and the difference of two samples with its
standard error. The first applicable method is used:

    equal seeds         paired: s = sd(x1 - x2) / sqrt(n), n - 1 degrees of freedom; a seed is a block of data order and first weights
    c >= 3 shared seeds s^2 = s1^2 / n1 + s2^2 / n2 - 2 r s1 s2 c / (n1 n2), r the correlation over
    the shared ones, with
                        c - 1 + (w - c + 1) (n1 + n2 - 2 c) / (n1 + n2) degrees of freedom, w
                        Welch's (Derrick et al. 2017, T_new2)
    other seeds         Welch: s^2 = s1^2 / n1 + s2^2 / n2, with Welch and Satterthwaite's degrees of freedom
    and a single run    Student: s^2 = s1^2 (1 / n1 + 1), n1 - 1 degrees of freedom; the spread of
                        the single run is assumed to be s1
    prompt by prompt    paired: s = sd(x1 - x2) / sqrt(n), n - 1 degrees of freedom, where both answered the same prompts
    shares of prompts   Newcombe (1998, method 10): both shares' Wilson limits, so that 0 % and 100 % have an error too; where only shares
                        of n prompts are known, or no prompt tells them apart from 0 % and 100 %
    otherwise           there is no error, and the difference cannot be judged

    significant         margin > t s,   t the quantile of Student's distribution at the level of `SIGNIFICANT` normal standard errors
    several rows        Holm (1979): of n p-values of one claim, the k-th smallest counts n - k + 1 times
    rise                score at the longest length - score at the training length; prompts of the two lengths differ, so their errors add
    intervals           of 95 %: t s of the same distributions, Wilson's of a share, Newcombe's of the difference of two

The level is the same for few samples: 2 standard errors of a normal sample correspond to 2.4 at 10
degrees of freedom and 4.5 at 2. A lower log perplexity must also be lower by more than `MATERIAL`,
since there are many windows, and their error does not include the variation between training seeds.
The test for shared seeds was chosen after Welch's test and pairs had left some parts undecided (C4
against RoPE; R1, H7 removed). This module knows arrays, and nothing about claims, checkpoints or
figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import optimize, stats

SIGNIFICANT = 2.0
"""Standard errors of a normal sample that a difference must exceed; fewer degrees of freedom need
more, at the same level.
"""
MOST_SEEDS = 1000
"""Largest number of needed seeds that is stated."""
RAREST = 38.0
"""Number of standard errors beyond which a probability is 0 in floating point."""
MATERIAL = 0.005
"""Nats per token: half a per cent of perplexity.

CoPE's is 1.5 % below that of relative positions in its paper.
"""
NORMAL_95 = float(stats.norm.isf(0.025))
"""Standard errors of a normal sample for a two-sided 95 % interval, the level of all shown
intervals.
"""
NOTHING = "nothing to take an error over"
OPPOSITE = {"above": "below", "below": "above", "less than": "more than"}


@dataclass(frozen=True)
class Difference:
    """The mean of one quantity minus the mean of another, with its standard error."""

    margin: float
    standard_error: float
    over: str
    """The units of the error in words."""
    degrees: float = np.inf
    """Degrees of freedom of the standard error."""
    seeds: int = 0
    """Number of training seeds behind the error, of the side with fewer; 0 if it is not over seeds.
    """
    samples: tuple[Sample, Sample] | None = field(default=None, compare=False, repr=False)
    """The samples behind it; None if only the margin and its error are known."""

    def limits(self, errors: float = SIGNIFICANT) -> tuple[float, float]:
        """Return lower and upper limit of the difference at the level of `errors` normal standard
        errors.
        """
        reach = quantile(errors, self.degrees) * self.standard_error
        return self.margin - reach, self.margin + reach

    def p_value(self) -> float:
        """One-sided probability of a difference this large under the null hypothesis."""
        if self.standard_error == 0:
            return 0.0 if self.margin > 0 else 1.0
        return float(stats.t.sf(self.margin / self.standard_error, self.degrees))

    def exceeds(self, bound: float = 0.0, errors: float = SIGNIFICANT) -> bool:
        """Whether the margin is above `bound`, and its lower limit above zero."""
        return bool(self.limits(errors)[0] > 0 and self.margin > bound)

    def seeds_to_decide(self, bound: float = 0.0, errors: float = SIGNIFICANT) -> int:
        """Return the number of seeds that would decide the side of `bound`, if the difference and
        its spread stay; 0 if no number would.
        """
        if self.seeds < 2 or not 0 < self.standard_error < np.inf:
            return 0
        away = self.margin if self.margin > bound else bound - self.margin
        counts = np.arange(self.seeds + 1, MOST_SEEDS)
        degrees = self.degrees * (counts - 1) / (self.seeds - 1)
        reach = (
            stats.t.isf(level(errors), degrees) * self.standard_error * np.sqrt(self.seeds / counts)
        )
        return int(counts[away > reach][0]) if (away > reach).any() else 0

    def falls_short(self, errors: float = SIGNIFICANT) -> bool:
        """Whether the upper limit is below zero."""
        return bool(self.limits(errors)[1] < 0)


@dataclass(frozen=True)
class ShareDifference(Difference):
    """The difference of two shares of correctly answered prompts."""

    shares: tuple[float, float] = (0.0, 0.0)
    counts: tuple[int, int] = (0, 0)

    def limits(self, errors: float = SIGNIFICANT) -> tuple[float, float]:
        """Return Newcombe's limits, from the limits of both shares."""
        first, second = self.shares
        own, rival = (wilson(*each, errors) for each in zip(self.shares, self.counts, strict=True))
        down = np.hypot(first - own[0], rival[1] - second)
        up = np.hypot(own[1] - first, second - rival[0])
        return self.margin - float(down), self.margin + float(up)

    def p_value(self) -> float:
        """The level at which the lower limit reaches zero, one-sided."""
        if self.margin <= 0:
            return 1.0 if self.margin < 0 else 0.5
        if self.limits(RAREST)[0] > 0:
            return level(RAREST)
        found = optimize.root_scalar(
            lambda errors: self.limits(errors)[0], bracket=(0.0, RAREST), xtol=1e-12
        )
        return level(found.root)


def level(errors: float) -> float:
    """Return the one-sided p-value of a number of normal standard errors."""
    return float(stats.norm.sf(errors))


def quantile(errors: float, degrees: float) -> float:
    """Return the standard errors with `degrees` of freedom that are as rare as `errors` normal
    ones.
    """
    return errors if np.isinf(degrees) else float(stats.t.isf(level(errors), degrees))


def wilson(share: float, count: int, errors: float = NORMAL_95) -> tuple[float, float]:
    """Return Wilson's limits of a share of `count` prompts, at the level of `errors` normal
    standard errors, by default 95 %.
    """
    middle = (share + errors**2 / (2 * count)) / (1 + errors**2 / count)
    reach = (
        errors
        / (1 + errors**2 / count)
        * np.sqrt(share * (1 - share) / count + errors**2 / (4 * count**2))
    )
    return max(0.0, float(middle - reach)), min(1.0, float(middle + reach))


def share_difference(first: float, second: float, counts: tuple[int, int]) -> ShareDifference:
    """Return `first` minus `second`, shares of `counts` prompts.

    The standard error is that of a normal sample with a 95 % interval as long as Newcombe's.
    """
    one, other = ((high - low) / 2 for low, high in map(wilson, (first, second), counts))
    over = f"{counts[0]} and {counts[1]} prompts"
    return ShareDifference(
        first - second,
        float(np.hypot(one, other)) / NORMAL_95,
        over,
        shares=(first, second),
        counts=counts,
        samples=(Sample.of_share(first, counts[0]), Sample.of_share(second, counts[1])),
    )


def welch_difference(
    first: Float[np.ndarray, " sample"], second: Float[np.ndarray, " sample"], over: str
) -> Difference:
    """Return `first` minus `second`, independent samples of at least two units, named by `over`."""
    samples = Sample.of_prompts(first, over), Sample.of_prompts(second, f"not {over}")
    counts = np.array([len(first), len(second)])
    parts = np.array([np.var(values, ddof=1) for values in (first, second)]) / counts
    error, weights = float(np.sqrt(parts.sum())), counts - 1
    degrees = (
        float(parts.sum() ** 2 / (parts**2 / weights).sum()) if error > 0 else float(weights.sum())
    )
    margin = float(np.mean(first) - np.mean(second))
    return Difference(margin, error, over, degrees, samples=samples)


def seed_difference(
    first: Float[np.ndarray, " seed"], second: Float[np.ndarray, " seed"]
) -> Difference:
    """Return `first` minus `second`, over training seeds.

    A single run is assumed to have the spread of the other side.

    Raises ValueError if neither has two seeds.
    """
    counts = [len(first), len(second)]
    over = f"{counts[0]} and {counts[1]} seeds"
    if max(counts) < 2:
        raise ValueError("neither has several seeds")
    if min(counts) > 1:
        return replace(welch_difference(first, second, over), seeds=min(counts))
    several = max(first, second, key=len)
    error = float(np.std(several, ddof=1) * np.sqrt(1 + 1 / len(several)))
    return Difference(
        float(np.mean(first) - np.mean(second)), error, over, len(several) - 1, seeds=len(several)
    )


def paired_seeds(
    first: Float[np.ndarray, " seed"], second: Float[np.ndarray, " seed"]
) -> Difference:
    """Return `first` minus `second`, paired by seed: both were trained with the same seeds."""
    samples = Sample.of_seeds(first), Sample.of_seeds(second)
    return replace(
        paired_difference(first, second),
        over=f"{len(first)} paired seeds" if len(first) > 1 else "one seed",
        seeds=len(first),
        samples=samples,
    )


def paired_difference(
    first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]
) -> Difference:
    """Return `first` minus `second`, paired by prompt."""
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    count = len(differences)
    error = float(stats.sem(differences)) if count > 1 else np.inf
    return Difference(
        float(differences.mean()),
        error,
        f"{count} prompts",
        count - 1 if count > 1 else np.inf,
        samples=(Sample.of_prompts(first), Sample.of_prompts(second)),
    )


def holm(p_values: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Apply Holm's correction for several rows of one claim: the k-th smallest of n p-values times
    n - k + 1, made monotonic, not cut at 1.

    Multiples of a level work like p-values.
    """
    order = np.argsort(p_values)
    scaled = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


# ---- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Scores of one checkpoint, as means over the compared test sets."""

    seeds: Float[np.ndarray, " seed"]
    prompts: Float[np.ndarray, " prompt"]
    """Scores by prompt of the run with weights; empty if only means are recorded."""
    recorded: int
    """Number of prompts behind a recorded mean, over all test sets."""
    share: bool
    """Whether a score is a share, between 0 and 1."""
    numbers: tuple[int, ...] = ()
    """The training seed of each of `seeds`; empty if unknown."""
    texts: str = ""
    """Name of the prompts if they differ from those of the other side; such samples are
    independent.
    """

    @classmethod
    def of_seeds(cls, values: Float[np.ndarray, " seed"]) -> Sample:
        """Make a sample of values by training seed, which both sides share."""
        seeds = np.asarray(values, dtype=float)
        return cls(seeds, np.empty(0), 0, False, tuple(range(len(seeds))))

    @classmethod
    def of_prompts(cls, values: Float[np.ndarray, " prompt"], texts: str = "") -> Sample:
        """Make a sample of values by prompt of one model."""
        prompts = np.asarray(values, dtype=float)
        return cls(np.array([prompts.mean()]), prompts, len(prompts), False, (), texts)

    @classmethod
    def of_share(cls, share: float, count: int) -> Sample:
        """Make a sample from a share of `count` prompts of one model, without values by prompt."""
        return cls(np.array([share]), np.empty(0), count, True)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(self.seeds.mean())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; with one seed, half of the 95 % interval over prompts;
        None if neither is known.

        For a share that is 0 or 1, or without values by prompt, the interval is Wilson's, which
        always has a width.
        """
        if len(self.seeds) > 1:
            return float(self.seeds.std(ddof=1))
        error = self.standard_error
        if error is None:
            return None
        return error * quantile(NORMAL_95, np.inf if self._as_share else len(self.prompts) - 1)

    @property
    def standard_error(self) -> float | None:
        """Standard error over the prompts of the run with weights; None if unknown.

        For a share that is 0 or 1, or without values by prompt, it is that of a normal sample with
        a 95 % interval as long as Wilson's.
        """
        if self._as_share:
            low, high = wilson(self.mean, self.count)
            return (high - low) / (2 * NORMAL_95)
        return float(stats.sem(self.prompts)) if len(self.prompts) > 1 else None

    @property
    def over(self) -> str:
        """The units of `spread` in words."""
        if len(self.seeds) > 1:
            return f"{len(self.seeds)} seeds"
        if self._as_share:
            return "prompts, half of Wilson's 95 % interval"
        return "prompts, half of the 95 % interval" if len(self.prompts) > 1 else ""

    @property
    def count(self) -> int:
        """Number of prompts behind a mean."""
        return self.recorded or len(self.prompts)

    @property
    def _as_share(self) -> bool:
        """Whether the error must be computed from the share alone."""
        return (
            self.share
            and self.count > 0
            and (len(self.prompts) < 2 or bool(np.ptp(self.prompts) == 0))
        )


def between(first: Sample, second: Sample) -> Difference:
    """Return the scores of `first` minus those of `second`; see the module."""
    return replace(_between(first, second), samples=(first, second))


def _between(first: Sample, second: Sample) -> Difference:
    if first.texts != second.texts:
        return welch_difference(first.prompts, second.prompts, first.texts)
    if max(len(first.seeds), len(second.seeds)) > 1:
        over_seeds = _over_seeds(first, second)
        if over_seeds.standard_error > 0 or min(len(first.seeds), len(second.seeds)) > 1:
            return over_seeds
    shares = first.share and second.share and min(first.count, second.count) > 0
    if len(first.prompts) == len(second.prompts) > 1:
        paired = paired_difference(first.prompts, second.prompts)
        if paired.standard_error > 0 or not shares:
            return paired
    if shares:
        return share_difference(first.mean, second.mean, (first.count, second.count))
    return Difference(first.mean - second.mean, np.inf, NOTHING)


def _over_seeds(first: Sample, second: Sample) -> Difference:
    shared = sorted({*first.numbers} & {*second.numbers})
    same = [
        each.seeds[[each.numbers.index(number) for number in shared]] for each in (first, second)
    ]
    sizes = np.array([len(first.seeds), len(second.seeds)])
    if len(shared) > 1 and (sizes == len(shared)).all():
        return paired_seeds(*same)
    apart = seed_difference(first.seeds, second.seeds)
    if len(shared) < 3:  # a correlation of two is 1 or -1
        return apart
    correlation = 0.0 if min(map(np.ptp, same)) == 0 else float(np.corrcoef(same)[0, 1])
    deviations = [float(each.seeds.std(ddof=1)) for each in (first, second)]
    together = 2 * correlation * float(np.prod(deviations) * len(shared) / np.prod(sizes))
    degrees = (
        len(shared) - 1 + (apart.degrees - len(shared) + 1) * (1 - 2 * len(shared) / sizes.sum())
    )
    error = float(np.sqrt(max(0.0, apart.standard_error**2 - together)))
    return replace(
        apart,
        standard_error=error,
        degrees=float(degrees),
        over=f"{apart.over}, {len(shared)} of them shared",
    )


def rise(short: Sample, long: Sample) -> Sample:
    """Return the rise of every training seed."""
    return Sample(long.seeds - short.seeds, np.empty(0), long.recorded, False, long.numbers)


def between_rises(first: tuple[Sample, Sample], second: tuple[Sample, Sample]) -> Difference:
    """Return the rise of `first` from short to long prompts, minus that of `second`; each is
    (short, long).
    """
    rises = rise(*first), rise(*second)
    if max(len(each.seeds) for each in rises) > 1:
        return replace(_over_seeds(*rises), samples=rises)
    margin = (first[1].mean - first[0].mean) - (second[1].mean - second[0].mean)
    parts = [between(first[1], second[1]), between(first[0], second[0])]
    error = float(np.sqrt(sum(part.standard_error**2 for part in parts)))
    return Difference(margin, error, parts[0].over, min(part.degrees for part in parts))


def numbers_of(sample: Sample, scale: float = 1.0, ours: float | None = None) -> dict[str, Any]:
    """Return arguments of `verdict` from a sample: mean (or `ours`) and spread times `scale`, the
    units of the spread, and counts.
    """
    return {
        "ours": scale * sample.mean if ours is None else ours,
        "spread": None if sample.spread is None else scale * sample.spread,
        "spread_over": sample.over,
        "n": sample.count,
        "seeds": len(sample.seeds),
    }


def mean_of(values: Float[np.ndarray, " value"], over: str, n: int = 0) -> dict[str, Any]:
    """Return arguments of `verdict` from independent values: their mean (NaN without values) and
    standard deviation (None for a single value); `over` names the units.

    `n` is the number of sequences behind them, if it differs from the number of values.
    """
    ours = np.mean(values) if len(values) else np.nan
    spread = np.std(values, ddof=1) if len(values) > 1 else None
    return {"ours": ours, "spread": spread, "spread_over": over, "n": n or len(values)}


def in_words(
    differences: Mapping[str, Difference], word: str, unit: str, scale: float = 1.0
) -> str:
    """Format margins with errors: "3.1 points below rope (standard error 0.4 over 3 paired seeds)",
    with the opposite of `word` for a negative margin. Shares get a 95 % interval, since it is not
    symmetric.
    """

    def error(of: Difference) -> str:
        if isinstance(of, ShareDifference):
            low, high = sorted(
                scale * np.sign(of.margin or 1) * limit for limit in of.limits(NORMAL_95)
            )
            return f"95 % interval {low:.3g} to {high:.3g} over {of.over}"
        return (
            f"standard error {scale * of.standard_error:.2g} over {of.over}"
            if of.standard_error < np.inf
            else of.over
        )

    return "; ".join(
        f"{scale * abs(each.margin):.3g}{unit} "
        f"{word if each.margin >= 0 else OPPOSITE[word]} {name} ({error(each)})"
        for name, each in differences.items()
    )
