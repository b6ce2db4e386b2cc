"""Scores as samples - over training seeds, or over prompts - and the difference of two of them with its standard error.

    difference = mean(a) - mean(b);   its standard error is taken, in this order,
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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from repo_interp.papers.kit.differences import Difference, difference, paired_difference

MATERIAL = 0.005
"""Nats per token: half a per cent of perplexity. CoPE's is 1.5 % below that of relative positions in its paper."""
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


def between(first: Sample, second: Sample) -> Difference:
    """The scores of `first` minus those of `second`; see the module."""
    if min(len(first.seeds), len(second.seeds)) > 1:
        return difference(first.seeds, second.seeds, first.prompts, second.prompts)
    if len(first.prompts) == len(second.prompts) > 1:
        return paired_difference(first.prompts, second.prompts)
    if first.share and second.share and first.recorded and second.recorded:
        error = np.sqrt(_bound(first.mean, first.recorded) + _bound(second.mean, second.recorded))
        over = f"{first.recorded} and {second.recorded} prompts, at most"
        return Difference(first.mean - second.mean, float(error), over)
    return Difference(first.mean - second.mean, np.inf, NOTHING)


def between_rises(first: tuple[Sample, Sample], second: tuple[Sample, Sample]) -> Difference:
    """The rise of `first` from its short to its long prompts, minus that of `second`; each is (short, long)."""
    rises = [long.seeds - short.seeds for short, long in (first, second)]
    if min(map(len, rises)) > 1:
        return difference(rises[0], rises[1], np.empty(0), np.empty(0))
    margin = (first[1].mean - first[0].mean) - (second[1].mean - second[0].mean)
    parts = [between(first[1], second[1]), between(first[0], second[0])]
    error = float(np.sqrt(sum(part.standard_error**2 for part in parts)))
    return Difference(margin, error, parts[0].over)


def numbers_of(sample: Sample, scale: float = 1.0) -> dict[str, Any]:
    """Spread, over what, and n of evidence on `sample`, whose numbers are given times `scale`."""
    spread = None if sample.spread is None else scale * sample.spread
    return {"spread": spread, "spread_over": sample.over, "n": sample.count}


def in_words(differences: Mapping[str, Difference], word: str, unit: str, scale: float = 1.0) -> str:
    """Margins with their errors: "below rope by 3.1 (standard error 0.4 over 3 and 3 seeds)"."""
    return "; ".join(
        f"{word} {name} by {scale * each.margin:.3g}{unit} (standard error {scale * each.standard_error:.2g} over {each.over})"
        for name, each in differences.items()
    )


def _bound(mean: float, count: int) -> float:
    """Largest variance of a mean over `count` scores between 0 and 1."""
    share = min(max(mean, 0.0), 1.0)
    return share * (1 - share) / count
