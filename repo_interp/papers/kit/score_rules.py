"""How far the score of one checkpoint is above another's, and whether this is more than chance. Written before anything was measured.

    margin = mean(a) - mean(b);   above: margin > 2 standard errors of it, which are taken, in this order,
        over seeds      where both have at least two
        over prompts    where both answered the same ones: of the differences prompt by prompt
        at most         where only means m over n prompts are recorded: a score between 0 and 1 varies by m (1 - m) at most
    otherwise there is no error, and nothing can be said

    lower log perplexity: also by more than `MATERIAL`, since windows are many, and what another training seed would change is not
    among their errors

    rise = score at the longest length - score at the training length; prompts of the two lengths differ, so their errors add

Knows arrays only; nothing about claims, checkpoints or figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from repo_interp.papers.kit.lead import Lead, lead, paired_lead

MATERIAL = 0.005
"""Nats a token: half a per cent of perplexity. CoPE's is 1.5 % below that of relative positions in its paper."""
NOTHING = "nothing to take an error over"


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

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(self.seeds.mean())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; standard error over prompts where there is one seed; None where neither is known."""
        if len(self.seeds) > 1:
            return float(self.seeds.std(ddof=1))
        if len(self.prompts) > 1:
            return float(self.prompts.std(ddof=1) / np.sqrt(len(self.prompts)))
        return float(np.sqrt(_bound(self.mean, self.recorded))) if self.share and self.recorded else None

    @property
    def over(self) -> str:
        """What `spread` is taken over, in words."""
        if len(self.seeds) > 1:
            return f"{len(self.seeds)} seeds"
        if len(self.prompts) > 1:
            return "prompts (standard error)"
        return "prompts (standard error, at most)" if self.share and self.recorded else ""

    @property
    def count(self) -> int:
        """Prompts behind a mean."""
        return self.recorded or len(self.prompts)


def above(one: Sample, other: Sample) -> Lead:
    """How far the scores of `one` are above those of `other`; see the module."""
    if min(len(one.seeds), len(other.seeds)) > 1:
        return lead(one.seeds, other.seeds, one.prompts, other.prompts)
    if len(one.prompts) == len(other.prompts) > 1:
        return paired_lead(one.prompts, other.prompts)
    if one.share and other.share and one.recorded and other.recorded:
        error = np.sqrt(_bound(one.mean, one.recorded) + _bound(other.mean, other.recorded))
        return Lead(one.mean - other.mean, float(error), f"{one.recorded} and {other.recorded} prompts, at most")
    return Lead(one.mean - other.mean, np.inf, NOTHING)


def above_in_rise(one_short: Sample, one_long: Sample, other_short: Sample, other_long: Sample) -> Lead:
    """How far the rise of `one` from the short to the long prompts is above that of `other`."""
    margin = (one_long.mean - one_short.mean) - (other_long.mean - other_short.mean)
    rises = [long.seeds - short.seeds for short, long in ((one_short, one_long), (other_short, other_long))]
    if min(map(len, rises)) > 1:
        return lead(rises[0], rises[1], np.empty(0), np.empty(0))
    parts = [above(one_long, other_long), above(one_short, other_short)]
    error = float(np.sqrt(sum(part.standard_error**2 for part in parts)))
    return Lead(margin, error, parts[0].over)


def lower_perplexity(lead: Lead) -> bool:
    """Whether a log perplexity is lower by more than chance and by more than what does not matter."""
    return lead.holds and lead.margin > MATERIAL


def all_hold(leads: Iterable[Lead]) -> bool:
    """Whether there are leads and each is more than chance."""
    found = list(leads)
    return bool(found) and all(one.holds for one in found)


def _bound(mean: float, count: int) -> float:
    """Largest variance of a mean over `count` scores between 0 and 1."""
    share = min(max(mean, 0.0), 1.0)
    return share * (1 - share) / count
