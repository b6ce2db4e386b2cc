"""Small reductions of labelled and plain arrays that several views share: means without NaN, means over prompts, heads in order.

Knows nothing about what the arrays hold.
"""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr


def nanmean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Mean without NaN; NaN, and no warning, where there is nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def over_prompts(scores: xr.DataArray) -> xr.DataArray:
    """`scores` [prompt, layer, head] as the mean over prompts; NaN where no prompt has one."""
    scores = scores.transpose("prompt", "layer", "head")
    return scores.isel(prompt=0, drop=True).copy(data=nanmean(scores.values, axis=0))


def ranked(means: np.ndarray) -> list[tuple[int, int]]:
    """Places (layer, head) in `means` [layer, head] from the largest to the smallest; NaN are left out, ties in order."""
    order = np.argsort(-means, axis=None, kind="stable")
    places = [tuple(int(part) for part in np.unravel_index(place, means.shape)) for place in order]
    return [(layer, head) for layer, head in places if np.isfinite(means[layer, head])]
