"""Data of the slider of components on the page: a layer's mean logit, its components, and their VAF.

Curves are thinned to `POINTS` distances; `components.html` and `components.js` draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks import digits_of, group, layer_scheme, nested_digits
from repo_interp.plots.view import PageOptions
from repo_interp.plots.views.component_bands import (
    BAND_COLOURS,
    BAND_NAMES,
    band_length,
    band_of,
    bands,
    of_many_pairs,
    rotating_layers,
    vaf_of_heads,
    wavelengths,
)

POINTS = 256
"""Distances of a curve in the page."""


def component_data(
    run: xr.DataTree, options: PageOptions
) -> tuple[dict[str, Any] | None, Sequence[str]]:
    """Prepare the data of the components' section of the page.

    Args:
        run: Tree of a run, a group per measure.
        options: Limits and prompts of the page.

    Returns:
        The data, None if no layer rotates, and no sentences, since nothing is left out.
    """
    components = group(run, "components")
    layers = rotating_layers(components)
    if not layers:
        return None, ()
    shares, band = vaf_of_heads(components).sel(layer=layers), bands(components, layers[0])
    by_distance = of_many_pairs(
        components[["logit_by_distance", "component_by_distance"]].sel(layer=layers)
    )
    logits = by_distance["logit_by_distance"].mean("head")
    known = np.flatnonzero(logits.notnull().any("layer").values)
    places = (
        known[np.unique(np.linspace(0, len(known) - 1, POINTS).round().astype(int))]
        if known.size
        else known
    )
    parts = {
        "logit": logits,
        "curve": by_distance["component_by_distance"],
        "vaf": shares.median("head"),
    }
    measured = xr.Dataset(parts).isel(distance=places)

    def drawn(layer: int | None, name: str, of_layer: xr.Dataset) -> dict[str, Any]:
        curves = of_layer["curve"].transpose("component", "distance").values
        return {
            "layer": layer,
            "name": name,
            "logit": digits_of(of_layer["logit"]),
            # Four digits: these curves are most of the section's data.
            "components": [digits_of(curve, 4) for curve in curves],
            "vaf": digits_of(of_layer["vaf"]),
            "heads": [] if layer is None else nested_digits(shares.sel(layer=layer).values),
        }

    of_layers = [
        drawn(layer, f"{layer} ({layer_scheme(components, layer)})", measured.sel(layer=layer))
        for layer in layers
    ]
    if len(layers) > 1:
        mean = measured.mean("layer").assign(vaf=shares.median(("layer", "head")))
        of_layers.insert(0, drawn(None, f"mean of {len(layers)} layers", mean))
    kinds, theta = band_of(band), band["frequency"]
    vaf_first = np.array(of_layers[0]["vaf"], dtype=float)
    described = [
        {
            "component": number,
            "theta": rate,
            "wavelength": wavelength,
            "band": BAND_NAMES[kind],
            "colour": BAND_COLOURS[kind],
        }
        for number, rate, wavelength, kind in zip(
            components["component"].values.tolist(),
            digits_of(theta),
            digits_of(wavelengths(theta)),
            kinds,
            strict=True,
        )
    ]
    data = {
        "distance": measured["distance"].values.tolist(),
        "layers": of_layers,
        "components": described,
        # The component with the largest VAF in the first view
        "start": int(np.nanargmax(np.append(vaf_first, -np.inf))),
        "training_length": band_length(components, layers[0]),
    }
    return data, ()
