"""Figure and finding of the probe of the token index: `position_probe`.

    line, band     R squared by layer, and its 95 % interval over prompts
    other bands    90 % of the draws of each null
    finding        an interval above 95 % of the draws of both nulls, and an R squared of at least
                   `CLEAR`

This module knows nothing about how the index was probed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.ticker import MaxNLocator

from repo_interp.plots.marks import (
    Chart,
    CustomFigure,
    Finding,
    group,
    legend_below,
    require_result,
)
from repo_interp.plots.style import PaperFigure, paper_figure, style
from repo_interp.plots.view import View

CLEAR = 0.05
"""Least R squared of a finding."""
_COLOURS = {"shuffled": "#999999", "smooth": "#E69F00"}


@style()
def position_probe(found: xr.Dataset | xr.DataTree) -> PaperFigure:
    """Draw R squared of the token index by layer, with its nulls.

    Args:
        found: Result of `ri.position_probe`, or a run with the group `position_probe`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is neither.
    """
    if isinstance(found, xr.DataTree) and "position_probe" in found.children:
        found = group(found, "position_probe")
    found = require_result(found, ("null_high",), "a probe of positions is", "position_probe")
    figure = paper_figure(4.2, 2.4)
    ax = figure.subplots()
    layers = found["layer"].values
    ax.axhline(0, color="#222222", linewidth=0.5)
    for null, colour in _COLOURS.items():
        low, high = (found[f"null_{end}"].sel(null=null).values for end in ("low", "high"))
        label = f"{null} null, 90 % of draws"
        ax.fill_between(
            layers, low, high, label=label, color=colour, alpha=0.45, linewidth=0, gid=null
        )
    low, high = (found[f"r_squared_{end}"].values for end in ("low", "high"))
    ax.fill_between(layers, low, high, color="#0072B2", alpha=0.3, linewidth=0, gid="interval")
    ax.plot(
        layers, found["r_squared"], "o-", color="#0072B2", markersize=3, gid="r_squared",
        label="R² and its 95 % interval",
    )  # fmt: skip
    # The axis ends at -0.5: a null far below 0 would hide everything else. fmin and fmax ignore
    # NaN; with few prompts all values are NaN.
    lowest = float(
        np.fmin.reduce(found[["r_squared_low", "null_low"]].to_array().values, None, initial=-0.01)
    )
    highest = float(
        np.fmax.reduce(found[["r_squared_high", "null_high"]].to_array().values, None, initial=0.01)
    )
    limits = (max(lowest, -0.5), min(1.1 * highest, 1.02))
    ax.set(xlabel="layer", ylabel="R² of the token index, held out", ylim=limits)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles: Any = ax.get_legend_handles_labels()[0]
    legend_below(figure, handles)
    return figure


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    caption = (
        "Held-out R² of the token index in the residual stream that enters each layer, with its "
        "95 % interval over prompts. Bands: the same of an index in another order, and of one that "
        "runs backwards in half of the prompts."
    )
    yield CustomFigure("position_probe", partial(position_probe, run), caption=caption)


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Report the layer that predicts the index best, if it exceeds both nulls."""
    probe = group(run, "position_probe")
    null = probe["null_high"].max("null")
    is_clear = (probe["r_squared_low"] > null) & (probe["r_squared"] >= CLEAR)
    if not bool(is_clear.any()):
        return
    best = int(probe["r_squared"].where(is_clear).idxmax("layer"))
    first = int(probe["layer"][0])
    at = probe.sel(layer=best)
    beside = f"; {interval(probe.sel(layer=first))} where it enters layer {first}"
    yield Finding(
        f"The residual stream tells the token index: R² {interval(at)} where it enters layer {best}, "
        f"wrong by {float(at['error']):.3g} tokens{beside if first != best else ''}",
        f"a ridge fit to other prompts, of {int(probe['probed_prompts'])}, mean squared; 95 % of "
        f"indices that run backwards in a random half of the prompts stay below "
        f"{float(at['null_high'].sel(null='smooth')):.2f}, of shuffled ones below "
        f"{float(at['null_high'].sel(null='shuffled')):.2f}",
        0.45,
        "position_probe",
        best,
        variable="r_squared",
    )


def interval(at: xr.Dataset) -> str:
    """Write R squared of a layer with its interval.

    Args:
        at: The group `position_probe` of one layer.

    Returns:
        The text, such as "0.27 [0.24, 0.30]".
    """
    value, low, high = (float(at[f"r_squared{end}"]) for end in ("", "_low", "_high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


VIEW = View(
    "position_probe",
    "What the stream knows of the index",
    "How well the token index of a prompt is predicted from the residual stream that enters each "
    "layer, by a linear map that was fitted to other prompts. Where layer 0 reads embeddings alone, "
    "its number is what words tell.",
    _charts,
    findings=_findings,
    compared=("r_squared", "error"),
)
