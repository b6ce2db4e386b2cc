"""`Dots`: one dot per run and name, with the spread of heads and the null.

    dots   [run, names, ...]    mean over all other axes; line: middle 90 % of heads; tick: a prompt; cross: the null

This module knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.plots.marks.arrays import is_logarithmic, nanmean, over_prompts, quantile_ends
from repo_interp.plots.marks.axis_scales import plain_decades, signed_decades
from repo_interp.plots.marks.chart import Drawing
from repo_interp.plots.marks.drawing import legend_below, lone_entry, panels
from repo_interp.plots.marks.reading import axis_name, names_along, unit_label
from repo_interp.plots.marks.runs import Runs, runs_with_values
from repo_interp.plots.marks.titles import averaged_over, name_figure
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, style

HIDDEN = 100.0
"""Ratio of two changes at which a linear axis hides the smaller one."""
_CROSS: Mapping[str, Any] = {"linestyle": "none", "marker": "x", "color": "#222222"}


@dataclass(frozen=True)
class Dots(Drawing):
    """One dot per run and name of `values` [run, axis, ...], with names on `axis`.

    A dot is the mean over all other axes, a tick a prompt. A line holds 90 % of layers and heads: a
    few heads may decide the mean, so that it lies outside the middle half. Coordinates: `low` and
    `high` are the ends of bars, `control` (axis) is drawn as crosses.
    """

    values: xr.DataArray
    runs: Runs
    axis: Hashable
    panel: Hashable | None = None
    """An axis with one panel per label; the label is the x label. None: one panel."""

    @style()
    def figure(self) -> PaperFigure:
        """The chart as a figure."""
        values, runs, axis, panel = self.values, self.runs, self.axis, self.panel
        names = names_along(values, axis)
        values = values.sel({axis: names, "run": runs_with_values(values)})
        shown = [str(name) for name in values["run"].values]
        labels = [""] if panel is None else values[panel].values.tolist()
        height = max(0.2, 0.09 * len(shown)) * len(names)
        width = (0.62 if panel is None else 1) * PAGE_WIDTH
        figure, axes = panels(len(labels), len(labels), height, 0.95, width, sharey=True)
        looks: list[Any] = [runs.looks[name] for name in shown] if len(shown) > 1 else []
        if "control" in values.coords:
            looks.append({**_CROSS, "label": values["control"].attrs["long_name"]})
        handles = [
            Line2D([], [], markersize=3.6, **{**look, "linestyle": "none"}) for look in looks
        ]
        for ax, label in zip(axes, labels, strict=True):
            of_panel = values if panel is None else values.sel({panel: label})
            scale = _draw_dots(ax, of_panel.transpose("run", axis, ...), runs, shown)
            name = label or unit_label(axis_name(values.name), values)
            ax.set_xlabel("\n".join(filter(None, (name, scale, lone_entry(handles, "cross")))))
        figure.gca().set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
        detail = values.attrs.get("detail") or averaged_over(values, axis, None, middle="90 %")
        name_figure(figure, str(values.attrs.get("long_name", values.name)), detail)
        legend_below(figure, handles)
        return figure


def _draw_dots(ax: Axes, values: xr.DataArray, runs: Runs, shown: Sequence[str]) -> str:
    """Draw `values` [run, name, ...] as `Dots` does; return the scale of a signed axis in words."""
    scale = ""
    # [run, name, all other axes], and the same of means over prompts
    flat, heads = (
        part.values.reshape(*part.shape[:2], -1) for part in (values, over_prompts(values))
    )
    means, places = nanmean(flat, axis=2), np.arange(flat.shape[1])
    for row, name in enumerate(shown):
        look = runs.looks[name]
        ink = {"color": look["color"]}
        # Runs are drawn one below another around the line of their name, in 0.7 of its height
        y = places + 0.7 * ((row + 0.5) / len(shown) - 0.5)
        if heads.shape[2] > 1:
            middle = {"linewidth": 1.4, "alpha": 0.45, "gid": f"middle {name}"}
            ax.hlines(y, *quantile_ends(heads[row], 0.05), **ink, **middle)
        if "prompt" in values.dims:
            ticks = values.isel(run=row).mean([*{*values.dims[2:]} - {"prompt"}])
            x = ticks.transpose("prompt", ...).values
            ax.plot(x, np.broadcast_to(y, x.shape), "|", **ink, alpha=0.6, gid=f"prompts {name}")
        if "low" in values.coords:
            ends = [values[end].broadcast_like(values).values[row] for end in ("low", "high")]
            ax.hlines(y, *ends, **ink, linewidth=0.7, gid=f"error {name}")
        ax.plot(means[row], y, look["marker"], **ink, markersize=3.6, gid=f"mean {name}")
    if "control" in values.coords:
        # On top, since a dot may lie there
        ax.plot(values["control"].values, places, **_CROSS, gid="control", zorder=4)
    if is_logarithmic(means):
        ax.set_xscale("log")
        plain_decades(ax.xaxis)
        ax.set_xlim(float(np.nanmin(means)) / 3, float(np.nanmax(flat)) * 1.5)
    elif (least := values.attrs.get("least")) is not None:  # a smaller change is rounding
        # At least the size of rounding is shown, so that rounding never fills the axis
        ax.update_datalim([(-least, 0), (least, 0)])
        ax.autoscale_view(scaley=False)
        sizes = np.abs(means)
        # A linear axis would hide a change that exceeds rounding
        if ((sizes > least) & (sizes * HIDDEN < np.nanmax(sizes))).any():
            scale = signed_decades(ax, "x", least)
        else:
            ax.locator_params(axis="x", nbins=4)
        ax.axvline(0, color="#8A8A8A", linewidth=0.6, zorder=0)
    ax.grid(axis="x")
    return scale
