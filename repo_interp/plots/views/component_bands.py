"""Bands of rotary components, and the layers and VAF that charts of components read.

    activated   pi / L < theta < 2 pi / L        low   theta <= pi / L        high   theta >= 2 pi / L

L is the training length, or a shorter window of the layer. Reads the group `components` of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import xarray as xr

from repo_interp.plots.marks import group, over_prompts

ByDistance = TypeVar("ByDistance", xr.DataArray, xr.Dataset)

BAND_COLOURS: Mapping[str, str] = {"activated": "#D55E00", "low": "#0072B2", "high": "#A8A8A8"}
"""Orange, blue and gray that color-blind eyes keep apart."""
FEW_PAIRS = 16
"""Share 1/16 of the distances of a sequence with few pairs: in n tokens, distances above n (1 -
1/16) have fewer than n/16 pairs, which may make the ends of a U by chance.
"""
BAND_NAMES: Mapping[str, str] = {
    "activated": "activated",
    "low": "lower frequency",
    "high": "higher frequency",
}


def band_of(components: xr.Dataset) -> np.ndarray:
    """Name the band of every component.

    Args:
        components: `activated` and `low_frequency` [component].

    Returns:
        Names [component].
    """
    return np.where(
        components["activated"].values,
        "activated",
        np.where(components["low_frequency"].values, "low", "high"),
    )


def named_bands(band: xr.Dataset) -> list[str]:
    """Name the bands of all components.

    Args:
        band: `activated` and `low_frequency` [component].

    Returns:
        Names in the order of the components.
    """
    return [BAND_NAMES[kind] for kind in band_of(band)]


def bands_over(theta: np.ndarray, length: int) -> list[str]:
    """Name the band of each frequency over some length.

    Args:
        theta: Radians per position.
        length: Length in tokens.

    Returns:
        Names in the order of the frequencies.
    """
    turns = abs(theta) * length / (2 * np.pi)
    return np.where(turns >= 1, "high", np.where(turns > 0.5, "activated", "low")).tolist()


def wavelengths(theta: xr.DataArray) -> xr.DataArray:
    """Return 2 pi / theta in positions; NaN where theta is 0.

    Args:
        theta: Radians per position.

    Returns:
        The wavelengths.
    """
    return 2 * np.pi / abs(theta).where(theta != 0)


def rotating_layers(components: xr.Dataset) -> list[int]:
    """List the layers that rotate as the first rotating layer does.

    They have the same frequencies and the same L of the bands.

    Args:
        components: Group `components` of a run.

    Returns:
        Labels of the layers; none if no layer rotates.
    """
    frequency = components["frequency"].transpose("layer", "component")
    layers = components["layer"].values[frequency.notnull().any("component")].tolist()
    return [
        layer
        for layer in layers
        if band_length(components, layer) == band_length(components, layers[0])
        and np.array_equal(*frequency.sel(layer=[layer, layers[0]]), equal_nan=True)
    ]


def bands(components: xr.Dataset, layer: int) -> xr.Dataset:
    """Select the bands of a layer.

    Args:
        components: Group `components` of a run.
        layer: Label of the layer.

    Returns:
        `frequency`, `activated` and `low_frequency` [component].
    """
    chosen = components[["frequency", "activated", "low_frequency"]].sel(layer=layer)
    return chosen.drop_vars(["layer", "scheme"], errors="ignore")


def of_many_pairs(by_distance: ByDistance) -> ByDistance:
    """Select the distances between two tokens that many pairs have.

    Args:
        by_distance: Values [distance, ...] over prompts of n tokens.

    Returns:
        Without distance 0, a token with itself, and without the last n / 16 distances: means over
        few pairs, such as the one of the last token and the first, would set the scale.
    """
    at = np.asarray(by_distance["distance"])
    # `initial`: a prompt of one token has only distance 0
    last = at.max(initial=0) - len(at) // FEW_PAIRS
    return by_distance.sel(distance=slice(1, last))


def vaf_of_heads(components: xr.Dataset) -> xr.DataArray:
    """Average VAF over prompts, however the run keeps it.

    Args:
        components: Group `components` of a run.

    Returns:
        VAF [layer, head, component] in per cent.
    """
    means = components["vaf_mean"] if "vaf_mean" in components else over_prompts(components["vaf"])
    return means.transpose("layer", "head", "component")


def trained_on(run: xr.DataTree) -> int:
    """Return the training length that the bands were made for.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Length in tokens.
    """
    return int(group(run, "components").attrs["training_length"])


def band_length(components: xr.Dataset, layer: int) -> int:
    """Return L of the bands of a layer.

    Args:
        components: Group `components` of a run.
        layer: Label of the layer.

    Returns:
        L in tokens; the training length if the run does not record L.
    """
    if "band_length" in components:
        return int(components["band_length"].sel(layer=layer))
    return int(components.attrs["training_length"])
