"""Reductions of arrays that several views share.

Means without NaN, means over prompts, heads in order, ranges of axes.

    focused range: [min kept - m, max kept + m],  m = 0.05 (max kept - min kept), or 1 where all are equal (the RePo authors' demo)
    kept = values in [Q1 - 1.5 IQR, Q3 + 1.5 IQR]        quartiles interpolated linearly, IQR = Q3 - Q1

Fewer than six values: no range is suggested. This module knows no measure.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

MEAN = "mean"
"""Attribute of a mean over prompts: "mean over 20 prompts". Only prompts with a value count; these
may differ by head.
"""

FENCE = 1.5
"""Interquartile ranges beyond the quartiles at which an outlier begins (Tukey)."""
MARGIN = 0.05
"""Share of the kept spread that is added at either end."""
FEWEST = 6
"""Values needed for quartiles to mean something."""
LOG_ABOVE, LOG_BELOW = 50.0, 1e5
"""Ratios of the largest to the smallest value, all positive, between which a scale is logarithmic.
"""


def nanmean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Average without NaN, and without a warning if all values are NaN.

    Args:
        values: Numbers of any shape.
        axis: Axes to reduce; None: all.

    Returns:
        The means; NaN where there is no other value.
    """
    with warnings.catch_warnings():
        # numpy warns about a mean of nothing, which is valid here: a layer may lack positions.
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def over_prompts(values: xr.DataArray) -> xr.DataArray:
    """Average over the axis `prompt`, if there is one.

    The attribute `MEAN` of the result has the number of averaged prompts, so that the mean is not
    mistaken for the value of one prompt. A single prompt gets no such attribute.

    Args:
        values: Array with or without an axis `prompt`.

    Returns:
        The mean, NaN where no prompt has a value; `values` themselves if they have no prompts.
    """
    if "prompt" not in values.dims:
        return values
    moved = values.transpose("prompt", ...)
    numbers = moved.values.astype(float)
    means = moved.isel(prompt=0, drop=True).copy(data=nanmean(numbers, axis=0))
    # Per head: some prompts have a value in one head and none in another
    counts = np.isfinite(numbers).sum(axis=0)
    known = counts[counts > 0]
    # A single prompt has a value, not a mean.
    if len(numbers) < 2 or not known.size:
        return means
    low, high = int(known.min()), int(known.max())
    several = f"{low:,} to {high:,}" if low < high else f"{high:,}"
    return means.assign_attrs({MEAN: f"mean over {several} {'prompt' if high == 1 else 'prompts'}"})


def heads_of(values: xr.Dataset | xr.DataArray) -> list[tuple[int, int]]:
    """List all heads of an array, layer by layer.

    Args:
        values: Array or dataset with the coordinates `layer` and `head`.

    Returns:
        Labels (layer, head).
    """
    return [
        (int(layer), int(head))
        for layer in values["layer"].values
        for head in values["head"].values
    ]


def heads_where(chosen: xr.DataArray) -> list[tuple[int, int]]:
    """List the heads for which a condition holds, in the order of `heads_of`.

    Args:
        chosen: Booleans [layer, head].

    Returns:
        Labels (layer, head).
    """
    return [
        head
        for head, holds in zip(
            heads_of(chosen), chosen.transpose("layer", "head").values.ravel(), strict=True
        )
        if holds
    ]


def shared_rows(values: xr.DataArray, chosen: xr.DataArray) -> str:
    """Describe how many rows of positions the heads have, if some share one.

    Args:
        values: Measurements of positions [layer, head, ...]; heads that share positions have
            equal values.
        chosen: Heads that are counted [layer, head].

    Returns:
        Text after the number of heads; empty if no heads share a row.
    """
    heads = heads_where(chosen)
    rows = {(layer, values.sel(layer=layer, head=head).values.tobytes()) for layer, head in heads}
    return f" ({len(rows)} rows of positions, which heads share)" if len(rows) < len(heads) else ""


def ranked_heads(means: xr.DataArray) -> list[tuple[int, int]]:
    """Sort heads from the largest value to the smallest.

    Args:
        means: Numbers [layer, head]; heads with NaN are left out.

    Returns:
        Labels (layer, head); ties in the order of `heads_of`.
    """
    heads, values = heads_of(means), means.transpose("layer", "head").values.ravel()
    return [
        heads[place] for place in np.argsort(-values, kind="stable") if np.isfinite(values[place])
    ]


def strongest_head(values: xr.DataArray) -> tuple[int, int, float]:
    """Return the head with the largest value.

    Args:
        values: Numbers [layer, head], at least one of them not NaN.

    Returns:
        Its layer, its head, and the value.
    """
    layer, head = ranked_heads(values)[0]
    return layer, head, float(values.sel(layer=layer, head=head))


def digits_of(values: Any, digits: int = 6) -> list[float | None]:
    """Flatten numbers and round them for JSON.

    Args:
        values: Numbers of any shape.
        digits: Significant digits to keep.

    Returns:
        The rounded numbers; None for NaN and infinities.
    """
    return [
        json_number(value, digits) for value in np.asarray(values, dtype=float).ravel().tolist()
    ]


def nested_digits(values: np.ndarray) -> list:
    """Round the numbers of an array for JSON, as `digits_of` does.

    Args:
        values: Array of any number of axes.

    Returns:
        Lists as deep as the array has axes.
    """
    return digits_of(values) if values.ndim < 2 else [nested_digits(part) for part in values]


def focused_range(values: ArrayLike) -> tuple[float, float] | None:
    """Compute the limits of an axis that leaves outliers out.

    Args:
        values: Numbers of any shape; NaN and infinities are ignored.

    Returns:
        Lower and upper limit in the unit of `values`; None for fewer than six finite values.
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    if numbers.size < FEWEST:
        return None
    low, high = fences(numbers)
    # Never empty: the fences lie outside of the quartiles
    return with_margin(numbers[(numbers >= low) & (numbers <= high)])


def global_range(values: ArrayLike) -> tuple[float, float] | None:
    """Compute the limits of an axis that shows every finite value.

    Args:
        values: Numbers of any shape; NaN and infinities are ignored.

    Returns:
        Lower and upper limit in the unit of `values`; None if no value is finite.
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    return with_margin(numbers) if numbers.size else None


def fences(numbers: np.ndarray) -> tuple[float, float]:
    """Compute Q1 - 1.5 IQR and Q3 + 1.5 IQR; values outside are outliers.

    Args:
        numbers: Finite numbers, at least one.

    Returns:
        Lower and upper fence.
    """
    first, third = np.percentile(numbers, [25, 75])
    reach = FENCE * (third - first)
    return float(first - reach), float(third + reach)


def with_margin(numbers: np.ndarray) -> tuple[float, float]:
    """Widen the range of some numbers by 5 % of their spread at either end.

    Args:
        numbers: Finite numbers, at least one.

    Returns:
        Lower and upper limit; 1 away from the value if all numbers are equal.
    """
    low, high = float(numbers.min()), float(numbers.max())
    margin = MARGIN * (high - low) if high > low else 1.0
    return low - margin, high + margin


def is_logarithmic(data: np.ndarray) -> bool:
    """Tell whether values spread so far that their scale is logarithmic.

    Args:
        data: Numbers of any shape; NaN and infinities are ignored.

    Returns:
        True if all are positive and largest / smallest lies between `LOG_ABOVE` and `LOG_BELOW`.
    """
    finite = data[np.isfinite(data)]
    return bool(
        finite.size and finite.min() > 0 and LOG_ABOVE < finite.max() / finite.min() < LOG_BELOW
    )


def quantile_ends(values: np.ndarray, below: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute the quantiles over the last axis with a share `below` and above.

    Args:
        values: Numbers [x, other]; NaN are left out.
        below: Share of the values below the lower and above the upper quantile.

    Returns:
        Lower and upper quantiles [x]; NaN where all values are NaN.
    """
    known = np.asarray(np.isfinite(values).any(axis=1))
    # Rows of only NaN would warn: they are 0 here and NaN again below
    low, high = np.nanquantile(np.where(known[:, None], values, 0.0), (below, 1 - below), axis=1)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def json_number(value: float, digits: int = 6) -> float | None:
    """Round a number for JSON.

    Args:
        value: The number.
        digits: Significant digits.

    Returns:
        The number; None for NaN and infinities.
    """
    # Rounded for size: a page holds thousands of such numbers.
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
