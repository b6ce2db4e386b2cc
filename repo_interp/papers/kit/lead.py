"""How far one thing is above another, and whether by more than chance.

    margin = mean(a) - mean(b)          holds when margin > 2 standard errors

The error is taken over seeds where both have several, else over the prompts that both were given. Knows nothing about what is compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SIGNIFICANT = 2.0
"""Standard errors that a difference has to be above."""


class Lead(NamedTuple):
    """How far one thing is above another."""

    margin: float
    standard_error: float
    over: str
    """What the error is taken over."""

    @property
    def holds(self) -> bool:
        """Whether it is above, and not by chance."""
        return bool(self.margin > SIGNIFICANT * self.standard_error)


def lead(
    one: Float[np.ndarray, " seed"],
    other: Float[np.ndarray, " seed"],
    one_prompts: Float[np.ndarray, " prompt"],
    other_prompts: Float[np.ndarray, " prompt"],
) -> Lead:
    """How far `one` is above `other`: over seeds where both have at least two, else over prompts that both were given."""
    if min(len(one), len(other)) > 1:
        error = np.sqrt(np.var(one, ddof=1) / len(one) + np.var(other, ddof=1) / len(other))
        return Lead(float(np.mean(one) - np.mean(other)), float(error), f"{len(one)} and {len(other)} seeds")
    return paired_lead(one_prompts, other_prompts)


def paired_lead(one: Float[np.ndarray, " prompt"], other: Float[np.ndarray, " prompt"]) -> Lead:
    """How far `one` is above `other` on the same prompts."""
    difference = np.asarray(one, dtype=float) - np.asarray(other, dtype=float)
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else np.inf
    return Lead(float(difference.mean()), float(error), f"{len(difference)} prompts")
