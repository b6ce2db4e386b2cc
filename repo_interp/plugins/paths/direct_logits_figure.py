"""Figure of the parts of components in a logit difference.

    left     means over prompts: a map of layers by heads, the MLP in the last column
    right    the components that add most, with 95 % intervals

Draws the result of `ri.direct_logits`. This module knows nothing about models.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from repo_interp.plots.marks import (
    bar_lengths,
    colour_bar,
    draw_cells,
    look_around_zero,
    name_rows_down,
    require_result,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

MOST = 12
"""Number of components in the right panel."""


@style()
def direct_logits(found: xr.Dataset) -> PaperFigure:
    """Draw the parts of components in a logit difference.

    Args:
        found: Result of `ri.direct_logits`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is not a result of `ri.direct_logits`.
    """
    variables = ("heads_mean", "mlps_mean", "embedding")
    require_result(found, variables, "parts of logits are", "direct_logits")
    means, low, high = (
        np.concatenate([found[f"heads_{end}"].values, found[f"mlps_{end}"].values[:, None]], 1)
        for end in ("mean", "low", "high")
    )
    figure = paper_figure(PAGE_WIDTH, min(5.5, 2.0 + 0.09 * len(means)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    columns = [*map(str, found["head"].values), "MLP"]
    values = xr.DataArray(
        means, {"layer": found["layer"].values, "head": columns}, ("layer", "head")
    )
    image = draw_cells(left, values, look_around_zero("RdBu_r", means) | {"gid": "means"})
    colour_bar(figure, image, left, "logits", fraction=0.046)
    names = [
        f"L{layer} {column if column == 'MLP' else f'H{column}'}"
        for layer in found["layer"].values
        for column in columns
    ]
    rows = list(zip(names, means.ravel(), low.ravel(), high.ravel(), strict=True))
    for name in ("embedding", "biases"):
        mean, least, most = (float(found[f"{name}_{end}"]) for end in ("mean", "low", "high"))
        rows.append((name, mean, least, most))
    _draw_largest(right, [row for row in rows if np.isfinite(row[1]) and row[1]])
    difference = float(found["logit_difference_mean"])
    figure.suptitle(
        f"Direct parts of a logit difference of {difference:.2f}, mean over {found.sizes['prompt']} prompts"
    )
    return figure


def _draw_largest(ax: Axes, rows: list[tuple[str, float, float, float]]) -> None:
    """Draw the components that add most, the largest on top."""
    rows = sorted(rows, key=lambda row: -abs(row[1]))[:MOST]
    means, low, high = np.array([row[1:] for row in rows]).T
    ax.errorbar(
        means,
        np.arange(len(rows)),
        xerr=bar_lengths(means, low, high),
        fmt="o",
        color="#0072B2",
        markersize=3.6,
        elinewidth=0.9,
    )[0].set_gid("largest")
    ax.axvline(0, color="#333333", linewidth=0.6)
    name_rows_down(ax, [row[0] for row in rows])
    ax.set_xlabel("logits, with 95 % intervals over prompts")
