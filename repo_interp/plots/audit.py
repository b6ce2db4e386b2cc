"""The error of a model's rotation by distance: a line for each layer, the largest error of its pairs (`models.audit`)."""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, style

FLOOR = 1e-8
"""Radians: smaller errors are drawn here."""


@style()
def rotation_errors(audited: xr.Dataset) -> PaperFigure:
    """Errors in radians over the distance, both on logarithmic axes; layers without a finding in grey."""
    figure = paper_figure(COLUMN_WIDTH, 2.2)
    axes = figure.subplots()
    distance = audited["distance"].values
    wrong = (audited["first_distance"] >= 0).any(("head", "component")).values
    errors = audited["error"].max("component").values
    for row, layer in enumerate(audited["layer"].values):
        name = f"layer {layer}" if wrong[row] and wrong.sum() <= 6 else None
        colour = {"color": f"C{int(wrong[: row + 1].sum() - 1) % 10}", "lw": 1.2} if wrong[row] else {"color": "0.6", "lw": 0.8}
        axes.plot(distance, np.maximum(errors[row], FLOOR), label=name, **colour)
    axes.set(xscale="log", yscale="log", xlabel="distance in tokens", ylabel="largest error in rad", ylim=(FLOOR / 2, 2 * np.pi))
    if any(wrong) and wrong.sum() <= 6:
        axes.legend(frameon=False)
    return figure
