"""Figure of the cost of unturned keys of single heads over its predictions.

    panel   a prediction
    dot     a key-value head: its prediction, and the change of the loss with its 95 % interval

Draws the result of `ri.reuse_cost_by_head`. This module knows nothing about models.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.marks import bar_lengths, require_result
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style


@style()
def reuse_by_head(found: xr.Dataset) -> PaperFigure:
    """Draw the cost of every head against its predictions.

    Args:
        found: Result of `ri.reuse_cost_by_head`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is not a result of `ri.reuse_cost_by_head`.
    """
    require_result(found, ("change", "correlation"), "costs by head are", "reuse_cost_by_head")
    names = [str(name) for name in found["prediction"].values]
    figure = paper_figure(PAGE_WIDTH, 2.3)
    axes = np.atleast_1d(figure.subplots(1, len(names), sharey=True))
    heads = found.isel(head=slice(1, None))
    change = heads["change"].values
    bars = bar_lengths(change, heads["change_low"].values, heads["change_high"].values)
    for ax, name in zip(axes, names, strict=True):
        ax.errorbar(heads[name].values, change, bars, fmt="o", ms=2.5, lw=0.5, color="#0072B2")
        ax.axhline(0, color="0.6", lw=0.6)
        by_prediction = found.sel(prediction=name)
        ax.set_title(
            f"{float(by_prediction['correlation']):+.2f} [{float(by_prediction['correlation_low']):+.2f}, "
            f"{float(by_prediction['correlation_high']):+.2f}]"
        )
        ax.set_xlabel(name.replace("_", " "))
    axes[0].set_ylabel("cost of not turning (nat)")
    return figure
