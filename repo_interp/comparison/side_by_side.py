"""One variable of several runs in one figure: the ways in which arrays are drawn side by side.

    heads_beside   [run, layer, head]           a map a run, one colour scale, and a map a difference to the first run
    curves         [run, layer, head, axis]     runs laid over each other, a panel a layer; band: middle half of heads
    categories     [run, layer, head, names]    a dot a run and name: the mean; line: middle half of heads
    blocks_beside  [run, row, column]           a map a run, one colour scale, and a map a difference

Steps of a training are drawn in `comparison_steps`. Arrays are means over prompts already. Knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.lines import Line2D

from repo_interp.comparison.looks import Runs, spread
from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.drawing import legend_below, plain_decades, scheme_swatches, sparse_ticks
from repo_interp.plots.marks.reading import ordered_spans, unit_label
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

BESIDE = 5
"""Maps side by side; of more runs the first, the last and some between are drawn."""
PANELS = 8
"""Panels of layers; of more layers the first, the last and some between are drawn."""
COLUMNS = 4
CATEGORIES = 16
LOG_ABOVE, LOG_BELOW = 50.0, 1e5
"""Ratios of the largest to the smallest value, all positive, between which a scale is logarithmic."""
FEW, CLIPPED = 1024, 99.5
"""Values from which a colour scale of both signs ends at this percentile of their sizes."""
_EMPTY = "#D9D9D9"
LINE = 0.8


def heads_beside(values: xr.DataArray, runs: Runs) -> PaperFigure:
    """`values` [run, layer, head] as maps with one colour scale, and the differences of the others to the first run with another."""
    values = values.transpose("run", "layer", "head")
    shown = values.sel(run=spread(list(values["run"].values), BESIDE))
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
        name_figure(
            figure, unit_label(str(values.attrs.get("long_name", values.name)), values), f"{layers} layers of {heads} heads"
        )
    return figure


def blocks_beside(values: xr.DataArray, runs: Runs, said: str) -> PaperFigure:
    """`values` [run, row, column] as maps with one colour scale, and the differences to the first run. `said`: what is shown."""
    row, column = values.dims[-2:]
    shown = values.transpose("run", row, column).sel(run=spread(list(values["run"].values), BESIDE))
    with style():
        figure, maps = _beside(shown, runs, height=1.75)
        for ax, _ in maps:
            ax.set(xlabel=axis_name(column), ylabel=axis_name(row))
            ax.locator_params(nbins=4, integer=True)
        name_figure(figure, unit_label(str(values.attrs.get("long_name", values.name)), values), said)
    return figure


def curves(values: xr.DataArray, runs: Runs, x: str, panel: str | None) -> PaperFigure:
    """`values` [run, x] - with an axis `panel`, and heads or layers over which the mean is drawn and a band of the middle half."""
    labels: list[Any] = [None] if panel is None else spread(list(values[panel].values), PANELS)
    columns = min(COLUMNS, len(labels))
    rows = -(-len(labels) // columns)
    places = values[x].values.astype(float)
    logarithmic = 3 <= len(places) <= 10 and places.min() > 0 and places.max() / places.min() >= 8
    with style():
        figure = paper_figure(PAGE_WIDTH if columns > 2 else 0.5 * PAGE_WIDTH * columns, 0.75 + 1.35 * rows)
        axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for place, ax in enumerate(axes.ravel()):
            if place >= len(labels):
                ax.set_axis_off()
                continue
            of_panel = values if panel is None else values.sel({panel: labels[place]})
            for name in runs_having(values):
                one = of_panel.sel(run=name).transpose(x, ...)
                _curve(ax, places, one.values.reshape(len(places), -1), dict(runs.looks[name]), str(name))
            if panel is not None:
                ax.set_title(f"{axis_name(panel)} {labels[place]}")
            ax.grid(axis="y")
            ax.locator_params(axis="y", nbins=5)
            if logarithmic:
                ax.set_xscale("log")
                ax.set_xticks(places, [f"{value:g}" for value in places])
                ax.minorticks_off()
        name_columns(axes, unit_label(axis_name(x), values[x]))
        figure.supylabel(str(values.attrs.get("units", "")).removesuffix("1") or axis_name(str(values.name)), fontsize=7)
        shown = spread_over(values, x, panel)
        many = panel is not None and values.sizes[panel] > PANELS
        name_figure(
            figure,
            unit_label(str(values.attrs.get("long_name", values.name)), values),
            shown + (f"; {len(labels)} of {values.sizes[panel]} {axis_name(panel)}s" if panel and many else ""),
        )
        legend_below(figure, runs.handles(runs_having(values)))
    return figure


def categories(values: xr.DataArray, runs: Runs, axis: str) -> PaperFigure:
    """`values` [run, axis] with names on `axis`: a dot a run and name, the mean over all else; a line: the middle half of heads."""
    names = names_along(values, axis)
    values = values.sel({axis: names}).transpose("run", axis, ...)
    having = runs_having(values)
    flat = values.sel(run=having).values.reshape(len(having), len(names), -1)
    with style():
        figure = paper_figure(0.62 * PAGE_WIDTH, 0.95 + max(0.2, 0.09 * len(having)) * len(names))
        ax = figure.subplots()
        for row, name in enumerate(having):
            look = runs.looks[name]
            y = np.arange(len(names)) + 0.7 * ((row + 0.5) / len(having) - 0.5)
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
        name_figure(figure, str(values.attrs.get("long_name", values.name)), spread_over(values, axis, None))
        legend_below(figure, [Line2D([], [], markersize=3.6, **{**runs.looks[name], "linestyle": "none"}) for name in having])
    return figure


def _beside(shown: xr.DataArray, runs: Runs, height: float) -> tuple[PaperFigure, list[tuple[Axes, str]]]:
    """Maps of all runs and of the differences: in one row for two runs, else differences below. Returns the maps with their run."""
    names = [str(name) for name in shown["run"].values]
    data = shown.values.astype(float)
    having = [place for place, one in enumerate(data) if np.isfinite(one).any()]
    base, compared = having[0], having[1:]
    logarithmic = is_logarithmic(data)
    with np.errstate(divide="ignore", invalid="ignore"):
        differences = np.log10(data / data[base]) if logarithmic else data - data[base]
    one_row = len(names) == 2
    rows = 1 if one_row or not compared else 2
    figure = paper_figure(PAGE_WIDTH, rows * height + 0.3)
    axes: Any = figure.subplots(rows, 3 if one_row else len(names), squeeze=False)
    shared = dict(zip(("cmap", "norm"), _scale(data, logarithmic), strict=True))
    maps = [(axes[0, place], place, "") for place in range(len(names))]
    below = [(axes[0, 2] if one_row else axes[1, place], place, "difference") for place in compared]
    images = [_map(ax, data[place], f"map {names[place]}", **shared) for ax, place, _ in maps]
    for ax, place, _ in maps:
        ax.set_title(runs.title(names[place]))
    _bar(figure, images[0], [ax for ax, *_ in maps], str(shown.attrs.get("units", "")).removesuffix("1"), data)
    told = differences[compared]
    reach = _reach(told[np.isfinite(told)])
    for ax, place, _ in below:
        image = _map(ax, differences[place], f"difference {names[place]}", cmap="PuOr", norm=TwoSlopeNorm(0, -reach, reach))
        ax.set_title(f"{runs.title(names[place])} {'/' if logarithmic else '−'} {runs.title(names[base])}")
        images.append(image)
    if below:
        _bar(figure, images[-1], [ax for ax, *_ in below], "log₁₀ of the ratio" if logarithmic else "difference", told)
    drawn = {id(ax) for ax, *_ in (*maps, *below)}
    for ax in axes.ravel():
        if id(ax) not in drawn:
            ax.set_axis_off()
    return figure, [(ax, names[place]) for ax, place, _ in (*maps, *below)]


def _swatches(ax: Axes, kinds: xr.DataArray) -> None:
    """The colour of every layer's scheme beside it; nothing beside a layer that the run has not."""
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


def is_logarithmic(data: np.ndarray) -> bool:
    """Whether values, all positive, spread so far that a scale of them is logarithmic."""
    finite = data[np.isfinite(data)]
    return bool(finite.size and finite.min() > 0 and LOG_ABOVE < finite.max() / finite.min() < LOG_BELOW)


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


def name_columns(axes: np.ndarray, label: str) -> None:
    """Write `label` below the lowest panel of every column of `axes`, under which there may be places without a panel."""
    for column in axes.T:
        lowest = [ax for ax in column if ax.axison][-1]
        lowest.set_xlabel(label)
        lowest.tick_params(labelbottom=True)


def runs_having(values: xr.DataArray) -> list[str]:
    """The runs that have any value."""
    found = values.transpose("run", ...).values
    return [str(name) for name, one in zip(values["run"].values, found, strict=True) if np.isfinite(one).any()]


def names_along(values: xr.DataArray, axis: str) -> list[str]:
    """The names on `axis` that have any value, in reading order, as many as can be told apart."""
    names = [str(name) for name in values[axis].values if np.isfinite(values.sel({axis: name}).values).any()]
    if axis == "span":
        names = ordered_spans(names)
        names = [name for name in names if "." not in name] if len(names) > CATEGORIES else names
    return names[:CATEGORIES]


def spread_over(values: xr.DataArray, axis: str, panel: Hashable | None, said: str = "mean and middle half over") -> str:
    """What a line and its band stand for: "mean and middle half over 4 layers and 4 heads"."""
    rest = [
        f"{values.sizes[dim]} {axis_name(dim)}s" for dim in ("layer", "head") if dim in values.dims and dim not in (axis, panel)
    ]
    return f"{said} {' of '.join(rest)}" if rest else ""


def axis_name(axis: Hashable) -> str:
    """An axis as a label says it."""
    return str(axis).replace("_", " ")


def name_figure(figure: PaperFigure, title: str, said: str) -> None:
    """Write `title`, and below it `said`, above `figure`."""
    text = title[:1].upper() + title[1:]
    figure.suptitle(f"{text}\n{said}" if said else text, x=0.01, ha="left", fontsize=7.5)
