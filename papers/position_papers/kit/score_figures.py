"""Scores of checkpoints side by side: by test set with their spread over seeds.

    RePo fig. 1, 5, 7; CoPE fig. 3 and table 8; HoPE fig. 5, table 1 and 3

    line  mean over seeds     thin bar with dots  the seeds, smallest to largest     bar  standard error over prompts, of a single seed

Over lengths, every checkpoint is drawn a little to the right of the one before, so that equal
scores do not cover each other.

The figures draw a dataset with

    score [checkpoint, test_set, seed]         NaN where a checkpoint has fewer seeds; attributes long_name and units
    standard_error [checkpoint, test_set]      over prompts; may be missing
    layout (checkpoint)                        as `format_layout` writes it: rope, repo@1, r2n1, ...
    test_set                                   numbers (lengths) are an axis, texts are places side by side
    attributes: axis (what test_set counts, "words"), training_length (a dotted line; may be
    missing)

A model with position interpolation or YaRN is a separate checkpoint, with the layout of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import offset_copy

from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.axis_scales import double_axis, training_line
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

LOG_FROM = 4.0
"""Least ratio of the highest to the lowest perplexity for a logarithmic axis."""
DOUBLINGS = 4.0
"""Least ratio of the longest to the shortest length for a length axis in doublings."""
BESIDE, FEW_BESIDE, FEW = 1.0, 4.0, 4
"""Distance in points between marks of neighboring checkpoints; its maximum for few lengths; and the
largest number of lengths that counts as few.
"""
CLOSEST = 60.0
"""Points that all marks of a panel may take side by side, so that those of neighbouring lengths
stay apart.
"""
DASHED = 2.6
"""Letters' widths of a legend's lines, long enough for dashes."""
MARK: Mapping[str, Any] = {"markersize": 3, "markeredgewidth": 0}
SEED_DOTS: Mapping[str, Any] = {"markersize": 1.4, "markeredgewidth": 0}


def score_by_length(data: xr.Dataset, title: str = "") -> PaperFigure:
    """Draw the scores of every checkpoint by test set in one panel; see `score_panels`."""
    return score_panels({title or _seeds(data).capitalize(): data})


def method_panels(data: xr.Dataset) -> PaperFigure:
    """Draw scores by test set and method: one panel per method, side by side."""
    methods = {method: data.sel({"method": method}) for method in data["method"].values}
    return score_panels({f"{name}: {_seeds(each)}": each for name, each in methods.items()})


@style()
def score_panels(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Draw scores by test set, one panel per dataset with its title, at page width for several
    panels or many checkpoints.

    Panels with the same checkpoints share a legend, others have separate ones. Perplexities with a
    large range have a logarithmic axis. If datasets have `difference` and `difference_error`
    [checkpoint, test_set], the score minus that of `difference.attrs["from"]`, these are drawn
    below with two standard errors. They distinguish checkpoints, since windows differ more than
    models.
    """
    every = list(panels.values())
    differ = all("difference" in data for data in every)
    wide = len(every) > 1 or every[0].sizes["checkpoint"] > 4
    figure = paper_figure(PAGE_WIDTH if wide else COLUMN_WIDTH, 2.4 + 1.9 * differ)
    grid: Any = figure.subplots(1 + differ, len(every), sharex=True, sharey="row", squeeze=False)
    alike = len({tuple(data["checkpoint"].values) for data in every}) == 1
    for above, *below, (title, data) in zip(*grid, panels.items(), strict=True):
        draw_scores(above, data.drop_vars("standard_error") if differ else data).set_title(title)
        for ax in below:
            _draw_differences(ax, data)
            above.set_xlabel("")
        if not alike:
            legend_under([above, *below][-1], data)
    for row in grid:
        for ax in row[1:]:
            ax.set_ylabel("")
    values = np.concatenate([data["score"].values.ravel() for data in every])
    if 1 < np.nanmax(values) > LOG_FROM * np.nanmin(values) > 0:
        for ax in grid[0]:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    if alike:
        legend_below(figure, handles(every[0]), DASHED)
    return figure


def _draw_differences(ax: Axes, data: xr.Dataset) -> None:
    margin = data["difference"]
    drawn = data.drop_vars("seed", errors="ignore").drop_dims("seed")
    table = {
        "score": margin.expand_dims("seed", -1),
        "standard_error": 2 * data["difference_error"],
    }
    draw_scores(ax, drawn.assign(table)).axhline(0, color="#333333", linewidth=0.6)
    ax.set_ylabel(f"log perplexity above\n{margin.attrs['from']} (nat per token)")


def handles(data: xr.Dataset) -> list[Line2D]:
    """Return the legend entries of the checkpoints of `data`."""
    return [Line2D([], [], **MARK, **look) for look in _marks(data).values()]


def _marks(data: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Return the style of each checkpoint; only scores at several lengths are connected by a line."""
    sets = data["test_set"]
    lined = sets.size > 1 and np.issubdtype(sets.dtype, np.number)
    return {
        name: dict(look) if lined else {**look, "linestyle": "none"}
        for name, look in looks(data).items()
    }


def draw_scores(ax: Axes, data: xr.Dataset) -> Axes:
    """Draw the scores of `data` on `ax` (see the module): lines over lengths, or dots over named
    test sets.
    """
    scores = data["score"].transpose("checkpoint", "test_set", "seed")
    errors = (
        data["standard_error"].transpose("checkpoint", "test_set").values
        if "standard_error" in data
        else None
    )
    sets = data["test_set"].values
    numeric = np.issubdtype(sets.dtype, np.number)
    places = sets.astype(float) if numeric else np.arange(len(sets), dtype=float)
    for row, (name, look) in enumerate(_marks(data).items()):
        values = scores.values[row]
        x = places + (0.0 if numeric else 0.5 * ((row + 0.5) / len(scores) - 0.5))
        means = nanmean(values, axis=1)
        marks: list[Artist] = [*ax.plot(x, means, **MARK, **look, gid=f"score {name}")]
        if np.isfinite(values).sum(axis=1).max(initial=0) > 1:
            marks += draw_seeds(ax, x, values, look["color"], name)
        elif errors is not None:
            marks.append(draw_errors(ax, x, means, errors[row], look["color"], name))
        if numeric:
            points = min(
                FEW_BESIDE if len(sets) <= FEW else BESIDE,
                CLOSEST / (len(sets) * len(scores)),
            )
            move_aside(ax, marks, row, len(scores), points)
    if numeric:
        ax.margins(x=0.11 if len(sets) <= FEW else 0.08)  # space for moved marks
    _axis(ax, sets, numeric, data)
    return ax


def legend_under(ax: Axes, data: xr.Dataset) -> None:
    """Draw the legend of the checkpoints of `data` below `ax`, with lines long enough for their
    dashes, in as many columns as fit.
    """
    grid, figure = ax.get_gridspec(), ax.get_figure(root=True)
    assert figure is not None
    width = figure.bbox.width / (1 if grid is None else grid.ncols)
    entries: Any = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, -0.25),
        "handlelength": DASHED,
        "borderaxespad": 0.0,
    }
    for count in range(3, 0, -1):
        legend = ax.legend(handles=handles(data), ncols=count, **entries)
        if legend.get_window_extent().width <= width:
            return


def move_aside(
    ax: Axes, marks: Sequence[Artist], row: int, rows: int, points: float = BESIDE
) -> None:
    """Move the marks of checkpoint `row` of `rows` sideways on `ax`, by `points` between neighbors,
    in the figure and not in the data.
    """
    aside = offset_copy(
        ax.transData, ax.get_figure(root=True), points * (row - (rows - 1) / 2), 0.0, units="points"
    )
    for mark in marks:
        mark.set_transform(aside)


def draw_seeds(ax: Axes, x: np.ndarray, values: np.ndarray, colour: str, name: str) -> list[Artist]:
    """Draw a thin bar from the smallest to the largest seed for each test set of `values`
    [test_set, seed], and a dot per seed.
    """
    several = np.isfinite(values).sum(axis=1) > 1
    low, high = np.nanmin(values[several], axis=1), np.nanmax(values[several], axis=1)
    bars = ax.vlines(x[several], low, high, color=colour, linewidth=0.5, gid=f"seeds {name}")
    dots = np.broadcast_to(x[:, None], values.shape)[several].ravel(), values[several].ravel()
    return [bars, *ax.plot(*dots, "o", color=colour, **SEED_DOTS, gid=f"seed dots {name}")]


def draw_errors(
    ax: Axes, x: np.ndarray, middle: np.ndarray, error: np.ndarray, colour: str, name: str
) -> Artist:
    """Draw a thin bar from `middle` - `error` to `middle` + `error` at each of `x`."""
    return ax.vlines(
        x, middle - error, middle + error, color=colour, linewidth=0.7, gid=f"error {name}"
    )


def _axis(ax: Axes, sets: np.ndarray, numeric: bool, data: xr.Dataset) -> None:
    score = data["score"]
    ax.set_ylabel(unit_label(str(score.attrs.get("long_name", "score")), score))
    if (
        str(score.attrs.get("units", "1")) == "1"
        and float(np.nan_to_num(score.values).max(initial=0)) <= 1
    ):
        ax.set_ylim(-0.03, 1.03)
    ax.grid(axis="y")
    if not numeric:
        ax.set_xticks(range(len(sets)), [str(name) for name in sets])
        ax.set_xlim(-0.6, len(sets) - 0.4)
        return
    ax.set_xlabel(f"length ({data.attrs.get('axis', 'tokens')})")
    if len(sets) <= 6 and sets.max() >= DOUBLINGS * sets.min() > 0:
        double_axis(ax, sets)
    elif len(sets) == 1:
        ax.set_xticks(sets, [f"{sets[0]:,}"])
    if "training_length" in data.attrs:
        training_line(ax, data.attrs["training_length"])


def _seeds(data: xr.Dataset) -> str:
    counts = (
        np.isfinite(data["score"].transpose("checkpoint", "test_set", "seed").values)
        .any(axis=1)
        .sum(axis=1)
    )
    low, high = int(counts.min()), int(counts.max())
    if high == 1:
        return "one seed; bar: standard error"
    number = str(low) if low == high else f"{low} to {high}"
    return f"mean of {number} seeds; small dots: each"
