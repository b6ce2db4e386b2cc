"""Scores as samples - over training seeds, or over prompts - and the difference of two of them with its standard error.

    difference = mean(a) - mean(b);   its error is taken, in this order,
        over seeds      where both have at least two: seed by seed where they are the same seeds (paired), else Welch; where one has
                        several and they differ: others of the single run would spread so, too
        over prompts    where both answered the same ones: of the differences prompt by prompt (paired)
        of shares       where only shares of n prompts are known, or no prompt tells them apart from 0 % and 100 % (Newcombe)
    otherwise there is no error, and nothing can be said

    lower log perplexity: also by more than `MATERIAL`, since windows are many, and what another training seed would change is not
    among their errors

    rise = score at the longest length - score at the training length; prompts of the two lengths differ, so their errors add

Knows arrays only; nothing about claims, checkpoints or figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from position_papers.kit.differences import Difference, paired_difference, paired_seeds, seed_difference, share_difference, wilson

MATERIAL = 0.005
"""Nats per token: half a per cent of perplexity. CoPE's is 1.5 % below that of relative positions in its paper."""
NOTHING = "nothing to take an error over"
OPPOSITE = {"above": "below", "below": "above", "less than": "more than"}


@dataclass(frozen=True)
class Sample:
    """Scores of one checkpoint, as means over the test sets that are compared."""

    seeds: Float[np.ndarray, " seed"]
    prompts: Float[np.ndarray, " prompt"]
    """Of the run with weights; empty where only means are recorded."""
    recorded: int
    """Prompts behind a recorded mean, in all test sets together."""
    share: bool
    """Whether a score is a share, between 0 and 1."""
    numbers: tuple[int, ...] = ()
    """The training seed of each of `seeds`; empty where they are not known."""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(self.seeds.mean())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; where there is one seed, standard error over prompts; None where neither is known.

        Of a share of which only the mean is known, and of one that is 0 or 1: half of Wilson's interval, which is never 0.
        """
        if len(self.seeds) > 1:
            return float(self.seeds.std(ddof=1))
        if self._as_share:
            low, high = wilson(self.mean, self.count)
            return (high - low) / 2
        return float(self.prompts.std(ddof=1) / np.sqrt(len(self.prompts))) if len(self.prompts) > 1 else None

    @property
    def over(self) -> str:
        """What `spread` is taken over, in words."""
        if len(self.seeds) > 1:
            return f"{len(self.seeds)} seeds"
        if self._as_share:
            return "prompts (half of Wilson's interval)"
        return "prompts (standard error)" if len(self.prompts) > 1 else ""

    @property
    def count(self) -> int:
        """Prompts behind a mean."""
        return self.recorded or len(self.prompts)

    @property
    def _as_share(self) -> bool:
        """Whether all that is known of its error follows from its being a share of prompts."""
        return self.share and self.count > 0 and (len(self.prompts) < 2 or bool(np.ptp(self.prompts) == 0))


def between(first: Sample, second: Sample) -> Difference:
    """The scores of `first` minus those of `second`; see the module."""
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
    if len(first.numbers) < 2 or set(first.numbers) != set(second.numbers):
        return seed_difference(first.seeds, second.seeds)
    return paired_seeds(*(each.seeds[np.argsort(each.numbers)] for each in (first, second)))


def rise(short: Sample, long: Sample) -> Sample:
    """The rise of every training seed."""
    return Sample(long.seeds - short.seeds, np.empty(0), long.recorded, False, long.numbers)


def between_rises(first: tuple[Sample, Sample], second: tuple[Sample, Sample]) -> Difference:
    """The rise of `first` from its short to its long prompts, minus that of `second`; each is (short, long)."""
    rises = [rise(*each) for each in (first, second)]
    if max(len(each.seeds) for each in rises) > 1:
        return _over_seeds(*rises)
    margin = (first[1].mean - first[0].mean) - (second[1].mean - second[0].mean)
    parts = [between(first[1], second[1]), between(first[0], second[0])]
    error = float(np.sqrt(sum(part.standard_error**2 for part in parts)))
    return Difference(margin, error, parts[0].over, min(part.degrees for part in parts))


def numbers_of(sample: Sample, scale: float = 1.0) -> dict[str, Any]:
    """Arguments of `verdict` that `sample` decides: spread (times `scale`), what it is over, prompts and training seeds."""
    spread = None if sample.spread is None else scale * sample.spread
    return {"spread": spread, "spread_over": sample.over, "n": sample.count, "seeds": len(sample.seeds)}


def in_words(differences: Mapping[str, Difference], word: str, unit: str, scale: float = 1.0) -> str:
    """Margins with their errors: "3.1 points below rope (standard error 0.4 over 3 paired seeds)"; the opposite of `word` where one is
    negative.
    """

    def error(of: Difference) -> str:
        return f"standard error {scale * of.standard_error:.2g} over {of.over}" if of.standard_error < np.inf else of.over

    return "; ".join(
        f"{scale * abs(each.margin):.3g}{unit} {word if each.margin >= 0 else OPPOSITE[word]} {name} ({error(each)})"
        for name, each in differences.items()
    )
