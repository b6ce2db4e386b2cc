"""Names of heads by their scores: rules as data, and controls that set the thresholds.

    named(h) = score(h) > max(at_least, null), and each score in `also` is within its limits

    null = Q + 0.25 |Q|
    Q    = `quantile` over controls of max over heads h of score(h); between two values the higher

The maximum is over the heads of layers to which the rule applies. A control is the same decoder
with the same layout and freshly drawn weights, measured in the same way. Because the null uses the
largest head, it accounts for the number of heads. With ten controls and the default quantile, Q is
the largest of the ten, and an eleventh random model exceeds it in one case of eleven; the margin of
0.25 makes this rarer. `at_least` sets a minimum effect: random weights attend almost evenly, so a
weak head exceeds the null too. This module knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

Scores = Mapping[str, Float[np.ndarray, "layer head"]]


@dataclass(frozen=True)
class Rule:
    """A condition on scores under which a head has a name."""

    name: str
    meaning: str
    """The behavior of a head with this name, as a phrase for a legend."""
    score: str
    """A name of `head_scores.SCORES`."""
    at_least: float
    also: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Limits of other scores, both ends included. The null does not apply to them."""
    learned: bool = False
    """Whether the rule applies only to layers that learn positions."""

    @property
    def words(self) -> str:
        """The rule in words, without the null."""
        also = "".join(
            f", {name} from {low:g} to {high:g}" for name, (low, high) in self.also.items()
        )
        where = ", in layers that learn positions" if self.learned else ""
        return f"{self.score} above {self.at_least:g}{also}{where}"

    def applies(self, learned: Bool[np.ndarray, "layer"]) -> Bool[np.ndarray, "layer 1"]:
        """Return the layers to which the rule applies.

        Args:
            learned: Layers that learn positions.

        Returns:
            True for layers to which the rule applies.
        """
        # One column, which broadcasts over heads
        return (learned | (not self.learned))[:, None]

    def largest(self, scores: Scores, learned: Bool[np.ndarray, "layer"]) -> float:
        """Return the largest score over the heads to which the rule applies.

        Args:
            scores: Scores by name.
            learned: Layers that learn positions.

        Returns:
            The score; NaN if no such head has a score.
        """
        # Heads in other layers become NaN, so they do not set the null of this name.
        values = np.where(self.applies(learned), scores.get(self.score, np.nan), np.nan)
        # nanmax of NaN alone warns, and warnings are errors here.
        return float(np.nanmax(values)) if np.isfinite(values).any() else float("nan")

    def holds(
        self, scores: Scores, learned: Bool[np.ndarray, "layer"], null: float
    ) -> Bool[np.ndarray, "layer head"]:
        """Return the heads that have the name.

        Args:
            scores: Scores by name; without the rule's score, no head has the name.
            learned: Layers that learn positions.
            null: Threshold of the controls; NaN without controls.

        Returns:
            True for heads with the name.
        """
        values = (
            scores[self.score]
            if self.score in scores
            else np.full_like(next(iter(scores.values())), np.nan)
        )
        # NaN compares as False, as intended, but numpy may warn about it.
        with np.errstate(invalid="ignore"):
            # fmax ignores a null of NaN: without controls, only at_least counts.
            holding = self.applies(learned) & (values > np.fmax(self.at_least, null))
            for name, (low, high) in self.also.items():
                holding &= (
                    # A score that was not measured is within no limits.
                    (low <= scores[name]) & (scores[name] <= high) if name in scores else False
                )
        return holding


MARGIN = 0.25
"""Distance of the null above the controls' quantile, as a share of the quantile's size."""
ATTENDS = 0.25
"""Least departure of attention from equal weights, in nats."""
LITTLE = 0.5
"""Most attention to the first token of a head that mainly does something else."""
RULES = (
    Rule("mirror", "gives a copy a position near its source's", "mirror", 0.5, learned=True),
    Rule("retrieval", "looks most at the token that the answer copies", "retrieval", 0.1),
    Rule("answer", "adds to the answer's logit what it reads", "contribution", 0.5),
    Rule("induction", "looks at what followed an earlier copy", "induction", 0.3),
    Rule("previous token", "looks at the token before", "previous_token", 0.3),
    Rule("duplicate token", "looks at earlier copies of the token", "duplicate_token", 0.3),
    Rule("needle", "looks at the source of the answer", "source_mass", 0.1),
    Rule("sink", "rests on the first token", "sink", 0.5),
    Rule("positional U", "looks at both ends of the context, not its middle", "place_u", 0.5),
    # Random weights give constant positions too, so the head must also attend unevenly.
    Rule(
        "constant",
        "gives neighboring tokens one position",
        "departure",
        ATTENDS,
        {"constant": (0.95, 1.0)},
        learned=True,
    ),
    Rule("mono", "positions only rise, or only fall", "mono", 0.5, learned=True),
    Rule(
        "semantic",
        "looks by what tokens say, not by their distance",
        "departure",
        ATTENDS,
        {"content": (0.9, 1.0), "sink": (0.0, LITTLE)},
    ),
)
"""Rules in the order in which a head's names are listed. Retrieval above 0.1 is from Wu et al."""
MEANINGS = {rule.name: rule.meaning for rule in RULES}
"""The behavior of a head, by its name."""


def null_of(largest: Float[np.ndarray, "twin"], quantile: float) -> float:
    """Compute the threshold that controls set.

    Args:
        largest: Largest score of each control.
        quantile: Quantile over controls.

    Returns:
        The quantile plus `MARGIN` times its absolute value; NaN if no control has a score.
    """
    # NaN: controls without this score are left out.
    known = largest[np.isfinite(largest)]
    if not known.size:
        return float("nan")
    reached = float(np.quantile(known, quantile, method="higher"))
    # abs, since a score such as the positional U may be negative in every control
    return reached + MARGIN * abs(reached)


def name_heads(
    scores: Scores,
    learned: Bool[np.ndarray, "layer"],
    nulls: Mapping[str, float],
    rules: Sequence[Rule] = RULES,
) -> dict[str, Bool[np.ndarray, "layer head"]]:
    """Apply rules to the scores of a model.

    Args:
        scores: Scores by name.
        learned: Layers that learn positions.
        nulls: Threshold of the controls, by name of the rule.
        rules: Rules, in the order of the result.

    Returns:
        The heads that have each name, by name of the rule.
    """
    return {rule.name: rule.holds(scores, learned, nulls[rule.name]) for rule in rules}


def join_head_names(named: Mapping[str, Bool[np.ndarray, "layer head"]]) -> np.ndarray:
    """Join the names of every head into one text.

    Args:
        named: The heads that have each name, by name.

    Returns:
        Names separated by commas [layer, head]; empty for a head without a name.
    """
    shape = next(iter(named.values())).shape
    texts = [
        ", ".join(name for name, which in named.items() if which[place])
        for place in np.ndindex(shape)
    ]
    return np.array(texts, dtype=object).reshape(shape)
