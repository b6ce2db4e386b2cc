"""Confidence intervals of means, for experiments, comparisons and views alike."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float
from numpy.typing import ArrayLike


def half_interval(values: Float[np.ndarray, "*any prompt"]) -> Float[np.ndarray, "*any"]:
    """Return half the width of the 95 % interval of a mean over prompts, Student's.

    For differences of two measurements on the same prompts, it is the paired interval.

    Args:
        values: Numbers [..., prompt].

    Returns:
        Half widths [...] in the units of `values`; NaN for a single prompt.
    """
    count = np.shape(values)[-1]
    if count < 2:
        return np.full(np.shape(values)[:-1], np.nan)
    return student_quantile(count - 1) * np.std(values, -1, ddof=1) / np.sqrt(count)


def student_quantile(freedom: ArrayLike) -> Float[np.ndarray, "*any"]:
    """Return the 97.5 % quantile of Student's t, half the width of a 95 % interval in errors.

    Args:
        freedom: Degrees of freedom.

    Returns:
        Quantiles of the same shape; NaN without a degree of freedom.
    """
    # Imported here, since few need it. Not scipy.stats, whose t is the same function: importing
    # it takes as long as a short analysis
    from scipy.special import stdtrit

    return stdtrit(np.asarray(freedom), 0.975)


def same_prompts(group: xr.Dataset, alike: bool) -> xr.DataArray:
    """Tell whether two runs saw the same prompts, by test set where their group has some.

    Args:
        group: Group of two runs, with an axis `run`.
        alike: Whether the prompts of both runs agree.

    Returns:
        One truth value, or one per test set.
    """
    if "prompts_digest" not in group:
        # Without digests by set, equal prompts of the whole run are the only sign.
        return xr.DataArray("test_set" not in group.dims and alike)
    first, second = group["prompts_digest"].values
    return xr.DataArray(
        (first == second) & (first != ""), {"test_set": group["test_set"]}, ("test_set",)
    )


def paired_difference(values: xr.DataArray, paired: bool) -> tuple[float, float | None]:
    """Subtract the first of two runs from the second, over values that both have.

    Args:
        values: Numbers [run, ...]; with an axis `prompt`, it is kept apart.
        paired: Whether both runs saw the same prompts; else their means are subtracted.

    Returns:
        Mean difference, and half of its 95 % interval over prompts, paired; None without one.
    """
    # Prompts of the runs do not correspond, so only their means can be subtracted.
    if not paired and "prompt" in values.dims:
        values = values.mean("prompt")
    change = values.isel(run=1, drop=True) - values.isel(run=0, drop=True)
    by_prompt = change.mean([dim for dim in change.dims if dim != "prompt"]).values
    known = by_prompt[np.isfinite(by_prompt)]
    return float(change.mean()), float(half_interval(known)) if known.size > 1 else None
