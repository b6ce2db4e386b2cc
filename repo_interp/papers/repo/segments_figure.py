"""Positions beside the segments of a prompt (RePo fig. 8), and how far every head follows them, against shuffled edges.

Draws what `papers.repo_segments` measures. Knows nothing about how that is done.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.plots.marks.drawing import contiguous, legend_below
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plots.views.positions import draw_positions

_BAND = "#56B4E9"


def segments_figure(data: xr.Dataset, name: str, kind: str) -> PaperFigure:
    """The positions of the head that follows segments most on one prompt, and two panels with all learned heads."""
    trained = data.sel(weights="trained")
    excess = (trained["variance_between"] - trained["variance_between_shuffled"]).mean("prompt").transpose("layer", "head")
    row, column = np.unravel_index(int(np.nanargmax(excess.values)), excess.shape)
    layer, head = int(excess["layer"].values[row]), int(excess["head"].values[column])
    scheme = str(data["scheme"].values[row]) if "scheme" in data.coords else "repo"
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        left, middle, right = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
        draw_positions(left, data["example"].sel(layer=layer, head=head).values, scheme_colour(scheme))
        _bands(left, data["example_segment"].values)
        left.set(xlabel="token", ylabel="position z (positions)")
        left.set_title(f"{name}, layer {layer}, head {head}")
        for ax, score, title in ((middle, "variance_between", f"Variance between {kind}"), (right, "boundary_f1", "Boundary F1")):
            _against(ax, data, score, scheme_colour(scheme))
            ax.set_title(title)
        middle.set_ylabel("measured")
        legend_below(
            figure,
            [
                Patch(facecolor=_BAND, alpha=0.3, label=f"every second of the {kind}"),
                Line2D([], [], linestyle="none", marker="o", markersize=3, color=scheme_colour(scheme), label="a head"),
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker="o",
                    markersize=3,
                    color="#5A5A5A",
                    markerfacecolor="none",
                    label="a head, random weights",
                ),
                Line2D([], [], color="#222222", linewidth=0.6, linestyle="--", label="as shuffled edges"),
            ],
        )
    return figure


def _bands(ax: Axes, labels: np.ndarray) -> None:
    for label in range(0, int(labels.max()) + 1, 2):
        for first, last in contiguous(np.flatnonzero(labels == label).tolist()):
            ax.axvspan(first - 0.5, last + 0.5, facecolor=_BAND, alpha=0.3, linewidth=0, zorder=0, gid=f"segment {label}")


def _against(ax: Axes, data: xr.Dataset, score: str, colour: str) -> None:
    means = data[[score, f"{score}_shuffled"]].mean("prompt")
    for weights in reversed(data["weights"].values.astype(str).tolist()):
        of_weights = means.sel(weights=weights)
        look = (
            {"color": colour, "markeredgewidth": 0} if weights == "trained" else {"color": "#5A5A5A", "markerfacecolor": "none"}
        )
        x, y = of_weights[f"{score}_shuffled"].values.ravel(), of_weights[score].values.ravel()
        ax.plot(x, y, "o", markersize=3, **{"markeredgewidth": 0.6, **look}, gid=f"heads {weights}")
    top = 1.08 * max(float(np.nanmax(means[name].values)) for name in means)
    ax.plot([0, top], [0, top], "--", color="#222222", linewidth=0.6)
    ax.set(xlim=(0, top), ylim=(0, top), xlabel="shuffled edges")
    ax.grid()
