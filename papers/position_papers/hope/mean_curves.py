"""Arithmetic of mean curves over distances: the mean logit m(t) = sum_r C_r(t) and its rotary components C_r(t) (HoPE sec. 3.1).

    smoothed    mean over w = L / 16 neighbouring distances
    VAF_r       100 (1 - var(m - C_r) / var(m)), variances over t: what a component accounts for (eq. 5 in its standard form)

Knows arrays only; nothing about checkpoints, claims or figures.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float


def smoothed(curve: Float[np.ndarray, " distance"], length: int) -> np.ndarray:
    """Means of a curve over w = L / 16 neighbouring distances (`smoothing_width`): w - 1 values fewer, since only whole windows count."""
    width = smoothing_width(length)
    return np.convolve(curve, np.full(width, 1 / width), mode="valid")


def smoothing_width(length: int) -> int:
    """Distances that each value of `smoothed` is the mean over."""
    return max(1, length // 16)


def mean_curve_vaf(curves: xr.DataArray) -> xr.DataArray:
    """VAF [..., component] of `curves` [..., component, distance], in per cent: `curve_vaf` along all other axes."""
    core = ["component", "distance"]
    return xr.apply_ufunc(curve_vaf, curves, input_core_dims=[core], output_core_dims=[core[:1]], vectorize=True)


def curve_vaf(components: Float[np.ndarray, "component distance"]) -> Float[np.ndarray, " component"]:
    """VAF of every component's mean curve in their sum, in per cent (HoPE, eq. 5 in its standard form). NaN for a flat sum.

    100 (1 - var(m - C_r) / var(m)),   m = sum_r C_r
    """
    total = components.sum(0)
    variance = total.var()
    left = (total - components).var(axis=1)
    return 100 * (1 - left / variance) if variance > 0 else np.full(len(components), np.nan)
