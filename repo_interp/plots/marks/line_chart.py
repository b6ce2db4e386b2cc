"""`Lines`: means of several runs or names over a numeric axis.

    lines  [run, x, ...]        mean over all other axes; band: its middle half

The x axis spans only measured values: a training length beyond them is written in words. This
module knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from repo_interp.plots.marks.arrays import is_logarithmic, nanmean, quantile_ends
from repo_interp.plots.marks.axis_scales import (
    double_axis,
    name_columns,
    plain_decades,
    training_line,
)
from repo_interp.plots.marks.chart import Drawing
from repo_interp.plots.marks.drawing import legend_below, lone_entry, panels
from repo_interp.plots.marks.reading import (
    PromptTokens,
    axis_label,
    axis_name,
    names_along,
    ordered_spans,
)
from repo_interp.plots.marks.runs import Runs, evenly_spaced, runs_with_values
from repo_interp.plots.marks.titles import averaged_over, name_figure, title_of
from repo_interp.plots.marks.token_axis import shade_spans, span_handles
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PATTERN_COLOURS,
    PaperFigure,
    darker,
    scheme_colour,
    span_colours,
    style,
)

PANELS, COLUMNS = 8, 4
"""Panels of layers, and how many in a row; of more layers the first, the last and some between are
drawn.
"""
MOST_DOUBLED = 20
"""Places along an axis up to which it may be logarithmic, with a tick at each."""
FEW_POINTS = 16
"""Places along an axis up to which lines have dots."""
ROOM = 0.03
"""Margin of the x axis, as a share of the measured range, so that spines hide nothing."""
ASIDE = 1.6
"""Points from the error bars of one line to those of the next."""
ALIKE = 8.0
"""Largest over smallest range of panels up to which they share an axis."""
LINE = 0.8
"""Factor that darkens a color of areas for use in lines."""
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
"""Dashes, in order, of lines with names that have no color."""
# Colors that readers with color blindness tell apart (Okabe and Ito 2008), and some more
LINE_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#804020", "#4B2BD6", "#56B4E9", "#5A5A5A"),
)


@dataclass(frozen=True)
class Lines(Drawing):
    """One line per label of `line` of `values` [run, x, ...].

    A line is the mean over all axes without a role; its band is the middle half.

    `x`: an axis of numbers; "run": the training step. `line` None: a single line. `panel`: an axis
    with one panel per label; None: one. Bars are drawn between coordinates `low` and `high`.
    Attributes of `values`: `limits` of the y axis, `level` of a gray line across,
    `training_length` of a dotted line where it is within x, `alike`, `scale` ("logarithmic": always), and
    a `detail` below the title.
    """

    values: xr.DataArray
    runs: Runs
    x: Hashable
    line: Hashable | None = "run"
    panel: Hashable | None = None
    spans: PromptTokens | None = None
    """The prompt with tokens `x`; its spans are shaded."""

    @style()
    def figure(self) -> PaperFigure:
        """The chart as a figure."""
        values, runs, x, line, panel = self.values, self.runs, self.x, self.line, self.panel
        values = values.sel(run=runs_with_values(values))
        looks = _looks(values, runs, line)
        panel = panel if panel in values.dims else None
        labels: list[Any] = (
            [None] if panel is None else evenly_spaced(list(values[panel].values), PANELS)
        )
        if x == "run" and runs.steps is not None:
            steps = [runs.steps[runs.names.index(str(name))] for name in values["run"].values]
            values = values.assign_coords(run=("run", steps, {"long_name": "training step"}))
        spans = {} if self.spans is None else self.spans.top_spans
        parts = [values if panel is None else values.sel({panel: label}) for label in labels]
        figure, axes = self._panels(parts)
        of_scheme = len(looks) == 1 and panel == "layer" and "scheme" in values.coords
        for ax, label, of_panel in zip(axes, labels, parts, strict=True):
            for place, (name, look) in enumerate(looks.items()):
                chosen = of_panel if name is None else of_panel.sel({line: name})
                if of_scheme:
                    look = {**look, "color": scheme_colour(str(chosen["scheme"].item()))}
                aside = ASIDE * (place - (len(looks) - 1) / 2)
                _draw_line(
                    ax, chosen.transpose(x, ...), look, str(label if name is None else name), aside
                )
            shade_spans(ax, spans, ordered_spans(spans))
            ax.set_title("" if label is None else f"{axis_name(panel)} {label}")
            self._scale(ax, values)
        name_columns(axes, COLUMNS, "training step" if x == "run" else axis_label(values, str(x)))
        figure.supylabel(
            str(values.attrs.get("units", "")).removesuffix("1") or axis_name(values.name)
        )
        handles: list[Any] = span_handles(spans, ordered_spans(spans))
        only = lone_entry(handles, "shaded")
        if line == "run" and len(runs.names) > 1:
            handles += runs.handles([*map(str, looks)])
        elif line not in (None, "run"):
            handles += [Line2D([], [], markersize=3, **look) for look in looks.values()]
            only = only or lone_entry(handles, "line")
        legend_below(figure, handles)
        details = (
            str(values.attrs.get("detail", "")),
            averaged_over(values, x, panel, line),
            f"{len(labels)} of {values.sizes[panel]} {axis_name(panel)}s"
            if panel and len(labels) < values.sizes[panel]
            else "",
            only if len(handles) == 1 else "",
            self._beyond(values),
        )
        name_figure(figure, title_of(values), "; ".join(filter(None, details)))
        return figure

    def _panels(self, parts: list[xr.DataArray]) -> tuple[PaperFigure, list[Axes]]:
        """An empty figure with a panel for each of `parts`."""
        wide = len(parts) > 2 or self.spans
        width = PAGE_WIDTH if wide else 0.55 * PAGE_WIDTH * len(parts)
        reaches = [float(part.max() - part.min()) for part in parts if part.notnull().any()]
        # Where one layer spreads much more than others, a shared axis would flatten these
        most = self.values.attrs.get("alike", ALIKE)
        alike = not reaches or max(reaches) <= most * min(reaches)
        height = 1.7 if len(parts) == 1 else 1.35
        return panels(len(parts), COLUMNS, height, 0.75, width, sharex=True, sharey=alike)

    def _scale(self, ax: Axes, values: xr.DataArray) -> None:
        """Scales, limits and lines across of a panel, from the values of all."""
        x, places = self.x, values[self.x].values.astype(float)
        ax.grid(axis="y")
        several = x in ("run", "length", "layer") and is_logarithmic(values.values)
        if several or values.attrs.get("scale") == "logarithmic":
            ax.set_yscale("log")
            plain_decades(ax.yaxis)
        else:
            ax.locator_params(axis="y", nbins=5)
        if x != "run":
            first, last = _measured(values, x)
            if (places == places.round()).all():
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            # Two doublings at least: a shorter axis reads better with equal steps
            if 1 < len(places) <= MOST_DOUBLED and 0 < 4 * places.min() <= places.max():
                double_axis(ax, places)
            elif first < last and self.spans is None:
                room = ROOM * (last - first)
                ax.set_xlim(first - room, last + room)
            if first <= values.attrs.get("training_length", np.nan) <= last:
                training_line(ax, values.attrs["training_length"])
        if "limits" in values.attrs:
            ax.set_ylim(*values.attrs["limits"])
        if "level" in values.attrs:
            ax.axhline(values.attrs["level"], color="#8A8A8A", linewidth=0.6, zorder=0, gid="level")

    def _beyond(self, values: xr.DataArray) -> str:
        """Name the training length if it is not within the x axis."""
        length = values.attrs.get("training_length")
        if length is None or self.x == "run":
            return ""
        first, last = _measured(values, self.x)
        return "" if first <= length <= last else f"training length: {length:,} tokens"


def _measured(values: xr.DataArray, x: Hashable) -> tuple[float, float]:
    """The first and the last place along `x` that has a value."""
    known = values.notnull().any([dim for dim in values.dims if dim != x])
    places = values[x].values[known.values].astype(float)
    return (float(places.min()), float(places.max())) if places.size else (0.0, 0.0)


def _looks(
    values: xr.DataArray, runs: Runs, line: Hashable | None
) -> dict[str | None, Mapping[str, Any]]:
    """Choose the looks of lines.

    Runs keep theirs; spans and patterns have their colors, darkened to be read as lines.
    """
    if line == "run":
        return {str(name): runs.looks[str(name)] for name in values["run"].values}
    look = {"linestyle": "-", "marker": "o"}
    if line is None:
        return {None: {**look, "color": runs.looks[str(values["run"].values[-1])]["color"]}}
    names = names_along(values, line)
    names = [name for name in names if line != "span" or "." not in name] or names
    known = (
        span_colours(names)
        if line == "span"
        else PATTERN_COLOURS
        if line == "pattern"
        else values[line].attrs.get("colours", {})
    )
    fixed = {name: darker(colour, LINE) for name, colour in known.items()}
    return {
        name: {
            **look,
            "color": fixed.get(name, LINE_COLOURS[place % len(LINE_COLOURS)]),
            # If lines coincide, the lower one is visible between the dashes.
            "linestyle": "-" if known else DASHES[place % len(DASHES)],
            "label": name,
        }
        for place, name in enumerate(names)
    }


def _draw_line(
    ax: Axes, values: xr.DataArray, look: Mapping[str, Any], name: str, aside: float
) -> None:
    """Draw `values` [x, ...]; error bars are shifted by `aside` points."""
    places = values[values.dims[0]].values.astype(float)
    # [x, all axes without a role]: layers and heads together
    of_line = values.values.reshape(len(places), -1)
    # A line connects over places without a value
    known = np.isfinite(of_line).any(axis=1)
    if known.any():
        x, shown = places[known], of_line[known]
        if shown.shape[1] > 1:
            band = {"alpha": 0.15, "linewidth": 0, "gid": f"middle half {name}"}
            ax.fill_between(x, *quantile_ends(shown, 0.25), color=look["color"], **band)
        marks = {"markersize": 2.4} if len(x) <= FEW_POINTS else {"marker": ""}
        ax.plot(x, nanmean(shown, axis=1), gid=f"mean {name}", **{**look, **marks})
    if "low" in values.coords:
        bars = ax.vlines(
            *(places, values["low"].values, values["high"].values),
            color=look["color"],
            linewidth=0.7,
            gid=f"error {name}",
        )
        # A shift in points, not in data, so that bars of several lines do not overlap
        figure = ax.get_figure(root=True)
        bars.set_transform(offset_copy(ax.transData, figure, aside, 0.0, units="points"))
