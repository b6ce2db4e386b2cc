"""Figure of the writers of a position: two maps of components by layer, and effects of removal.

    left, middle   shares of the clock, and of the variance given the word: head by layer
    right          resolution of the model (line), with components at their means (dots), and with
                   the same number of others at their means (hollow dots)

Draws the result of `ri.position_writers`. This module knows nothing about models.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from repo_interp.plots.marks import (
    colour_bar,
    draw_cells,
    look_around_zero,
    percent,
    require_result,
    say,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

_MAPS = {"clock_share": "share of the clock", "word_share": "share given the word"}
_COLOUR = "#0072B2"


@style()
def position_writers(found: xr.Dataset) -> PaperFigure:
    """Draw the writers of the positions of a row, and the effect of removing them.

    Args:
        found: Result of `ri.position_writers`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is not a result of `ri.position_writers`.
    """
    variables = (*_MAPS, "resolution")
    require_result(found, variables, "writers of positions are", "position_writers")
    figure = paper_figure(PAGE_WIDTH, 2.6)
    *maps, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    shares = {name: _by_layer(found[name]) for name in _MAPS}
    look = look_around_zero("RdBu_r", *shares.values())
    images = [
        draw_cells(ax, shares[name], look | {"gid": name})
        for ax, name in zip(maps, _MAPS, strict=True)
    ]
    for ax, (name, title) in zip(maps, _MAPS.items(), strict=True):
        embedding = float(found[name].sel(component="embedding"))
        # Rounded first, so that -0.1 % is not printed as "-0 %".
        ax.set_title(f"{title}; embedding {percent(round(embedding, 2) + 0.0)}")
    # Both maps share one color scale.
    colour_bar(figure, images[0], maps, "share", fraction=0.046)
    _draw_check(right, found)
    figure.suptitle(
        f"Layer {found.attrs['layer']}, row {found.attrs['row']} of positions; right: "
        f"{found['removed'].values[1]} at the mean, hollow: as many others"
    )
    return figure


def _by_layer(share: xr.DataArray) -> xr.DataArray:
    """Shares [layer, head], the MLP in the last column; NaN where a layer has no such head."""
    layers, heads = (share[f"writer_{axis}"].values for axis in ("layer", "head"))
    count = int(heads.max()) + 1
    values = np.full((int(layers.max()) + 1, count + 1), np.nan)
    known = layers >= 0
    # -1, the MLP, is the last column
    values[layers[known], heads[known]] = share.values[known]
    names = [*map(str, range(count)), "MLP"]
    return xr.DataArray(values, {"layer": np.arange(len(values)), "head": names}, ("layer", "head"))


def _draw_check(ax: Axes, found: xr.Dataset) -> None:
    """Resolutions with components at their means."""
    resolution = found["resolution"]
    plain, rest = float(resolution[0, 0]), resolution.values[:, 1:]
    if not np.isfinite(resolution).any():
        say(ax, "no distance tells the order")
        ax.set_axis_off()
        return
    if np.isfinite(plain):
        ax.axhline(plain, color="#333333", linewidth=0.8, gid="as it is")
    for place, values in enumerate(rest):
        # Equal controls are drawn side by side.
        beside = place + np.linspace(-0.12, 0.12, len(values) - 1) if len(values) > 1 else []
        ax.plot(
            beside, values[1:], "o", color=_COLOUR, markerfacecolor="white", markersize=3.6,
            gid=f"controls {place}",
        )  # fmt: skip
        ax.plot([place], values[:1], "o", color=_COLOUR, markersize=4.5, gid=f"writer {place}")
    ax.set_xticks(range(len(rest)), [f"for {reader}" for reader in resolution["reader"].values])
    highest = float(np.nanmax(resolution))
    ax.set(xlim=(-0.5, len(rest) - 0.5), ylim=(0, 1.1 * highest), ylabel="resolution (tokens)")
