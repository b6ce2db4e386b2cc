"""Divergence of outputs and log perplexity beyond the training length (Position Generalization
table 2).

Draws the group `extrapolation` of a run. Knows nothing about how methods work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from repo_interp.plots.marks.drawing import (
    legend_below,
    length_axis,
    name_ticks,
    plain_decades,
    scheme_swatches,
)
from repo_interp.plots.marks.reading import group, schemes, unit_label
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plots.views.extrapolation import METHOD_NAMES

METHOD_LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"color": "#222222", "marker": "o", "linestyle": "-"},
    "lm_infinite": {"color": "#009E73", "marker": "s", "linestyle": "-"},
    "interpolation": {"color": "#E69F00", "marker": "^", "linestyle": "--"},
    "yarn": {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
}
FLOOR: dict[str, Any] = {
    "color": "#9A9A9A",
    "linewidth": 0.8,
    "linestyle": (0, (3, 2)),
    "zorder": 0,
}
LOG_ABOVE = 20.0
"""Largest over smallest KL of a layer, or of a length, from which the axis is logarithmic: on a
linear one all others would lie at 0.
"""


@style()
def extrapolation_by_length(run: xr.DataTree) -> PaperFigure:
    """Draw divergence and log perplexity by length (table 2).

    The KL divergence of attention outputs is a mean over layers with its interval; at the longest
    length it is also shown by layer.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no extrapolation.
    """
    dataset = group(run, "extrapolation")
    kl, lengths = dataset["kl"].transpose("method", "length", "layer"), dataset["length"].values
    named, nats = schemes(dataset), dataset["log_perplexity"]
    judged = f"log perplexity, last {dataset.attrs['judged']} tokens"
    panels = {
        "kl": (unit_label("KL of attention outputs", kl), lengths, kl.mean("layer")),
        "log perplexity": (unit_label(judged, nats), lengths, nats),
        "layers": (
            unit_label(f"KL at {lengths[-1]:,} tokens", kl),
            np.arange(len(named)),
            kl[:, -1],
        ),
    }
    figure = paper_figure(PAGE_WIDTH, 2.2)
    axes = dict(zip(panels, figure.subplots(1, 3), strict=True))
    floor = kl.sel({"method": "plain"})[0] if "plain" in kl["method"].values else None
    for name, (title, x, values) in panels.items():
        ax = axes[name]
        for method in map(str, kl["method"].values):
            ax.plot(
                x, values.sel({"method": method}).values, **_look(method), gid=f"{name} {method}"
            )
            if name == "kl" and floor is not None and "kl_above_noise" in dataset:
                low, high = (
                    float(floor.mean()) + dataset[f"kl_above_noise_{end}"].sel({"method": method})
                    for end in ("low", "high")
                )
                ax.vlines(
                    lengths,
                    low,
                    high,
                    color=_look(method)["color"],
                    linewidth=0.7,
                    gid=f"interval {method}",
                )
        ax.set_title(title)
        if name == "layers":
            ax.set(xlim=(-0.5, len(named) - 0.5), xlabel="layer")
            ax.grid(axis="y")
        else:
            length_axis(ax, lengths, int(dataset.attrs["training_length"]), "length (tokens)")
        if name != "log perplexity":
            _scale(ax, values.values)
    name_ticks(axes["layers"].xaxis, named, 8)
    scheme_swatches(axes["layers"], named, "x")
    handles = [
        Line2D([], [], **_look(str(name)), label=METHOD_NAMES.get(str(name), str(name)))
        for name in kl["method"].values
    ]
    if floor is not None:
        axes["kl"].axhline(floor.mean(), **FLOOR, gid="noise")
        axes["layers"].plot(range(len(floor)), floor, **FLOOR, gid="noise by layer")
        handles.append(
            Line2D([], [], **FLOOR, label=f"plain at {lengths[0]:,} tokens: noise of the fit")
        )
    legend_below(figure, handles)
    return figure


def _scale(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where values differ much, else one from 0 on."""
    if values.min() > 0 and values.max() > LOG_ABOVE * values.min():
        ax.set_yscale("log")
        if values.max() < 100 * values.min():  # else a single decade could be all that is named
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        plain_decades(ax.yaxis)
    else:
        ax.set_ylim(0, None)


def _look(method: str) -> dict[str, Any]:
    return {
        "markersize": 3,
        **METHOD_LOOKS.get(method, {"color": "#8A8A8A", "marker": "x", "linestyle": ":"}),
    }
