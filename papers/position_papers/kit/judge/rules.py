"""Rules that decide whether a claim holds, as data: each rule names its quantities, decides from
them, and has a text.

    AtLeast("share of hybrid chunks", 0.5)                  a number is at least a bound
    AtMost("range over the context length", 0.5)            a number is at most a bound
    Significant("the rise on the right", 3)                 a number is above 0 by 3 of its standard errors
    AtMost("fall of F1", 0.02, of="F1 in order")            ... or at most a share of another number
    Below("the lower of both scores", 0.99)                 a number is below a bound
    Above("mean exact match", ("RoPE", "NoPE"))             differences to rivals are above 2 standard errors (and above `more`)
    NotBelow("mean exact match", ("RoPE",))                 no difference is below zero by more than 2 standard errors
    BeyondNull("VAF above the others")                      a number is beyond a null: random-weight controls, shuffles
    Custom(function, words)                                 a decision in code, with its text
    All(first, second)                                      all rules hold
    Where(condition, rule)                                  the claim can only be judged if the condition holds

Standard errors of few samples follow Student's distribution (`differences`), and several rows of
one claim get Holm's correction. Texts are made from the thresholds, so they always agree with the
code. This module knows nothing about single papers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from position_papers.kit.judge.differences import SIGNIFICANT, Difference, level

Values = Mapping[str, Any]
"""Measured values by the names in rules: numbers, `Difference` by rival, `Observed`.
"""


class Observed(NamedTuple):
    """A number, and the same number without learning."""

    value: float
    null: Sequence[float] | np.ndarray
    """Values of random-weight controls, or of shuffles."""


class Rule(Protocol):
    """A rule that decides whether a claim holds."""

    @property
    def words(self) -> str:
        """The rule as a sentence without its full stop."""
        ...

    def holds(self, values: Values) -> bool:
        """Return whether the claim holds. Raises KeyError if a quantity is missing."""
        ...


@dataclass(frozen=True)
class _Bounded:
    """A comparison of a number with a bound; false for NaN."""

    quantity: str
    bound: float
    unit: str = ""
    of: str = ""
    """The quantity that `bound` is a share of; empty for a bound that is a number."""
    relation: ClassVar[str]
    compare: ClassVar[Callable[[float, float], bool]]

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{self.quantity} is {self.relation} {self.bound:.3g}{self.unit}" + (
            f" of {self.of}" if self.of else ""
        )

    def holds(self, values: Values) -> bool:
        """Whether the number is on the right side of the bound."""
        bound = self.bound * (values[self.of] if self.of else 1)
        return bool(type(self).compare(values[self.quantity], bound))


class AtLeast(_Bounded):
    """A number is at least a bound."""

    relation, compare = "at least", operator.ge


class AtMost(_Bounded):
    """A number is at most a bound."""

    relation, compare = "at most", operator.le


class Below(_Bounded):
    """A number is below a bound."""

    relation, compare = "below", operator.lt


@dataclass(frozen=True)
class Significant:
    """A number, as its `Difference` from 0, is above 0 by a number of standard errors."""

    quantity: str
    errors: float = SIGNIFICANT

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{self.quantity} is above {in_errors(self.errors)}"

    def holds(self, values: Values) -> bool:
        """Return whether the number is positive and large enough."""
        return values[self.quantity].exceeds(errors=self.errors)


@dataclass(frozen=True)
class Above:
    """All differences to rivals exceed a number of standard errors, and `more`."""

    quantity: str
    rivals: tuple[str, ...]
    """Rivals to exceed. Further differences among the values of the quantity count too."""
    more: float = 0.0
    errors: float = SIGNIFICANT
    relation: str = "above"
    """Word in the text: "above", or "below" if the differences have the other sign.
    """
    required: tuple[str, ...] | None = None
    """Rivals that must be among the values, if the claim can be judged without the others; None:
    all.
    """

    @property
    def words(self) -> str:
        """The rule in words."""
        by = f"more than {in_errors(self.errors)} of the difference" + (
            f" and {self.more:g}" if self.more else ""
        )
        among = _listed(self.rivals) + (
            "" if self.required is None else ", as far as they were given,"
        )
        return f"{self.quantity} is {self.relation} that of {among} by {by}"

    def holds(self, values: Values) -> bool:
        """Whether every required rival has a difference, and every difference is large enough."""
        return self.is_complete(values) and all(
            each.exceeds(self.more, self.errors) for each in values[self.quantity].values()
        )

    def is_complete(self, values: Values) -> bool:
        """Whether every required rival has a difference."""
        return set(self.rivals if self.required is None else self.required) <= set(
            values[self.quantity]
        )


@dataclass(frozen=True)
class NotBelow:
    """No difference to a rival is below zero by more than a number of standard errors."""

    quantity: str
    rivals: tuple[str, ...]
    errors: float = SIGNIFICANT

    @property
    def words(self) -> str:
        """The rule in words."""
        return (
            f"{self.quantity} is not below that of {_listed(self.rivals)} by more than "
            f"{in_errors(self.errors)}"
        )

    def holds(self, values: Values) -> bool:
        """Return whether every difference to a rival exists, with an error, and none is that far
        below zero.
        """
        differences: Mapping[str, Difference] = values[self.quantity]
        known = all(
            np.isfinite([each.margin, each.standard_error]).all() for each in differences.values()
        )
        complete = known and set(self.rivals) <= set(differences)
        return complete and not any(each.falls_short(self.errors) for each in differences.values())


@dataclass(frozen=True)
class BeyondNull:
    """A number exceeds a share of the values without learning."""

    quantity: str
    share: float = 1.0
    null: str = "twins with random weights"
    relation: Literal["above", "below"] = "above"

    @property
    def words(self) -> str:
        """The rule in words."""
        count = "every one" if self.share == 1 else f"{100 * self.share:g} %"
        return f"{self.quantity} is {self.relation} that of {count} of the {self.null}"

    def holds(self, values: Values) -> bool:
        """Return whether the number exceeds this share of the null.

        Raises ValueError without a null, since the claim cannot be judged then.
        """
        observed: Observed = values[self.quantity]
        if not len(observed.null):
            raise ValueError(
                f"{self.quantity}: there are no {self.null}; the evidence has to say that it "
                "is unmeasurable"
            )
        sign = -1 if self.relation == "below" else 1
        null = sign * np.asarray(observed.null, dtype=float)
        return bool(sign * observed.value > limit(null, self.share))


@dataclass(frozen=True)
class Custom:
    """A decision by a function."""

    function: Callable[[Values], bool]
    words: str

    def holds(self, values: Values) -> bool:
        """The decision of the function."""
        return bool(self.function(values))


class All:
    """Several rules that must all hold."""

    def __init__(self, *rules: Rule) -> None:
        """Keep `rules` in the order of the text."""
        self.rules = rules

    @property
    def words(self) -> str:
        """The rule in words."""
        return "; ".join(rule.words for rule in self.rules)

    def holds(self, values: Values) -> bool:
        """Whether all hold."""
        return all(rule.holds(values) for rule in self.rules)


@dataclass(frozen=True)
class Where:
    """A rule that only applies if a condition holds; otherwise the evidence must be
    `Evidence.unmeasurable`.
    """

    condition: Rule
    rule: Rule

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{self.rule.words}; not measurable unless {self.condition.words}"

    def holds(self, values: Values) -> bool:
        """Return whether the rule holds. Raises ValueError if the condition does not hold."""
        if not self.condition.holds(values):
            raise ValueError(
                f"nothing can be said unless {self.condition.words}; the evidence has to say "
                "that it is unmeasurable"
            )
        return self.rule.holds(values)


def limit(null: Sequence[float] | np.ndarray, share: float) -> float:
    """Return the value of the null that a `share` of its values does not exceed; with 10 twins and
    a share of 0.95 this is the largest value.
    """
    return float(np.quantile(np.asarray(null, dtype=float), share, method="higher"))


def beside_null(observed: Observed, digits: str = ".3g", share: float = 0.95) -> str:
    """Describe the null in words, with its quantile of `share` and the effect size, the distance of
    the number from the null's mean in its standard deviations.
    """
    null = np.asarray(observed.null, dtype=float)
    deviation = null.std(ddof=1) if len(null) > 1 else np.nan
    effect = (
        f"; {(observed.value - null.mean()) / deviation:+.2g} standard deviations from its mean"
        if deviation > 0
        else ""
    )
    return (
        f"{observed.value:{digits}} beside {len(null)} of the null: mean {null.mean():{digits}}, "
        f"{100 * share:.0f} % {limit(null, share):{digits}}{effect}"
    )


class Test(NamedTuple):
    """A difference that must exceed `bound`, and exceed 0 by a number of standard errors."""

    difference: Difference
    bound: float
    errors: float


def tests(rule: Rule, values: Values) -> list[Test]:
    """Return the differences that `rule` tests."""
    match rule:
        case Significant(quantity, errors):
            return [Test(values[quantity], 0.0, errors)]
        case Above(quantity):
            return [Test(each, rule.more, rule.errors) for each in values[quantity].values()]
        case All():
            return [each for part in rule.rules for each in tests(part, values)]
        case Where():
            return tests(rule.rule, values)
    return []


def chance(rule: Rule, values: Values) -> float | None:
    """Return the probability of the tested differences under chance, in multiples of the rule's
    level: the largest of several, since all differences must be large enough.

    None for a rule without tests.
    """
    return max(
        (each.difference.p_value() / level(each.errors) for each in tests(rule, values)),
        default=None,
    )


def may_hold(rule: Rule, values: Values) -> bool:
    """Return whether `rule` may hold within the errors: every difference satisfies it at its upper
    limit.
    """
    match rule:
        case Significant() | Above():
            complete = isinstance(rule, Significant) or rule.is_complete(values)
            return complete and all(
                each.difference.limits(each.errors)[1] > each.bound for each in tests(rule, values)
            )
        case All():
            return all(may_hold(each, values) for each in rule.rules)
        case Where():
            return may_hold(rule.rule, values)
    return rule.holds(values)


def leans(rule: Rule, values: Values) -> bool:
    """Return whether all differences are on the side of `rule`, ignoring their errors."""
    match rule:
        case NotBelow(quantity):
            return all(each.margin >= 0 for each in values[quantity].values())
        case All():
            return all(leans(each, values) for each in rule.rules)
        case Where():
            return leans(rule.rule, values)
    return all(each.difference.margin > each.bound for each in tests(rule, values))


def in_errors(errors: float) -> str:
    """Describe a number of normal standard errors; few samples use the equally rare Student's t."""
    return f"{errors:g} standard errors"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"each of {', '.join(names[:-1])} and {names[-1]}"
