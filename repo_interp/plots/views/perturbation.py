"""Tolerance to disturbed positions (Position Generalization fig. 5): log perplexity, or a score, over gamma x l_max for each kind.

A cell shows the value; its colour how much worse it is than without perturbation, the same scale for all kinds.
Draws the group `perturbation`. Knows nothing about how tokens were moved.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from repo_interp.errors import InputError
from repo_interp.plots.marks.reading import group, unit_label
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

KIND_NAMES = {
    "text_order": "Text order",
    "feature_order": "Feature order",
    "position_offset": "Position offsets",
    "feature_placement": "Feature placement",
}
RISE = "rise of the log perplexity of targets that no move touched"
VALUES = ("log_perplexity", "log_perplexity_rise", "task_score")


def perturbation_grid(run: xr.DataTree, value: str = "log_perplexity") -> PaperFigure:
    """`value` over the share of moved tokens and the largest distance, a panel a kind (fig. 5).

    Raises InputError when the run has no perturbation, or for a value that is none of VALUES.
    """
    if value not in VALUES:
        raise InputError(f"values of perturbation are {', '.join(VALUES)}, not {value!r}")
    dataset = group(run, "perturbation")
    cells, worse, reach = worse_than_without(dataset, value)
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.95 + 0.26 * cells.sizes["l_max"])
        axes = figure.subplots(1, cells.sizes["kind"], sharey=True, squeeze=False)[0]
        images = []
        for ax, kind in zip(axes, cells["kind"].values, strict=True):
            images.append(draw_grid(ax, cells.sel(kind=kind), worse.sel(kind=kind).values, reach))
            ax.set_title(KIND_NAMES.get(str(kind), str(kind)))
        axes[0].set_ylabel(r"$l_{max}$ (tokens)")
        bar = figure.colorbar(images[0], ax=list(axes), pad=0.01, fraction=0.03)
        bar.outline.set_visible(False)  # pyright: ignore
        bar.set_label("worse than without")
        title = {"log_perplexity": "log perplexity", "task_score": str(dataset.attrs.get("metric", "task score"))}
        figure.suptitle(unit_label(title.get(value, RISE), cells), x=0.01, ha="left", fontsize=7.5)
    return figure


def worse_than_without(dataset: xr.Dataset, value: str) -> tuple[xr.DataArray, xr.DataArray, float]:
    """`value` [kind, l_max, gamma], how much worse it is than at gamma = 0, and the largest size of that."""
    cells = dataset[value].transpose("kind", "l_max", "gamma")
    better_up = value == "task_score" and dataset.attrs.get("higher_is_better") == "True"
    worse = (cells.sel(gamma=0.0) - cells if better_up else cells - cells.sel(gamma=0.0)).transpose(*cells.dims)
    return cells, worse, max(float(np.nanmax(np.abs(worse.values))), 1e-12)


def draw_grid(ax: Axes, cells: xr.DataArray, worse: np.ndarray, reach: float):
    """Draw `cells` [l_max, gamma] on `ax` with their values, coloured by `worse` from -reach to reach. Returns the image."""
    image = ax.imshow(worse, cmap="PuOr_r", vmin=-reach, vmax=reach, aspect="auto")
    for row, column in np.ndindex(worse.shape):
        share = worse[row, column] / reach
        ax.text(
            column,
            row,
            f"{cells.values[row, column]:.3f}".replace("-0.000", "0.000"),
            ha="center",
            va="center",
            fontsize=5.6,
            color="white" if abs(share) > 0.62 else "black",
        )
    ax.set_xticks(range(cells.sizes["gamma"]), [f"{100 * gamma:g}" for gamma in cells["gamma"].values])
    ax.set_yticks(range(cells.sizes["l_max"]), [str(l_max) for l_max in cells["l_max"].values])
    ax.set_xlabel("tokens moved (%)")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return image
