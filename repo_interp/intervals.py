"""Confidence intervals of means, for experiments, comparisons and views alike."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def half_interval(values: Float[np.ndarray, "*any prompt"]) -> Float[np.ndarray, "*any"]:
    """Return half the width of the 95 % interval of a mean over prompts, Student's.

    Of the differences of two measurements on the same prompts, it is the paired interval.

    Args:
        values: Numbers [..., prompt].

    Returns:
        Half widths [...] in the units of `values`; NaN for a single prompt.
    """
    from scipy.stats import t as student

    count = np.shape(values)[-1]
    if count < 2:
        return np.full(np.shape(values)[:-1], np.nan)
    return student.ppf(0.975, count - 1) * np.std(values, -1, ddof=1) / np.sqrt(count)
