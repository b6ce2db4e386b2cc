"""One variable of several runs in one figure: the ways in which arrays are drawn side by side.

    heads_beside   [run, layer, head]           one map per run with one colour scale, and one per difference to the first run
    blocks_beside  [run, row, column]           the same
    curves         [run, layer, head, axis]     runs laid over each other, one panel per layer; band: middle half of heads
    categories     [run, layer, head, names]    one dot per run and name: the mean; line: middle half of heads
    over_steps     [run, layer, head, series]   over the training step: one line per name, or one panel per layer

Arrays are means over prompts already. Knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.lines import Line2D

from repo_interp.comparison.looks import (
    CATEGORIES,
    Runs,
    averaged_over,
    axis_name,
    is_logarithmic,
    name_columns,
    name_figure,
    names_along,
    runs_with_values,
    spread,
)
from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.drawing import legend_below, plain_decades, scheme_swatches, sparse_ticks
from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.style import PAGE_WIDTH, PATTERN_COLOURS, PaperFigure, darker, paper_figure, span_colours, style

BESIDE = 5
"""Maps side by side; of more runs the first, the last and some between are drawn."""
PANELS = 8
"""Panels of layers; of more layers the first, the last and some between are drawn."""
COLUMNS = 4
"""Panels in a row."""
FEW, CLIPPED = 1024, 99.5
"""Number of values above which a colour scale of both signs ends at this percentile of their sizes."""
LINE = 0.8
"""Share of its light that a colour for areas keeps where it is a line's."""
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#804020", "#4B2BD6", "#56B4E9", "#5A5A5A")
_EMPTY = "#D9D9D9"


def heads_beside(values: xr.DataArray, runs: Runs) -> PaperFigure:
    """`values` [run, layer, head] as maps with one colour scale, and their differences to the first run with another."""
    values = values.transpose("run", "layer", "head")
    shown = values.sel(run=_shown(values))
    layers, heads = shown.sizes["layer"], shown.sizes["head"]
    with style():
        figure, maps = _beside(shown, runs, height=0.55 + 0.13 * max(6, min(layers, 32)))
        for ax, name in maps:
            for axis, labels, what in ((ax.xaxis, shown["head"].values, "head"), (ax.yaxis, shown["layer"].values, "layer")):
                places = sparse_ticks([int(label) for label in labels], 10)
                axis.set_ticks(places, [str(int(labels[place])) for place in places])
                axis.set_label_text(what)
            if "scheme" in shown.coords:
                _swatches(ax, shown["scheme"].sel(run=name))
        name_figure(figure, _title(values), f"{layers} layers of {heads} heads")
    return figure


def blocks_beside(values: xr.DataArray, runs: Runs, detail: str) -> PaperFigure:
    """`values` [run, row, column] as maps with one colour scale, and the differences to the first run; `detail` stands below the title."""
    row, column = values.dims[-2:]
    shown = values.transpose("run", row, column).sel(run=_shown(values))
    with style():
        figure, maps = _beside(shown, runs, height=1.75)
        for ax, _ in maps:
            ax.set(xlabel=axis_name(column), ylabel=axis_name(row))
            ax.locator_params(nbins=4, integer=True)
        name_figure(figure, _title(values), detail)
    return figure


def curves(values: xr.DataArray, runs: Runs, x: str, panel: str | None) -> PaperFigure:
    """`values` [run, x, ...] as one curve per run: the mean over layers and heads, with a band of their middle half.

    `panel`: an axis with one panel per label; None: a single panel.
    """
    labels: list[Any] = [None] if panel is None else spread(list(values[panel].values), PANELS)
    names = runs_with_values(values)
    places = values[x].values.astype(float)
    logarithmic = 3 <= len(places) <= 10 and places.min() > 0 and places.max() / places.min() >= 8
    with style():
        figure, axes = _panels(len(labels), margin=0.75)
        for label, ax in zip(labels, axes.flat, strict=False):
            of_panel = values if panel is None else values.sel({panel: label})
            for name in names:
                of_run = of_panel.sel(run=name).transpose(x, ...)
                _curve(ax, places, of_run.values.reshape(len(places), -1), dict(runs.looks[name]), str(name))
            if panel is not None:
                ax.set_title(f"{axis_name(panel)} {label}")
            ax.grid(axis="y")
            ax.locator_params(axis="y", nbins=5)
            if logarithmic:
                ax.set_xscale("log")
                ax.set_xticks(places, [f"{value:g}" for value in places])
                ax.minorticks_off()
        name_columns(axes, unit_label(axis_name(x), values[x]))
        _name_rows(figure, values)
        shown = averaged_over(values, x, panel)
        many = panel is not None and values.sizes[panel] > PANELS
        shown += f"; {len(labels)} of {values.sizes[panel]} {axis_name(panel)}s" if panel and many else ""
        name_figure(figure, _title(values), shown)
        legend_below(figure, runs.handles(names))
    return figure


def categories(values: xr.DataArray, runs: Runs, axis: str) -> PaperFigure:
    """`values` [run, axis, ...] with names on `axis` as one dot per run and name, the mean over all else; a line: the middle half."""
    names = names_along(values, axis)
    values = values.sel({axis: names}).transpose("run", axis, ...)
    shown = runs_with_values(values)
    flat = values.sel(run=shown).values.reshape(len(shown), len(names), -1)
    with style():
        figure = paper_figure(0.62 * PAGE_WIDTH, 0.95 + max(0.2, 0.09 * len(shown)) * len(names))
        ax = figure.subplots()
        for row, name in enumerate(shown):
            look = runs.looks[name]
            y = np.arange(len(names)) + 0.7 * ((row + 0.5) / len(shown) - 0.5)
            if flat.shape[2] > 1:
                low, high = _quartiles(flat[row])
                ax.hlines(y, low, high, color=look["color"], linewidth=1.4, alpha=0.45, gid=f"middle half {name}")
            ax.plot(nanmean(flat[row], axis=1), y, look["marker"], color=look["color"], markersize=3.6, gid=f"mean {name}")
        ax.set_yticks(range(len(names)), [str(name) for name in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel(unit_label(str(values.name).replace("_", " "), values))
        means = nanmean(flat, axis=2)
        if is_logarithmic(means):
            ax.set_xscale("log")
            plain_decades(ax.xaxis)
            ax.set_xlim(float(np.nanmin(means)) / 3, float(np.nanmax(flat)) * 1.5)
        ax.grid(axis="x")
        name_figure(figure, str(values.attrs.get("long_name", values.name)), averaged_over(values, axis, None))
        legend_below(figure, [Line2D([], [], markersize=3.6, **{**runs.looks[name], "linestyle": "none"}) for name in shown])
    return figure


def over_steps(values: xr.DataArray, runs: Runs, series: str | None) -> PaperFigure:
    """`values` [run, ...] over the training step: one line per name of `series`, the mean over all else.

    Without `series` one panel per layer, with a thin line per head and a thick one for their mean.
    """
    shown = runs_with_values(values)
    steps = np.array([runs.step(name) for name in shown], dtype=float)
    values = values.sel(run=shown)
    with style():
        if series is not None:
            figure = paper_figure(0.62 * PAGE_WIDTH, 2.5)
            _series(figure, figure.subplots(), values.transpose("run", series, ...), steps, series)
        else:
            figure = _layers_over_steps(values, steps, str(runs.looks[shown[-1]]["color"]))
        detail = "thick: mean over heads, thin: a head" if series is None else averaged_over(values, series, None, "mean over")
        name_figure(figure, _title(values), detail)
    return figure


def _shown(values: xr.DataArray) -> list[str]:
    """The runs that are drawn: all where there is room, also those that have no value; else some of those that have."""
    names = [str(name) for name in values["run"].values]
    return names if len(names) <= BESIDE else spread(runs_with_values(values), BESIDE)


def _beside(values: xr.DataArray, runs: Runs, height: float) -> tuple[PaperFigure, list[tuple[Axes, str]]]:
    """Maps of all runs, and of their differences to the first that has values; and the axes of every map with its run.

    Two runs and their difference stand in one row; of more runs the differences stand below.
    """
    names = [str(name) for name in values["run"].values]
    data = values.values.astype(float)
    base, *others = [place for place, of_run in enumerate(data) if np.isfinite(of_run).any()]
    logarithmic = is_logarithmic(data)
    with np.errstate(divide="ignore", invalid="ignore"):
        differences = np.log10(data / data[base]) if logarithmic else data - data[base]
    one_row = len(names) == 2
    rows = 1 if one_row or not others else 2
    figure = paper_figure(PAGE_WIDTH, rows * height + 0.3)
    axes: Any = figure.subplots(rows, 3 if one_row else len(names), squeeze=False)
    maps = [(axes[0, place], place) for place in range(len(names))]
    below = [(axes[0, 2] if one_row else axes[1, place], place) for place in others]
    colours, norm = _scale(data, logarithmic)
    images = [_map(ax, data[place], f"map {names[place]}", cmap=colours, norm=norm) for ax, place in maps]
    for ax, place in maps:
        ax.set_title(runs.title(names[place]))
    _bar(figure, images[0], [ax for ax, _ in maps], str(values.attrs.get("units", "")).removesuffix("1"), data)
    shown = differences[others]
    reach = _reach(shown[np.isfinite(shown)])
    for ax, place in below:
        image = _map(ax, differences[place], f"difference {names[place]}", cmap="PuOr", norm=TwoSlopeNorm(0, -reach, reach))
        ax.set_title(f"{runs.title(names[place])} {'/' if logarithmic else '−'} {runs.title(names[base])}")
        images.append(image)
    if below:
        _bar(figure, images[-1], [ax for ax, _ in below], "log₁₀ of the ratio" if logarithmic else "difference", shown)
    drawn = {id(ax) for ax, _ in (*maps, *below)}
    for ax in axes.flat:
        if id(ax) not in drawn:
            ax.set_axis_off()
    return figure, [(ax, names[place]) for ax, place in (*maps, *below)]


def _swatches(ax: Axes, kinds: xr.DataArray) -> None:
    """The colour of every layer's scheme beside it; nothing beside a layer that the run lacks."""
    scheme_swatches(ax, {int(layer): str(kind) for layer, kind in zip(kinds["layer"].values, kinds.values, strict=True)}, "y")
    absent = {f"scheme {int(layer)} " for layer, kind in zip(kinds["layer"].values, kinds.values, strict=True) if not kind}
    for line in [line for line in ax.lines if line.get_gid() in absent]:
        line.remove()


def _map(ax: Axes, data: np.ndarray, gid: str, **scale: Any) -> Any:
    image = ax.imshow(data, aspect="auto", interpolation="nearest", gid=gid, **scale)
    ax.set_facecolor(_EMPTY)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if not np.isfinite(data).any():
        ax.text(0.5, 0.5, "none", transform=ax.transAxes, ha="center", va="center", color="#5A5A5A")
    return image


def _bar(figure: PaperFigure, image: Any, axes: Sequence[Axes], label: str, data: np.ndarray) -> None:
    beyond = bool(np.nanmax(np.abs(data)) > image.norm.vmax * (1 + 1e-9))
    bar = figure.colorbar(image, ax=list(axes), pad=0.02, fraction=0.04, aspect=18, extend="both" if beyond else "neither")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    if isinstance(image.norm, LogNorm):
        plain_decades(bar.ax.yaxis)
    if label:
        bar.set_label(label)


def _scale(data: np.ndarray, logarithmic: bool) -> tuple[str, Normalize]:
    finite = data[np.isfinite(data)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if logarithmic:
        return "cividis", LogNorm(low, high)
    if low < 0 < high:
        return "PuOr", TwoSlopeNorm(0, -_reach(finite), _reach(finite))
    return "cividis", Normalize(min(0.0, low), high if high > min(0.0, low) else low + 1)


def _reach(finite: np.ndarray) -> float:
    """Where a scale around 0 ends: at the largest size, of many values at all but the very largest."""
    sizes = np.abs(finite)
    return float((np.percentile(sizes, CLIPPED) if sizes.size > FEW else sizes.max(initial=0.0)) or sizes.max(initial=0.0) or 1.0)


def _curve(ax: Axes, x: np.ndarray, values: np.ndarray, look: dict[str, Any], name: str) -> None:
    look = look | ({"markersize": 2.4} if len(x) <= 16 else {"marker": ""})
    if not np.isfinite(values).any():
        return
    if values.shape[1] > 1:
        low, high = _quartiles(values)
        ax.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0, gid=f"middle half {name}")
    ax.plot(x, nanmean(values, axis=1), gid=f"mean {name}", **look)


def _quartiles(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quartiles over the last axis; NaN where nothing is there."""
    known = np.asarray(np.isfinite(values).any(axis=1))
    filled = np.where(known[:, None], values, 0.0)
    low, high = np.nanquantile(filled, (0.25, 0.75), axis=1)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


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


def _layers_over_steps(values: xr.DataArray, steps: np.ndarray, colour: str) -> PaperFigure:
    layers: list[Any] = spread(list(values["layer"].values), PANELS) if "layer" in values.dims else [None]
    figure, axes = _panels(len(layers), margin=0.7)
    logarithmic = is_logarithmic(values.values)
    for layer, ax in zip(layers, axes.flat, strict=False):
        of_layer = (values if layer is None else values.sel(layer=layer)).transpose("run", ...)
        flat = of_layer.values.reshape(len(steps), -1)
        if flat.shape[1] > 1:
            ax.plot(steps, flat, color=colour, linewidth=0.5, alpha=0.5, gid=f"heads {layer}")
        ax.plot(steps, nanmean(flat, axis=1), "o-", color=colour, linewidth=1.4, markersize=2.5, gid=f"mean {layer}")
        if layer is not None:
            ax.set_title(f"layer {layer}")
        ax.grid(axis="y")
        if logarithmic:
            ax.set_yscale("log")
            plain_decades(ax.yaxis)
    name_columns(axes, "training step")
    _name_rows(figure, values)
    return figure


def _panels(count: int, margin: float) -> tuple[PaperFigure, np.ndarray]:
    """A figure of `count` panels that share their axes, `margin` inches higher than they; and all its places, row by row."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = paper_figure(PAGE_WIDTH if columns > 2 else 0.5 * PAGE_WIDTH * columns, margin + 1.35 * rows)
    axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat[count:]:
        ax.set_axis_off()
    return figure, axes


def _title(values: xr.DataArray) -> str:
    return unit_label(str(values.attrs.get("long_name", values.name)), values)


def _name_rows(figure: PaperFigure, values: xr.DataArray) -> None:
    figure.supylabel(str(values.attrs.get("units", "")).removesuffix("1") or axis_name(str(values.name)), fontsize=7)
