"""Arithmetic of mean curves over distances: the mean logit m(t) = sum_r C_r(t) and its rotary
components C_r(t) (HoPE sec. 3.1).

    smoothed    mean over w = L / 16 neighbouring distances, at every w / 4-th, so that a rule is judged on few numbers
    VAF_r       100 (1 - var(m - C_r) / var(m)), variances over t: the share that a component accounts for (eq. 5 in its standard form)

The null of geometry alone is a set of rotary components with the model's frequencies and nothing
learned:

    C_r(t) = Re(g_r exp(i theta_r t)),   g_r complex normal, drawn anew for every curve: equal strength on average, phases at random

Rotary pairs turn by theta_r t for any weights, so components of low frequency change little within
L and those of high frequency average out, whether a model uses them or not. A claim about
components must exceed this null. The functions take arrays only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr
from jaxtyping import Complex, Float

DRAWS = 1000
"""Number of sets of curves in the null."""
NAME = "components with the model's frequencies and random phases"
"""Name of the null in rules."""


def smoothed(curves: xr.DataArray, length: int) -> xr.DataArray:
    """Return means [..., middle] of `curves` [..., distance] over windows of L / 16 neighbouring
    distances. Each window starts a quarter of its width after the previous one; `middle` is the
    middle of a window.

    Distance 0, a token with itself, is left out.
    """
    width = max(1, length // 16)
    start = curves.sel(distance=slice(1, None)).transpose(..., "distance")
    last = slice(width - 1, None, max(1, width // 4))
    windows = start.rolling(distance=width).construct("place").isel(distance=last)
    middles = xr.Variable("middle", windows["distance"] - (width - 1) / 2, {"units": "tokens"})
    means = windows.mean("place", keep_attrs=True, skipna=False).rename(distance="middle")
    return means.assign_coords(middle=middles)


def mean_curve_vaf(curves: xr.DataArray) -> xr.DataArray:
    """Return the VAF [..., component] of `curves` [..., component, distance] in per cent:
    `curve_vaf` along all other axes.
    """
    core = ["component", "distance"]
    return xr.apply_ufunc(
        curve_vaf, curves, input_core_dims=[core], output_core_dims=[core[:1]], vectorize=True
    )


def curve_vaf(
    components: Float[np.ndarray, "component distance"],
) -> Float[np.ndarray, " component"]:
    """Return the VAF of every component's mean curve in the sum of the curves, in per cent (HoPE,
    eq. 5 in its standard form).

    It is NaN for a flat sum.

    100 (1 - var(m - C_r) / var(m)),   m = sum_r C_r
    """
    total = components.sum(0)
    variance = total.var()
    left = (total - components).var(axis=1)
    return 100 * (1 - left / variance) if variance > 0 else np.full(len(components), np.nan)


def turning(frequencies: Float[np.ndarray, " component"], length: int) -> xr.DataArray:
    """Return exp(i theta_r t) [component, distance] for distances 0 .. length - 1."""
    waves = np.exp(1j * np.multiply.outer(frequencies, np.arange(length)))
    return xr.DataArray(waves, {"distance": np.arange(length)}, ("component", "distance"))


def random_phases(
    waves: Complex[np.ndarray, "component point"],
    statistic: Callable[[Float[np.ndarray, "component point"]], float],
    deviations: Float[np.ndarray, " component"] | None = None,
) -> Float[np.ndarray, " draw"]:
    """Return `statistic` for each of DRAWS sets of curves Re(g_r w_r), where the `waves` w_r are
    those of `turning`, smoothed or not.

    `deviations`: the standard deviation over points to which every component's curve is scaled,
    taken from the model; None: strengths are drawn.
    """
    strengths = np.random.default_rng(0).standard_normal((DRAWS, len(waves), 2)) @ np.array([1, 1j])
    draws = ((strength[:, None] * waves).real for strength in strengths)
    if deviations is not None:
        draws = (curves * (deviations / curves.std(1))[:, None] for curves in draws)
    return np.array([statistic(curves) for curves in draws])
