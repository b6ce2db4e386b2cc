"""Draw the error of a model's rotation by distance (`plugins.verify.audit`).

A line is a layer, with the largest error of its pairs.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, style

FLOOR = 1e-8
"""Smallest drawn error in radians; smaller errors are drawn at this height."""
NAMED = 6
"""Lines that the legend can name."""


@style()
def rotation_errors(audited: xr.Dataset) -> PaperFigure:
    """Draw errors of the rotation over the distance, both on logarithmic axes.

    Layers with the same errors share a line; layers without a finding are grey.

    Args:
        audited: `error` [layer, component, distance] in radians, and `first_distance` [layer, head,
            component], which is negative without a fault.

    Returns:
        The figure.
    """
    figure = paper_figure(COLUMN_WIDTH, 2.2)
    axes = figure.subplots()
    wrong = (audited["first_distance"] >= 0).any(("head", "component")).values
    # [layer, distance]; an error of 0 has no place on a logarithmic axis.
    errors = np.maximum(audited["error"].max("component").values, FLOOR)
    # Layers with one rotation have the same error bit by bit, so the bytes are a key.
    lines: dict[bytes, list[int]] = {}
    for row, curve in enumerate(errors):
        lines.setdefault(curve.tobytes(), []).append(row)
    found = [rows for rows in lines.values() if wrong[rows[0]]]
    # Layers without a finding come first, so that no grey line covers a coloured one.
    for rows in (rows for rows in lines.values() if not wrong[rows[0]]):
        axes.plot(audited["distance"].values, errors[rows[0]], color="0.6", lw=0.8)
    for number, rows in enumerate(found):
        layers = audited["layer"].values[rows]
        name = f"layer {layers[0]}" if len(rows) == 1 else f"{len(rows)} layers, from {layers[0]}"
        axes.plot(
            audited["distance"].values, errors[rows[0]], color=f"C{number % 10}", lw=1.2, label=name
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="distance in tokens",
        ylabel="largest error in rad",
        ylim=(FLOOR / 2, 2 * np.pi),
    )
    # The default formatter writes 10^3 as mathtext, which the style shows as raw dollars.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    if 0 < len(found) <= NAMED:
        axes.legend(frameon=False)
    return figure
