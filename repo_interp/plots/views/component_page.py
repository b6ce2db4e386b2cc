"""The page's section on rotary components: data for its slider, and the chart of VAF.

    curves[layer]: mean logit, and mean of every component, over at most `POINTS` distances, six significant digits

Hovering a component tells its frequency theta and its wavelength 2 pi / theta in tokens. Knows runs and plotly's language;
`components.js` is the other half.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.reading import group, schemes
from repo_interp.plots.marks.table import Table
from repo_interp.plots.style import scheme_name
from repo_interp.plots.views.component_curves import BAND_COLOURS, BAND_NAMES, band_of
from repo_interp.plots.views.component_reading import bands, rotating_layers, training_length, vaf_of_heads

POINTS = 256
"""Distances of a curve in the page."""


def component_data(run: xr.DataTree) -> dict[str, Any] | None:
    """Everything the section's script draws; None where no layer rotates anything."""
    components = group(run, "components")
    layers = rotating_layers(components)
    if not layers:
        return None
    curves = components["component_by_distance"].sel(layer=layers).transpose("layer", "component", "distance")
    logits = components["logit_by_distance"].sel(layer=layers).mean("head")
    known = np.flatnonzero(logits.notnull().any("layer").values)[1:]
    places = known[np.unique(np.linspace(0, len(known) - 1, POINTS).round().astype(int))] if known.size else known
    shares, named, band = vaf_of_heads(components).sel(layer=layers), schemes(components), bands(components, layers[0])
    frequency = band["frequency"].values
    wavelength = np.divide(2 * np.pi, frequency, out=np.full(len(frequency), np.nan), where=frequency != 0)
    drawn = [
        {
            "layer": layer,
            "name": f"{layer} ({scheme_name(named[layer])})",
            "logit": _numbers(logits.sel(layer=layer).values[places]),
            "components": [_numbers(curve) for curve in curves.sel(layer=layer).values[:, places]],
            "vaf": _numbers(shares.sel(layer=layer).median("head").values),
        }
        for layer in layers
    ]
    mean = {
        "layer": None,
        "name": f"mean of {len(layers)} layers",
        "logit": _numbers(logits.mean("layer").values[places]),
        "components": [_numbers(curve) for curve in curves.mean("layer").values[:, places]],
        "vaf": _numbers(shares.median(("layer", "head")).values),
    }
    kinds = band_of(band)
    activated = np.flatnonzero(kinds == "activated")
    return {
        "distance": [int(distance) for distance in components["distance"].values[places]],
        "layers": [mean, *drawn] if len(drawn) > 1 else drawn,
        "components": [
            {
                "component": int(number),
                "theta": _numbers([theta])[0],
                "wavelength": _numbers([wave])[0],
                "band": BAND_NAMES[kind],
                "colour": BAND_COLOURS[kind],
            }
            for number, theta, wave, kind in zip(components["component"].values, frequency, wavelength, kinds, strict=True)
        ],
        "start": int(activated[0]) if activated.size else 0,
        "training_length": training_length(run),
    }


def component_table(run: xr.DataTree) -> Table:
    """A row a component of the layers that rotate alike: frequency, wavelength, band, and VAF as the median over heads."""
    components = group(run, "components")
    layers = rotating_layers(components)
    band = bands(components, layers[0])
    shares = vaf_of_heads(components).sel(layer=layers).median(("layer", "head")).values
    rows = tuple(
        (int(number), float(theta), float(2 * np.pi / theta) if theta else None, BAND_NAMES[kind], float(share))
        for number, theta, kind, share in zip(
            components["component"].values, band["frequency"].values, band_of(band), shares, strict=True
        )
    )
    return Table(
        "components",
        "Rotary components",
        ("component", "theta (rad per position)", "wavelength (positions)", "band", "VAF (%)"),
        rows,
        f"VAF of all pairs' logits, the median over the heads of {len(layers)} layers; bands for a training length of "
        f"{training_length(run):,} tokens.",
    )


def markup() -> str:
    """The section's controls, which its script brings to life."""
    return (files("repo_interp.plots") / "pages" / "page" / "components.html").read_text(encoding="utf-8")


def _numbers(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float).ravel()]
