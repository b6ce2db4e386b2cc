"""A null of geometry alone: what a set of rotary components shows when nothing was learned but the frequencies are the model's own.

    C_r(t) = Re(g_r exp(i theta_r t)),   g_r complex normal, drawn anew for every curve: equal strength on average, phases at random

Rotary pairs turn by theta_r t whatever the weights are, so components of low frequency change little within L and those of high frequency
average out, whether a model uses them or not. A claim about components counts beyond this.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

DRAWS = 1000
"""Sets of curves that make the null."""
NAME = "components with the model's frequencies and random phases"
"""What rules call it."""


def random_phases(
    frequencies: Float[np.ndarray, " component"],
    length: int,
    statistic: Callable[[Float[np.ndarray, "component distance"]], float],
    seed: int = 0,
) -> Float[np.ndarray, " draw"]:
    """`statistic` of each of DRAWS sets of curves over distances 0 .. length - 1."""
    generator = np.random.default_rng([seed, length])
    turning = np.exp(1j * np.multiply.outer(frequencies, np.arange(length)))
    strengths = generator.standard_normal((DRAWS, len(frequencies), 2)) @ np.array([1, 1j])
    return np.array([statistic((strength[:, None] * turning).real) for strength in strengths])
