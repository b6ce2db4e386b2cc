"""One variable over the steps of a training: a line a series, or a panel a layer.

    over_steps     [run, series, layer, head]   x the training step, a line a series or a panel a layer

Arrays are means over prompts already. Knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.comparison.looks import Runs, spread
from repo_interp.comparison.side_by_side import (
    CATEGORIES,
    COLUMNS,
    LINE,
    PANELS,
    axis_name,
    is_logarithmic,
    name_columns,
    name_figure,
    names_along,
    runs_having,
    spread_over,
)
from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.drawing import legend_below, plain_decades
from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.style import PAGE_WIDTH, PATTERN_COLOURS, PaperFigure, darker, paper_figure, span_colours, style

_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#804020", "#4B2BD6", "#56B4E9", "#5A5A5A")


def over_steps(values: xr.DataArray, runs: Runs, series: str | None) -> PaperFigure:
    """`values` [run, ...] over the training step: a line a name of `series`, the mean over all else; without `series` a panel a layer,
    a thin line a head and a thick one for their mean.
    """
    having = runs_having(values)
    steps = np.array([runs.step(name) for name in having], dtype=float)
    values = values.sel(run=having)
    with style():
        if series is not None:
            figure = paper_figure(0.62 * PAGE_WIDTH, 2.5)
            _series(figure, figure.subplots(), values.transpose("run", series, ...), steps, series)
        else:
            figure = _panels_over_steps(values, runs, steps, having[-1])
        name_figure(
            figure,
            unit_label(str(values.attrs.get("long_name", values.name)), values),
            "thick: mean over heads, thin: a head" if series is None else spread_over(values, series, None, "mean over"),
        )
    return figure


def _series(figure: PaperFigure, ax: Axes, values: xr.DataArray, steps: np.ndarray, series: str) -> None:
    names = names_along(values, series) if values[series].dtype.kind in "OUS" else spread(list(values[series].values), CATEGORIES)
    if series == "span":
        names = [name for name in names if "." not in str(name)] or names
    colours = _series_colours([str(name) for name in names], series)
    for name in names:
        means = nanmean(values.sel({series: name}).values.reshape(len(steps), -1), axis=1)
        ax.plot(steps, means, "o-", color=colours[str(name)], markersize=2.5, label=str(name), gid=f"over steps {name}")
    ax.set(xlabel="training step", ylabel=unit_label(str(values.name).replace("_", " "), values))
    ax.grid(axis="y")
    legend_below(
        figure, [Line2D([], [], color=colours[str(name)], marker="o", markersize=2.5, label=str(name)) for name in names]
    )


def _series_colours(names: Sequence[str], series: str) -> dict[str, str]:
    """A colour for every line: those of spans and patterns, darkened to be read as lines; others in order."""
    if series == "span":
        return {name: darker(colour, LINE) for name, colour in span_colours(names).items()}
    fixed = {name: darker(colour, LINE) for name, colour in PATTERN_COLOURS.items()} if series == "pattern" else {}
    return {name: fixed.get(name, _LINES[place % len(_LINES)]) for place, name in enumerate(names)}


def _panels_over_steps(values: xr.DataArray, runs: Runs, steps: np.ndarray, last: str) -> PaperFigure:
    layers: list[Any] = spread(list(values["layer"].values), PANELS) if "layer" in values.dims else [None]
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure = paper_figure(PAGE_WIDTH if columns > 2 else 0.5 * PAGE_WIDTH * columns, 0.7 + 1.35 * rows)
    axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colour = runs.looks[last]["color"]
    logarithmic = is_logarithmic(values.values)
    for place, ax in enumerate(axes.ravel()):
        if place >= len(layers):
            ax.set_axis_off()
            continue
        one = (values if layers[place] is None else values.sel(layer=layers[place])).transpose("run", ...)
        flat = one.values.reshape(len(steps), -1)
        if flat.shape[1] > 1:
            ax.plot(steps, flat, color=colour, linewidth=0.5, alpha=0.5, gid=f"heads {layers[place]}")
        ax.plot(steps, nanmean(flat, axis=1), "o-", color=colour, linewidth=1.4, markersize=2.5, gid=f"mean {layers[place]}")
        if layers[place] is not None:
            ax.set_title(f"layer {layers[place]}")
        ax.grid(axis="y")
        if logarithmic:
            ax.set_yscale("log")
            plain_decades(ax.yaxis)
    name_columns(axes, "training step")
    figure.supylabel(str(values.attrs.get("units", "")).removesuffix("1") or axis_name(str(values.name)), fontsize=7)
    return figure
