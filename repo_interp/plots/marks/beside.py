"""One variable of several runs in one figure, by one rule from its axes.

    mean over prompts first; then, by the axes other than `run`,
      layer, head                    `maps`, and their difference                steps: also `lines` over the training step, one per head
      two block axes                 `maps` of the head in which runs differ most
      names (span, pattern, kind)    `dots`, all layers and heads together       steps: `lines`, one per name; of a name, one per head
      numbers (distance, component)  `lines`, one per run, a panel per layer

    maps   [run, row, column]   one per run with one colour scale, and their differences to the first run
    lines  [run, x, ...]        mean over all other axes; band: its middle half
    dots   [run, names, ...]    the same for every name

Knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from repo_interp.plots.marks.arrays import nanmean, over_prompts
from repo_interp.plots.marks.chart import Drawing
from repo_interp.plots.marks.drawing import (
    colour_bar,
    double_axis,
    legend_below,
    panels,
    plain_decades,
    say,
    scheme_handles,
    shade_spans,
    signed_decades,
    span_handles,
    training_line,
)
from repo_interp.plots.marks.panels import draw_cells, reach, scale
from repo_interp.plots.marks.reading import (
    PromptTokens,
    axis_label,
    axis_name,
    ordered_spans,
    unit_label,
)
from repo_interp.plots.marks.runs import BESIDE, Runs, evenly_spaced, runs_with_values
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PATTERN_COLOURS,
    PaperFigure,
    darker,
    paper_figure,
    scheme_colour,
    span_colours,
    style,
)

PANELS, COLUMNS = 8, 4
"""Panels of layers, and how many in a row; of more layers the first, the last and some between are
drawn.
"""
NAMES = 16
"""Most names of an axis in one figure."""
LOG_ABOVE, LOG_BELOW = 50.0, 1e5
"""Ratios of the largest to the smallest value, all positive, between which a scale is logarithmic.
"""
MOST_DOUBLED = 20
"""Places along an axis up to which it may be logarithmic, with a tick at each."""
ALIKE = 8.0
"""Largest over smallest range of panels up to which they share an axis."""
LINE = 0.8
"""Share of its light that a colour for areas keeps where it is a line's."""
HIDDEN = 100.0
"""Ratio of two changes from which the smaller one is hidden by a linear axis."""
_CROSS: Mapping[str, Any] = {"linestyle": "none", "marker": "x", "color": "#B35806"}
# Colours that readers with colour blindness tell apart (Okabe and Ito 2008), and some more
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#804020", "#4B2BD6", "#56B4E9", "#5A5A5A")


def charts_of(
    name: str, array: xr.DataArray, runs: Runs, live: bool = False
) -> Iterator["Lines | Dots | Maps"]:
    """Choose charts for an array of several runs, by the rule of the module.

    Bars are drawn between coordinates `low` and `high`.

    Args:
        name: Start of the charts' names.
        array: Floats [run, ...].
        runs: Names, titles and looks of the runs.
        live: Passed on to the charts.

    Returns:
        The charts; none if no rule fits, or if fewer than two of several runs have a value.
    """
    # Texts and counts have no mean to draw, and one run alone compares nothing
    if array.dtype.kind != "f" or len(runs_with_values(array)) < min(2, len(runs.names)):
        return
    prompts, values = array.sizes.get("prompt", 0), over_prompts(array)
    caption = f"{array.attrs.get('long_name', array.name)}{f', mean over {prompts} prompts' if prompts > 1 else ''}"
    heads = [dim for dim in ("layer", "head") if dim in values.dims]
    names = [
        dim
        for dim in values.dims
        # Object, unicode, bytes and numpy's variable-width strings: names, not numbers
        if dim not in ("run", *heads) and values[dim].dtype.kind in "OUST"
    ]
    for dim in [
        dim
        for dim in names
        if runs.steps is None and all(str(label).isdecimal() for label in values[dim].values)
    ]:
        named = (dim, values[dim].values.astype(int), values[dim].attrs)
        values = values.assign_coords({dim: named}).sortby(dim)  # lengths, as test sets are called
        names.remove(dim)
    numbers = [dim for dim in values.dims if dim not in ("run", *heads, *names)]
    for chart in _charts(values, runs, heads, names, numbers):
        yield replace(
            chart,
            name="_".join(filter(None, (name, chart.name))),
            live=live,
            caption=f"{caption[:1].upper()}{caption[1:]}{chart.caption}.",
        )


def _charts(
    values: xr.DataArray,
    runs: Runs,
    heads: list[str],
    names: list[Hashable],
    numbers: list[Hashable],
) -> Iterator["Lines | Dots | Maps"]:
    """The charts, with the ends of their names and captions."""
    if not names and not numbers and not heads:
        # A number per run alone: one name on an axis, so that dots can show it
        names, values = ["of"], values.expand_dims(of=[str(values.name)])
    if len(numbers) == 2 and not names and all(str(dim).endswith("_block") for dim in numbers):
        moved = values.transpose("run", *heads, ...)
        # Mean squared difference to the first run [layer, head], where another one begins to differ
        squares = (
            ((moved - moved.isel(run=0)) ** 2)
            .isel(run=slice(1, None))
            .mean(["run", *numbers])
            # Where no two runs share a value, argmax over NaN alone would raise
            .fillna(-1.0)
        )
        head = {str(dim): int(place) for dim, place in squares.argmax(...).items()} if heads else {}
        named = ", ".join(f"{dim} {int(moved[dim][place])}" for dim, place in head.items())
        caption = f". {named}, the head in which the runs differ most"
        yield Maps(moved.isel(head), runs, named, caption=caption)
    elif not names and not numbers and len(heads) == 2:
        size = f"{values.sizes['layer']} layers of {values.sizes['head']} heads"
        yield Maps(values, runs, size)
        yield from _over_steps(values, runs, "over_steps")
    elif not names and not numbers and heads == ["layer"]:
        yield Lines(values, runs, "layer")
    elif len(names) == 1 and not numbers:
        (axis,) = names
        yield (Dots(values, runs, axis) if runs.steps is None else Lines(values, runs, "run", axis))
        for label in names_along(values, axis) if len(heads) == 2 else ():
            # Parts of spans ("needle.1.key") would make too many figures
            if "." not in label:
                yield from _over_steps(_named(values, axis, label), runs, f"{label}_over_steps")
    elif numbers and len(names) + len(numbers) <= 3:
        # The longest axis runs along x, shorter ones become panels or figures
        x = max(numbers, key=lambda dim: values.sizes[dim])
        panel, apart = [*(dim for dim in [*numbers, *names] if dim != x), None, None][:2]
        if values.sizes[x] == 1 and panel is None:
            yield Dots(values.assign_coords({x: [f"{values[x].item():g}"]}), runs, x)
        elif apart is None:
            yield Lines(values, runs, x, panel=panel or ("layer" if "layer" in heads else None))
        else:
            for label in values[apart].values:
                named, caption = _named(values, apart, label), f": {apart} {label}"
                if named.notnull().any():
                    yield Lines(named, runs, x, panel=panel, name=str(label), caption=caption)


def _named(values: xr.DataArray, axis: Hashable, label: Any) -> xr.DataArray:
    """`values` at `label` of `axis`, which its name then holds."""
    return values.sel({axis: label}).assign_attrs(
        long_name=f"{values.attrs.get('long_name', values.name)}: {label}"
    )


def _over_steps(values: xr.DataArray, runs: Runs, suffix: str) -> Iterator["Lines"]:
    """Chart `values` [run, layer, head] over training steps.

    A line is a head, or their mean if there are more heads than colours.
    """
    if runs.steps is not None:
        few = values.sizes["head"] <= len(_LINES)
        named = values.assign_coords(head=[f"head {number}" for number in values["head"].values])
        yield Lines(named, runs, "run", "head" if few else None, "layer", name=suffix)


@dataclass(frozen=True)
class Maps(Drawing):
    """Maps of `values` [run, row, column] on one scale, and differences to the first run.

    Differences have another scale.

    Two runs and their difference share a row; of more runs the differences are a second row. All
    runs are drawn where there is room, also those that have no value. `detail`: a line below the
    title.
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
            # A run that lacks a layer has an empty name there
            named = filter(None, map(str, values["scheme"].values.ravel()))
            legend_below(figure, scheme_handles(named))
        name_figure(figure, _title(values), self.detail)
        return figure


@dataclass(frozen=True)
class Lines(Drawing):
    """One line per label of `line` of `values` [run, x, ...].

    A line is the mean over all axes without a role; its band is the middle half.

    `x`: an axis of numbers; "run": the training step. `line` None: a single line. `panel`: an axis
    with one panel per label; None: one. Bars are drawn between coordinates `low` and `high`.
    """

    values: xr.DataArray
    runs: Runs
    x: Hashable
    line: Hashable | None = "run"
    panel: Hashable | None = None
    spans: PromptTokens | None = None
    """The prompt whose tokens are `x`; its spans are shaded."""

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
        places, of_scheme = (
            values[x].values.astype(float),
            len(looks) == 1 and panel == "layer" and "scheme" in values.coords,
        )
        wide, spans = (
            len(labels) > 2 or self.spans,
            {} if self.spans is None else self.spans.top_spans,
        )
        width = PAGE_WIDTH if wide else 0.55 * PAGE_WIDTH * len(labels)
        parts = [values if panel is None else values.sel({panel: label}) for label in labels]
        reaches = [float(part.max() - part.min()) for part in parts if part.notnull().any()]
        # Where one layer spreads much more than others, a shared axis would flatten these
        alike = not reaches or max(reaches) <= values.attrs.get("alike", ALIKE) * min(reaches)
        figure, axes = panels(
            len(labels),
            COLUMNS,
            1.7 if len(labels) == 1 else 1.35,
            0.75,
            width,
            sharex=True,
            sharey=alike,
        )
        for ax, label, of_panel in zip(axes, labels, parts, strict=True):
            for name, look in looks.items():
                chosen = of_panel if name is None else of_panel.sel({line: name})
                chosen = chosen.transpose(x, ...)
                if of_scheme:
                    look = {**look, "color": scheme_colour(str(chosen["scheme"].item()))}
                # [x, all axes without a role]: layers and heads together
                of_line = chosen.values.reshape(len(places), -1)
                # A line goes on over places without a value, rather than break
                known = np.isfinite(of_line).any(axis=1)
                if known.any():
                    title = str(label if name is None else name)
                    _line(ax, places[known], of_line[known], look, title)
                if "low" in chosen.coords:
                    ends = chosen["low"].values, chosen["high"].values
                    ax.vlines(
                        places, *ends, color=look["color"], linewidth=0.7, gid=f"error {name}"
                    )
            shade_spans(ax, spans, ordered_spans(spans))
            ax.set_title("" if label is None else f"{axis_name(panel)} {label}")
            ax.grid(axis="y")
            if x in ("run", "length", "layer") and is_logarithmic(values.values):
                ax.set_yscale("log")
                plain_decades(ax.yaxis)
            else:
                ax.locator_params(axis="y", nbins=5)
            if x != "run" and (places == places.round()).all():
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            if (
                x != "run"
                and 1 < len(places) <= MOST_DOUBLED
                and places.min() > 0
                # Two doublings at least: a shorter axis reads better with equal steps
                and places.max() / places.min() >= 4
            ):
                double_axis(ax, places)
            if "limits" in values.attrs:
                ax.set_ylim(*values.attrs["limits"])
            if "training_length" in values.attrs:
                training_line(ax, values.attrs["training_length"])
        name_columns(axes, COLUMNS, "training step" if x == "run" else axis_label(values, str(x)))
        figure.supylabel(
            str(values.attrs.get("units", "")).removesuffix("1") or axis_name(values.name)
        )
        some = (
            f"{len(labels)} of {values.sizes[panel]} {axis_name(panel)}s"
            if panel and len(labels) < values.sizes[panel]
            else ""
        )
        name_figure(
            figure,
            _title(values),
            "; ".join(filter(None, [_averaged_over(values, x, panel, line), some])),
        )
        handles: list[Any] = span_handles(spans, ordered_spans(spans))
        if line == "run" and len(runs.names) > 1:
            handles += runs.handles([*map(str, looks)])
        elif line not in (None, "run"):
            handles += [Line2D([], [], markersize=3, **look) for look in looks.values()]
        legend_below(figure, handles)
        return figure


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
    """An axis with one panel per label, which says what its x axis is; None: one panel."""

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
        for ax, label in zip(axes, labels, strict=True):
            of_panel = values if panel is None else values.sel({panel: label})
            _draw_dots(ax, of_panel.transpose("run", axis, ...), runs, shown)
            ax.set_xlabel(label or unit_label(axis_name(values.name), values))
        figure.gca().set(ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
        name_figure(
            figure,
            str(values.attrs.get("long_name", values.name)),
            values.attrs.get("detail") or _averaged_over(values, axis, None, middle="90 %"),
        )
        looks: list[Any] = [runs.looks[name] for name in shown] if len(shown) > 1 else []
        if "control" in values.coords:
            looks.append({**_CROSS, "label": values["control"].attrs["long_name"]})
        legend_below(
            figure, [Line2D([], [], markersize=3.6, **{**look, "linestyle": ""}) for look in looks]
        )
        return figure


def _draw_dots(ax: Axes, values: xr.DataArray, runs: Runs, shown: Sequence[str]) -> None:
    """Draw `values` [run, name, ...] as `Dots` does."""
    # [run, name, all other axes], and the same of means over prompts
    flat, heads = (
        part.values.reshape(*part.shape[:2], -1) for part in (values, over_prompts(values))
    )
    means, places = nanmean(flat, axis=2), np.arange(flat.shape[1])
    for row, name in enumerate(shown):
        look = runs.looks[name]
        ink = {"color": look["color"]}
        # Runs stand one below the other around the line of their name, in 0.7 of its height
        y = places + 0.7 * ((row + 0.5) / len(shown) - 0.5)
        if heads.shape[2] > 1:
            middle = {"linewidth": 1.4, "alpha": 0.45, "gid": f"middle {name}"}
            ax.hlines(y, *_ends(heads[row], 0.05), **ink, **middle)
        if "prompt" in values.dims:
            ticks = values.isel(run=row).mean([*{*values.dims[2:]} - {"prompt"}])
            x = ticks.transpose("prompt", ...).values
            ax.plot(x, np.broadcast_to(y, x.shape), "|", **ink, alpha=0.6, gid=f"prompts {name}")
        if "low" in values.coords:
            ends = [values[end].broadcast_like(values).values[row] for end in ("low", "high")]
            ax.hlines(y, *ends, **ink, linewidth=0.7, gid=f"error {name}")
        ax.plot(means[row], y, look["marker"], **ink, markersize=3.6, gid=f"mean {name}")
    if "control" in values.coords:
        ax.plot(values["control"].values, places, **_CROSS, gid="control")
    if is_logarithmic(means):
        ax.set_xscale("log")
        plain_decades(ax.xaxis)
        ax.set_xlim(float(np.nanmin(means)) / 3, float(np.nanmax(flat)) * 1.5)
    elif (least := values.attrs.get("least")) is not None:  # a smaller change is rounding
        # At least the size of rounding is shown, so that rounding never fills the axis
        ax.update_datalim([(-least, 0), (least, 0)])
        ax.autoscale_view(scaley=False)
        sizes = np.abs(means)
        # a linear axis would hide a change that is none of rounding
        if ((sizes > least) & (sizes * HIDDEN < np.nanmax(sizes))).any():
            signed_decades(ax, "x", least)
        else:
            ax.locator_params(axis="x", nbins=4)
        ax.axvline(0, color="#8A8A8A", linewidth=0.6, zorder=0)
    ax.grid(axis="x")


def names_along(values: xr.DataArray, axis: Hashable) -> list[str]:
    """List the names along an axis that have a finite value.

    Args:
        values: Array with the axis.
        axis: Axis of names; spans come in reading order.

    Returns:
        At most `NAMES` names.
    """
    names = [
        str(name)
        for name in values[axis].values
        if np.isfinite(values.sel({axis: name}).values).any()
    ]
    if axis == "span":
        names = ordered_spans(names)
        names = [name for name in names if "." not in name] if len(names) > NAMES else names
    return names[:NAMES]


def name_figure(figure: PaperFigure, title: str, detail: str) -> None:
    """Write a title and a line of detail above a figure.

    Args:
        figure: Figure to write on.
        title: Title; its first letter becomes a capital. It breaks where the figure ends.
        detail: Line below the title; "" writes none.
    """
    text = title[:1].upper() + title[1:]
    figure.suptitle(f"{text}\n{detail}" if detail else text, x=0.01, ha="left")


def name_columns(axes: Sequence[Axes], columns: int, label: str) -> None:
    """Label the x axis below the lowest panel of every column.

    The last row may have fewer panels than columns.

    Args:
        axes: Panels, row by row.
        columns: Panels in a row.
        label: Label of the x axis.
    """
    for lowest in axes[-columns:]:
        lowest.set_xlabel(label)
        # Shared axes hide tick labels above the last row, also where nothing stands below
        lowest.tick_params(labelbottom=True)


def is_logarithmic(data: np.ndarray) -> bool:
    """Tell whether values spread so far that their scale is logarithmic.

    Args:
        data: Numbers of any shape; NaN and infinities are ignored.

    Returns:
        True if all are positive and largest / smallest lies between `LOG_ABOVE` and `LOG_BELOW`.
    """
    finite = data[np.isfinite(data)]
    return bool(
        finite.size and finite.min() > 0 and LOG_ABOVE < finite.max() / finite.min() < LOG_BELOW
    )


def _looks(
    values: xr.DataArray, runs: Runs, line: Hashable | None
) -> dict[str | None, Mapping[str, Any]]:
    """Choose the looks of lines.

    Runs keep theirs; spans and patterns have their colours, darkened to be read as lines.
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
        name: {**look, "color": fixed.get(name, _LINES[place % len(_LINES)]), "label": name}
        for place, name in enumerate(names)
    }


def _line(ax: Axes, x: np.ndarray, values: np.ndarray, look: Mapping[str, Any], name: str) -> None:
    if values.shape[1] > 1:
        ax.fill_between(
            x,
            *_ends(values, 0.25),
            color=look["color"],
            alpha=0.15,
            linewidth=0,
            gid=f"middle half {name}",
        )
    marks = {"markersize": 2.4} if len(x) <= 16 else {"marker": ""}
    ax.plot(x, nanmean(values, axis=1), gid=f"mean {name}", **{**look, **marks})


def _bar(
    figure: PaperFigure, image: Any, axes: Sequence[Axes], label: str, data: np.ndarray
) -> None:
    # Beyond rounding: the end of the scale may be the largest value itself
    beyond = bool(np.nanmax(np.abs(data)) > image.norm.vmax * (1 + 1e-9))
    look = {"pad": 0.02, "fraction": 0.04, "aspect": 18, "extend": "both" if beyond else "neither"}
    bar = colour_bar(figure, image, list(axes), label, **look)
    if isinstance(image.norm, LogNorm):
        plain_decades(bar.ax.yaxis)


def _ends(values: np.ndarray, below: float) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles over the last axis with a share `below` and above; NaN where nothing is there."""
    known = np.asarray(np.isfinite(values).any(axis=1))
    # Rows of NaN alone would warn: they are 0 here and NaN again below
    low, high = np.nanquantile(np.where(known[:, None], values, 0.0), (below, 1 - below), axis=1)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def _averaged_over(values: xr.DataArray, *apart: Hashable | None, middle: str = "half") -> str:
    """Describe a line and its band: "mean and middle half over 4 layers of 4 heads"."""
    rest = [
        f"{values.sizes[dim]} {dim}s"
        for dim in ("layer", "head")
        if dim in values.dims and dim not in apart
    ]
    return f"mean and middle {middle} over {' of '.join(rest)}" if rest else ""


def _title(values: xr.DataArray) -> str:
    return unit_label(str(values.attrs.get("long_name", values.name)), values)
