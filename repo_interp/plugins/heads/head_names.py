"""Names of heads by their scores: rules as data, and controls that set the thresholds.

    a head has a name where its score is above max(at_least, null), and all scores of `also` lie
    within their limits

    null = 1.25 times the `quantile` over controls of the largest score of a head that the rule is
    about; of two values the higher

A control is the same decoder with the same layout and freshly drawn weights, measured in the same
way. Since the largest head counts, it does not matter how many heads a model has. Of ten controls
the quantile is the largest, which an eleventh random model exceeds in one case of eleven: hence a
quarter more. `at_least` asks for an effect besides: attention of random weights is nearly equal
weights, and much less than a clear head is beyond that. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

Scores = Mapping[str, Float[np.ndarray, "layer head"]]


@dataclass(frozen=True)
class Rule:
    """When a head has a name."""

    name: str
    score: str
    """A name of `head_scores.SCORES`."""
    at_least: float
    also: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Limits of other scores, both included; the null has no part in them."""
    learned: bool = False
    """Whether the rule is about layers that learn positions alone."""

    @property
    def words(self) -> str:
        """The rule in words, without the null."""
        also = "".join(
            f", {name} from {low:g} to {high:g}" for name, (low, high) in self.also.items()
        )
        where = ", in layers that learn positions" if self.learned else ""
        return f"{self.score} above {self.at_least:g}{also}{where}"

    def applies(self, learned: Bool[np.ndarray, "layer"]) -> Bool[np.ndarray, "layer 1"]:
        """Tell which layers the rule is about.

        Args:
            learned: Layers that learn positions.

        Returns:
            True for layers that the rule is about.
        """
        # One column, which broadcasts over heads
        return (learned | (not self.learned))[:, None]

    def largest(self, scores: Scores, learned: Bool[np.ndarray, "layer"]) -> float:
        """Find the largest score of a head that the rule is about.

        Args:
            scores: Scores by name.
            learned: Layers that learn positions.

        Returns:
            The score; NaN where there is none.
        """
        # Heads in other layers become NaN, so they neither have the name nor set its null.
        values = np.where(self.applies(learned), scores.get(self.score, np.nan), np.nan)
        # nanmax of NaN alone warns, and warnings are errors here.
        return float(np.nanmax(values)) if np.isfinite(values).any() else float("nan")

    def holds(
        self, scores: Scores, learned: Bool[np.ndarray, "layer"], null: float
    ) -> Bool[np.ndarray, "layer head"]:
        """Tell which heads have the name.

        Args:
            scores: Scores by name; a score that is absent holds for no head.
            learned: Layers that learn positions.
            null: Threshold of the controls; NaN: none.

        Returns:
            True for heads with the name.
        """
        values = (
            scores[self.score]
            if self.score in scores
            else np.full_like(next(iter(scores.values())), np.nan)
        )
        # NaN compares as False, which is meant, but numpy may warn of it.
        with np.errstate(invalid="ignore"):
            # fmax passes over a null of NaN: without controls, at_least alone decides.
            holding = self.applies(learned) & (values > np.fmax(self.at_least, null))
            for name, (low, high) in self.also.items():
                holding &= (
                    # A score that was not measured fulfills no limit.
                    (low <= scores[name]) & (scores[name] <= high) if name in scores else False
                )
        return holding


MARGIN = 0.25
"""By how much of itself a threshold lies above the quantile of the controls."""
ATTENDS = 0.25
"""Nats from equal weights that attention must at least be."""
LITTLE = 0.5
"""Attention to the first token up to which a head does something else in the main."""
RULES = (
    Rule("mirror", "mirror", 0.5, learned=True),
    Rule("retrieval", "retrieval", 0.1),
    Rule("answer", "contribution", 0.5),
    Rule("induction", "induction", 0.3),
    Rule("previous token", "previous_token", 0.3),
    Rule("duplicate token", "duplicate_token", 0.3),
    Rule("needle", "source_mass", 0.1),
    Rule("sink", "sink", 0.5),
    Rule("positional U", "place_u", 0.5),
    # Positions of random weights are constant too, so the head must also attend far from evenly.
    Rule("constant", "departure", ATTENDS, {"constant": (0.95, 1.0)}, learned=True),
    Rule("mono", "mono", 0.5, learned=True),
    Rule("semantic", "departure", ATTENDS, {"content": (0.9, 1.0), "sink": (0.0, LITTLE)}),
)
"""In the order of the names of a head that has several. Retrieval above 0.1 is Wu et al.'s."""


def null_of(largest: Float[np.ndarray, "twin"], quantile: float) -> float:
    """Compute the threshold that controls set.

    Args:
        largest: The largest score of every control.
        quantile: Quantile over controls.

    Returns:
        The quantile and `MARGIN` of its size; NaN where no control has a score.
    """
    # Controls whose layers lack the score count for nothing.
    known = largest[np.isfinite(largest)]
    if not known.size:
        return float("nan")
    reached = float(np.quantile(known, quantile, method="higher"))
    # The size of it: a score such as the positional U may be negative in every control.
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
        nulls: Threshold of the controls by name of the rule.
        rules: Rules; the default are ours.

    Returns:
        For every rule the heads that have its name.
    """
    return {rule.name: rule.holds(scores, learned, nulls[rule.name]) for rule in rules}


def joined(named: Mapping[str, Bool[np.ndarray, "layer head"]]) -> np.ndarray:
    """Write the names of every head as text.

    Args:
        named: For every name the heads that have it.

    Returns:
        Names with commas between them [layer, head]; empty where a head has none.
    """
    shape = next(iter(named.values())).shape
    texts = [
        ", ".join(name for name, which in named.items() if which[place])
        for place in np.ndindex(shape)
    ]
    return np.array(texts, dtype=object).reshape(shape)
