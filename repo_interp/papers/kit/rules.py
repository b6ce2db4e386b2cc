"""When a claim holds, as data: each rule names the quantities that it asks for, decides from them, and says itself in words.

    AtLeast("share of hybrid chunks", 0.5)                  a number is at least a bound
    AtMost("range over the context length", 0.5)            a number is at most a bound
    Above("mean exact match", ("RoPE", "NoPE"))             differences to rivals are above 2 standard errors (and above `more`)
    NotBelow("mean exact match", ("RoPE",))                 no difference is below zero by more than 2 standard errors
    BeyondNull("VAF above the others")                      a number is beyond those of a null: twins with random weights, shuffles
    Custom(function, words)                                 what needs code of its own, with its words beside it
    All(first, second)                                      all of them

Words, thresholds and code cannot drift apart, since words are made from the thresholds that decide. Knows nothing about any paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from repo_interp.papers.kit.differences import SIGNIFICANT, Difference

Values = Mapping[str, Any]
"""What was measured, by the names that rules ask for: numbers, `Difference` by rival, `Observed`."""


class Observed(NamedTuple):
    """A number beside the same number where nothing was learned."""

    value: float
    null: Sequence[float]
    """Of twins with random weights, or of shuffles."""


class Rule(Protocol):
    """What decides whether a claim holds."""

    @property
    def words(self) -> str:
        """The rule as a sentence without its full stop."""
        ...

    def holds(self, values: Values) -> bool:
        """Whether the claim holds. Raises KeyError where a quantity is missing."""
        ...


@dataclass(frozen=True)
class AtLeast:
    """A number is at least a bound. NaN is not."""

    quantity: str
    bound: float
    unit: str = ""

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{self.quantity} is at least {self.bound:.3g}{self.unit}"

    def holds(self, values: Values) -> bool:
        """Whether the number reaches the bound."""
        return bool(values[self.quantity] >= self.bound)


@dataclass(frozen=True)
class AtMost:
    """A number is at most a bound. NaN is not."""

    quantity: str
    bound: float
    unit: str = ""

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{self.quantity} is at most {self.bound:.3g}{self.unit}"

    def holds(self, values: Values) -> bool:
        """Whether the number stays within the bound."""
        return bool(values[self.quantity] <= self.bound)


@dataclass(frozen=True)
class Above:
    """The differences to rivals are each above so many standard errors, and above `more`."""

    quantity: str
    rivals: tuple[str, ...]
    """What has to be exceeded. Further differences among the values of the quantity count too."""
    more: float = 0.0
    errors: float = SIGNIFICANT
    relation: str = "above"
    """How the words put it: "above", or "below" where the values are differences the other way round."""
    required: tuple[str, ...] | None = None
    """Rivals that must be among the values, for a claim that is judged without the others too; None: all of them."""

    @property
    def words(self) -> str:
        """The rule in words."""
        by = f"more than {self.errors:g} standard errors of the difference" + (f" and {self.more:g}" if self.more else "")
        among = _listed(self.rivals) + ("" if self.required is None else ", as far as they were given,")
        return f"{self.quantity} is {self.relation} that of {among} by {by}"

    def holds(self, values: Values) -> bool:
        """Whether there is a difference to every rival that is required, and all that there are are large enough."""
        differences: Mapping[str, Difference] = values[self.quantity]
        complete = bool(differences) and set(self.rivals if self.required is None else self.required) <= set(differences)
        return complete and all(one.exceeds(self.more, self.errors) for one in differences.values())


@dataclass(frozen=True)
class NotBelow:
    """The differences to rivals are none below zero by more than so many standard errors."""

    quantity: str
    rivals: tuple[str, ...]
    errors: float = SIGNIFICANT

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{self.quantity} is not below that of {_listed(self.rivals)} by more than {self.errors:g} standard errors"

    def holds(self, values: Values) -> bool:
        """Whether every difference to a rival is there and none is that far below zero."""
        differences: Mapping[str, Difference] = values[self.quantity]
        return set(self.rivals) <= set(differences) and not any(one.falls_short(self.errors) for one in differences.values())


@dataclass(frozen=True)
class BeyondNull:
    """A number is above a share of those where nothing was learned."""

    quantity: str
    share: float = 1.0
    null: str = "twins with random weights"

    @property
    def words(self) -> str:
        """The rule in words."""
        count = "every one" if self.share == 1 else f"{100 * self.share:g} %"
        return f"{self.quantity} is above that of {count} of the {self.null}"

    def holds(self, values: Values) -> bool:
        """Whether the number is above that quantile of the null; True without a null, which the evidence then says."""
        observed: Observed = values[self.quantity]
        return not len(observed.null) or bool(observed.value > np.quantile(np.asarray(observed.null, dtype=float), self.share))


@dataclass(frozen=True)
class Custom:
    """A decision that needs code of its own."""

    function: Callable[[Values], bool]
    words: str

    def holds(self, values: Values) -> bool:
        """What the function says."""
        return bool(self.function(values))


class All:
    """Several rules, all of which have to hold."""

    def __init__(self, *rules: Rule) -> None:
        """Of `rules`, in the order of the words."""
        self.rules = rules

    @property
    def words(self) -> str:
        """The rule in words."""
        return "; ".join(rule.words for rule in self.rules)

    def holds(self, values: Values) -> bool:
        """Whether all hold."""
        return all(rule.holds(values) for rule in self.rules)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"each of {', '.join(names[:-1])} and {names[-1]}"
