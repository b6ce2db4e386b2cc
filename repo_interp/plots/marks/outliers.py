"""The focused range: what of an axis is worth seeing when a few positions lie far away (the RePo authors' demo).

    kept = values in [Q1 - 1.5 IQR, Q3 + 1.5 IQR]        quartiles interpolated linearly, IQR = Q3 - Q1
    range = [min kept - m, max kept + m],  m = 0.05 (max kept - min kept), or 1 position where all are equal

Fewer than six values: no range is suggested. Knows nothing about tokens, heads or plots: numbers in, two numbers out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

FENCE = 1.5
"""Interquartile ranges beyond the quartiles at which an outlier begins (Tukey)."""
MARGIN = 0.05
"""Share of the kept spread that is added at either end."""
FEWEST = 6
"""Values needed for quartiles to mean something."""


def focused_range(values: ArrayLike) -> tuple[float, float] | None:
    """Limits of the axis without outliers, in the unit of `values` (any shape). None for fewer than six finite values.

    NaN and infinite values are ignored.
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    if numbers.size < FEWEST:
        return None
    low, high = fences(numbers)
    return with_margin(numbers[(numbers >= low) & (numbers <= high)])


def global_range(values: ArrayLike) -> tuple[float, float] | None:
    """Limits that show every finite value, with the same margin. None where there is no finite value."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    return with_margin(numbers) if numbers.size else None


def fences(numbers: np.ndarray) -> tuple[float, float]:
    """Q1 - 1.5 IQR and Q3 + 1.5 IQR: a value outside is an outlier."""
    first, third = np.percentile(numbers, [25, 75])
    reach = FENCE * (third - first)
    return float(first - reach), float(third + reach)


def with_margin(numbers: np.ndarray) -> tuple[float, float]:
    """Smallest and largest of `numbers`, 5 % of their spread further out; 1 where they are all equal."""
    low, high = float(numbers.min()), float(numbers.max())
    margin = MARGIN * (high - low) if high > low else 1.0
    return low - margin, high + margin
