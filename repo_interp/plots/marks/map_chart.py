"""`Maps`: cells of several runs side by side, and their differences to the first run.

    maps   [run, row, column]   one per run with one color scale, and their differences to the first run

This module knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, TwoSlopeNorm

from repo_interp.plots.marks.arrays import is_logarithmic
from repo_interp.plots.marks.axis_scales import plain_decades
from repo_interp.plots.marks.chart import Drawing
from repo_interp.plots.marks.drawing import colour_bar, legend_below, say, scheme_handles
from repo_interp.plots.marks.panels import draw_cells, reach, scale
from repo_interp.plots.marks.runs import BESIDE, Runs, evenly_spaced, runs_with_values
from repo_interp.plots.marks.titles import name_figure, title_of
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style


@dataclass(frozen=True)
class RunMaps(Drawing):
    """Maps of `values` [run, row, column] on one scale, and differences to the first run.

    Differences have another scale.

    Two runs and their difference share a row; with more runs the differences are a second row. If
    there is space, all runs are drawn, even runs without a value. `detail`: a line below the title.
    """

    values: xr.DataArray
    runs: Runs
    detail: str = ""

    @style()
    def figure(self) -> PaperFigure:
        """The chart as a figure."""
        values, runs = self.values, self.runs
        values = values.transpose(
            "run", *(dim for dim in ("layer", "head") if dim in values.dims), ...
        )
        if values.sizes["run"] > BESIDE:
            values = values.sel(run=evenly_spaced(runs_with_values(values), BESIDE))
        names, data = [str(name) for name in values["run"].values], values.values.astype(float)
        row, pair = values.dims[1], len(names) == 2
        # The first run that has values: the one named first may lack this measure
        base, *others = [place for place, of_run in enumerate(data) if np.isfinite(of_run).any()]
        logarithmic = is_logarithmic(data)
        with np.errstate(divide="ignore", invalid="ignore"):
            # On a scale of orders of magnitude the eye compares ratios
            differences = np.log10(data / data[base]) if logarithmic else data - data[base]
        height = 0.55 + 0.13 * max(6, min(len(values[row]), 32)) if row == "layer" else 1.75
        rows = 1 if pair or not others else 2
        figure = paper_figure(PAGE_WIDTH, rows * height + 0.3)
        axes: Any = figure.subplots(rows, 3 if pair else len(names), squeeze=False)
        below = axes[0, 1:] if pair else axes[-1]
        finite = data[np.isfinite(data)]
        colours, norm = scale(data)
        end = reach(differences[others][np.isfinite(differences[others])])
        looks = {
            "cmap": colours,
            "norm": LogNorm(finite.min(), finite.max()) if logarithmic else norm,
        }
        # The same end on either side, so that equal changes up and down are equally dark
        apart = {"cmap": "PuOr", "norm": TwoSlopeNorm(0, -end, end)}
        titles, between = [*map(runs.title, names)], "/" if logarithmic else "−"
        drawn = [
            (axes[0, place], place, data, f"map {name}", titles[place], looks)
            for place, name in enumerate(names)
        ]
        for place in others:
            # On two lines, as two names are wider than a panel
            title, gid = f"{titles[place]}\n{between} {titles[base]}", f"difference {names[place]}"
            drawn.append((below[place], place, differences, gid, title, apart))
        images = []
        for ax, place, numbers, gid, title, look in drawn:
            cells = values[place].copy(data=numbers[place])
            images.append(
                draw_cells(ax, cells, {**look, "gid": gid}, most=10 if row == "layer" else 5)
            )
            ax.set_title(title)
            if not cells.notnull().any():
                say(ax, "none", colour="#5A5A5A")
        used, units = [ax for ax, *_ in drawn], str(values.attrs.get("units", ""))
        _bar(figure, images[0], used[: len(names)], units.removesuffix("1"), finite)
        if others:
            label = "log₁₀ of the ratio" if logarithmic else "difference"
            _bar(figure, images[-1], used[len(names) :], label, differences[others])
        # Runs without values have no difference to draw
        for ax in set(axes.flat) - set(used):
            ax.set_axis_off()
        if row == "layer" and "scheme" in values.coords:
            # A missing layer of a run has an empty name; a run with one scheme has no swatches
            by_run = (
                {*map(str, values.isel(run=place)["scheme"].values.ravel())} - {""}
                for place in range(len(names))
            )
            mixed = [sorted(of_run) for of_run in by_run if len(of_run) > 1]
            legend_below(figure, scheme_handles(chain.from_iterable(mixed)))
        name_figure(figure, title_of(values), self.detail)
        return figure


def _bar(
    figure: PaperFigure, image: Any, axes: Sequence[Axes], label: str, data: np.ndarray
) -> None:
    # Beyond rounding: the end of the scale may be the largest value itself
    beyond = bool(np.nanmax(np.abs(data)) > image.norm.vmax * (1 + 1e-9))
    look = {"pad": 0.02, "fraction": 0.04, "aspect": 18, "extend": "both" if beyond else "neither"}
    bar = colour_bar(figure, image, list(axes), label, **look)
    if isinstance(image.norm, LogNorm):
        plain_decades(bar.ax.yaxis)
