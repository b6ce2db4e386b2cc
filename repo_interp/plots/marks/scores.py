"""Scores of checkpoints side by side: by test set with their spread over seeds, as maps over depth and length, and beyond training.

    RePo fig. 1, 5, 7; CoPE fig. 3; HoPE fig. 5, table 1 and 3

    line  mean over seeds          band  smallest to largest seed          bar  standard error over prompts, where there is one seed

What is drawn is a dataset with

    score [checkpoint, test_set, seed]         NaN where a checkpoint has fewer seeds; attributes long_name and units
    standard_error [checkpoint, test_set]      over prompts; may be missing
    layout (checkpoint)                        as `format_layout` writes it: rope, repo@1, r2n1, ...
    test_set                                   numbers (lengths) are an axis, texts are places side by side
    attributes: axis (what test_set counts, "words"), training_length (a dotted line; may be missing)

A layout has the colour of its scheme; layouts that mix two have the colour of the more frequent one, dashed. A model that goes on with
position interpolation or YaRN is a checkpoint of its own, with the layout of the model. Knows nothing about how answers are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, scheme_name, style

_MIXED = {"r2n1": ("rope", "R2N1"), "n2r1": ("nope", "N2R1")}
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D")
_MAP = LinearSegmentedColormap.from_list("score", ["#FFFFFF", "#9DCBE6", "#0072B2", "#003A5C"])
DOUBLINGS = 4.0
"""Ratio of the longest to the shortest length from which a length axis doubles."""
LOG_FROM = 4.0
"""Ratio of the highest to the lowest perplexity from which its axis is logarithmic."""


def layout_colour(layout: str) -> str:
    """The colour of a layout: its scheme's; that of the more frequent scheme where two are mixed."""
    return scheme_colour(_MIXED.get(layout, (layout.split("@")[0], ""))[0])


def layout_name(layout: str) -> str:
    """A layout as papers write it: "repo@1" -> "RePo from layer 1", "repo@1/3" -> "RePo after 1/3", "r2n1" -> "R2N1"."""
    if layout in _MIXED:
        return _MIXED[layout][1]
    scheme, at, start = layout.partition("@")
    if not at:
        return scheme_name(scheme)
    return f"{scheme_name(scheme)} {'after' if '/' in start else 'from layer'} {start}"  # a share of the layers, or one of them


def looks(data: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Colour, dashes, marker and legend text of each checkpoint of `data`: one colour a scheme, dashes apart within a colour."""
    layouts = [str(layout) for layout in data["layout"].values]
    seen: dict[str, int] = {}
    found = {}
    for name, layout in zip(data["checkpoint"].values.astype(str), layouts, strict=True):
        colour = layout_colour(layout)
        place = seen.get(colour, 0)
        seen[colour] = place + 1
        found[name] = {
            "color": colour,
            "linestyle": _DASHES[place % len(_DASHES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "label": layout_name(layout) if layouts.count(layout) == 1 else name,
        }
    return found


def score_by_length(data: xr.Dataset, title: str = "") -> PaperFigure:
    """The scores of every checkpoint by test set, at page width for many checkpoints, else at column width."""
    with style():
        figure = paper_figure(COLUMN_WIDTH if data.sizes["checkpoint"] <= 4 else PAGE_WIDTH, 2.3)
        ax = figure.subplots()
        draw_scores(ax, data)
        ax.set_title(title or _seeds(data).capitalize())
        legend_below(figure, handles(data))
    return figure


def method_panels(data: xr.Dataset) -> PaperFigure:
    """Scores by test set with an axis `method` more: a panel a method, side by side."""
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.4)
        axes = figure.subplots(1, data.sizes["method"], sharey=True, squeeze=False)[0]
        for ax, method in zip(axes, data["method"].values, strict=True):
            of_method = data.sel({"method": method})
            draw_scores(ax, of_method)
            ax.set_title(f"{method}: {_seeds(of_method)}")
        for ax in axes[1:]:
            ax.set_ylabel("")
        legend_below(figure, handles(data))
    return figure


def handles(data: xr.Dataset) -> list[Line2D]:
    """Legend entries of the checkpoints of `data`."""
    return [Line2D([], [], markersize=3, **look) for look in looks(data).values()]


def draw_scores(ax: Axes, data: xr.Dataset) -> Axes:
    """Draw the scores of `data` on `ax` (see the module): lines over lengths, or dots over named test sets."""
    scores = data["score"].transpose("checkpoint", "test_set", "seed")
    errors = data["standard_error"].transpose("checkpoint", "test_set").values if "standard_error" in data else None
    sets = data["test_set"].values
    numeric = np.issubdtype(sets.dtype, np.number)
    places = sets.astype(float) if numeric else np.arange(len(sets), dtype=float)
    for row, (name, look) in enumerate(looks(data).items()):
        values = scores.values[row]
        seeds = np.isfinite(values).sum(axis=1)
        known = seeds > 0
        means = np.where(known, np.nansum(values, axis=1) / np.maximum(seeds, 1), np.nan)
        shift = 0.0 if numeric else 0.5 * ((row + 0.5) / len(scores) - 0.5)
        x = places + shift
        line = look if numeric else {**look, "linestyle": "none"}
        behind = min(3, len(scores) - 1 - row)  # a line that another one covers stays visible around it
        ax.plot(x, means, markersize=2.4 + behind, markeredgewidth=0, linewidth=0.9 + 0.5 * behind, **line, gid=f"score {name}")
        if seeds.max(initial=0) > 1:
            low, high = (np.array([edge(v[np.isfinite(v)], initial=start) for v in values]) for edge, start in _EDGES)
            low, high = np.where(known, low, np.nan), np.where(known, high, np.nan)
            if numeric:
                ax.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0, gid=f"seeds {name}")
            else:
                ax.vlines(x, low, high, color=look["color"], linewidth=1.0, gid=f"seeds {name}")
        elif errors is not None:
            ax.vlines(x, means - errors[row], means + errors[row], color=look["color"], linewidth=0.7, gid=f"error {name}")
    _axis(ax, sets, numeric, data)
    return ax


def score_maps(maps: xr.DataArray, training_length: int) -> PaperFigure:
    """`maps` [checkpoint, method, depth, length] in per cent as grids: a row of grids a method, a column a checkpoint (fig. 1, 5).

    The coordinate `layout (checkpoint)` names the columns. A dotted line stands behind the training length; NaN is left white.
    """
    maps = maps.transpose("method", "checkpoint", "depth", "length")
    methods, checkpoints, depths, lengths = maps.shape
    titles = [look["label"] for look in looks(maps.to_dataset(name="score")).values()]
    with style():
        width = min(PAGE_WIDTH, max(COLUMN_WIDTH, 0.55 + 0.36 * lengths * checkpoints))
        figure = paper_figure(width, 0.6 + methods * (0.35 + 0.125 * depths))
        axes: Any = figure.subplots(methods, checkpoints, sharex=True, sharey=True, squeeze=False)
        for row, column in np.ndindex(methods, checkpoints):
            ax = axes[row, column]
            draw_map(ax, maps.values[row, column])
            inside = int((maps["length"].values <= training_length).sum())
            if 0 < inside < lengths:
                ax.axvline(inside - 0.5, color="#E69F00", linewidth=1.0, linestyle=(0, (1, 1)), gid="training length")
            if not row:
                ax.set_title(titles[column].replace(" from", "\nfrom"))
            if row == methods - 1:
                ax.set_xticks(range(lengths), [f"{length:,}" for length in maps["length"].values])
            if not column:
                ax.set_yticks(range(depths)[::2], [f"{depth:g}" for depth in maps["depth"].values[::2]])
                ax.set_ylabel(f"{maps['method'].values[row]}\ndepth (%)")
        figure.supxlabel("length (tokens)", fontsize=7)
    return figure


def draw_map(ax: Axes, per_cent: np.ndarray) -> Axes:
    """Draw `per_cent` [row, column] on `ax`: a shade and a number a cell; nothing where it is NaN."""
    ax.imshow(per_cent, cmap=_MAP, vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    for row, column in np.argwhere(np.isfinite(per_cent)):
        value = per_cent[row, column]
        ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=4.8, color="white" if value > 60 else "#222222")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax


def perplexity_by_length(data: xr.Dataset, title: str) -> PaperFigure:
    """The perplexity of every checkpoint by length in tokens; a dotted line at the training length."""
    many = data.sizes["checkpoint"] > 4
    with style():
        figure = paper_figure(PAGE_WIDTH if many else COLUMN_WIDTH, 2.6)
        ax = figure.subplots()
        draw_perplexity(ax, data)
        finite = data["score"].values[np.isfinite(data["score"].values)]
        if finite.max() > LOG_FROM * finite.min():
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        ax.set_title(title)
        legend_below(figure, handles(data))
    return figure


def draw_perplexity(ax: Axes, data: xr.Dataset) -> Axes:
    """Draw a line a checkpoint on `ax`, over lengths that double, with a band over seeds. All have the same windows, whose perplexities
    differ far more than those of checkpoints, so that no error over windows is drawn.
    """
    lengths = data["test_set"].values.astype(float)
    for (name, look), values in zip(
        looks(data).items(), data["score"].transpose("checkpoint", "test_set", "seed").values, strict=True
    ):
        known = np.isfinite(values).any(axis=1)
        seeds = values[known]
        ax.plot(lengths[known], np.nanmean(seeds, axis=1), **look, markersize=3, markeredgewidth=0, gid=f"perplexity {name}")
        low, high = np.nanmin(seeds, axis=1), np.nanmax(seeds, axis=1)
        ax.fill_between(lengths[known], low, high, color=look["color"], alpha=0.15, linewidth=0, gid=f"seeds {name}")
    ax.axvline(data.attrs["training_length"], color="#222222", linewidth=0.6, linestyle=(0, (1, 1.5)), gid="training length")
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    ax.minorticks_off()
    ax.set(xlabel="length (tokens)", ylabel="perplexity")
    ax.grid(axis="y")
    return ax


def copying_by_sequences(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Exact match by the number of sequences in the context, a panel a dataset by its title; a dotted line where training ends."""
    with style():
        figure = paper_figure(PAGE_WIDTH if len(panels) > 1 else COLUMN_WIDTH, 2.5)
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        entries: dict[str, Line2D] = {}
        for ax, (title, data) in zip(axes, panels.items(), strict=True):
            draw_scores(ax, data)
            ax.set(title=title, xlabel="sequences in the context", ylabel="exact match" if ax is axes[0] else "")
            sets = data["test_set"].values
            ax.set_xscale("linear")
            ax.set_xticks(sets, [str(count) for count in sets])
            for entry in handles(data):
                entries.setdefault(str(entry.get_label()), entry)
        legend_below(figure, list(entries.values()))
    return figure


_EDGES: tuple[tuple[Any, float], ...] = ((np.min, np.inf), (np.max, -np.inf))


def _axis(ax: Axes, sets: np.ndarray, numeric: bool, data: xr.Dataset) -> None:
    score = data["score"]
    ax.set_ylabel(unit_label(str(score.attrs.get("long_name", "score")), score))
    if str(score.attrs.get("units", "1")) == "1" and float(np.nan_to_num(score.values).max(initial=0)) <= 1:
        ax.set_ylim(-0.03, 1.03)
    ax.grid(axis="y")
    if not numeric:
        ax.set_xticks(range(len(sets)), [str(name) for name in sets])
        ax.set_xlim(-0.6, len(sets) - 0.4)
        return
    ax.set_xlabel(f"length ({data.attrs.get('axis', 'tokens')})")
    if len(sets) <= 6 and sets.max() >= DOUBLINGS * sets.min() > 0:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sets, [f"{value:,}" for value in sets])
        ax.minorticks_off()
    if "training_length" in data.attrs:
        ax.axvline(
            float(data.attrs["training_length"]), color="#222222", linewidth=0.6, linestyle=(0, (1, 1.5)), gid="training length"
        )


def _seeds(data: xr.Dataset) -> str:
    counts = np.isfinite(data["score"].transpose("checkpoint", "test_set", "seed").values).any(axis=1).sum(axis=1)
    low, high = int(counts.min()), int(counts.max())
    if high == 1:
        return "one seed; bar: standard error"
    number = str(low) if low == high else f"{low} to {high}"
    return f"mean of {number} seeds; band: all"
