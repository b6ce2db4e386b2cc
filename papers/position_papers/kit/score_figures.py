"""Scores of checkpoints side by side: by test set with their spread over seeds.

    RePo fig. 1, 5, 7; CoPE fig. 3; HoPE table 1 and 3

    line  mean over seeds     thin bar with dots  the seeds, smallest to largest     bar  standard error over prompts, of a single seed

Over lengths, every checkpoint is drawn a little to the right of the one before, so that equal
scores do not cover each other.

What is drawn is a dataset with

    score [checkpoint, test_set, seed]         NaN where a checkpoint has fewer seeds; attributes long_name and units
    standard_error [checkpoint, test_set]      over prompts; may be missing
    layout (checkpoint)                        as `format_layout` writes it: rope, repo@1, r2n1, ...
    test_set                                   numbers (lengths) are an axis, texts are places side by side
    attributes: axis (what test_set counts, "words"), training_length (a dotted line; may be
    missing)

A model that goes on with position interpolation or YaRN is a checkpoint of its own, with the layout
of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.drawing import double_axis, legend_below, training_line
from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

DOUBLINGS = 4.0
"""Ratio of the longest to the shortest length from which a length axis doubles."""
BESIDE, FEW_BESIDE, FEW = 1.0, 4.0, 4
"""Points between the marks of neighbouring checkpoints over lengths; the same, at most, where
lengths are few; how many those are.
"""
CLOSEST = 60.0
"""Points that all marks of a panel may take side by side, so that those of neighbouring lengths
stay apart.
"""
DASHED = 2.6
"""Letters' widths of a legend's lines, long enough for dashes."""
MARK: Mapping[str, Any] = {"markersize": 3, "markeredgewidth": 0}
SEED_DOTS: Mapping[str, Any] = {"markersize": 1.4, "markeredgewidth": 0}


@style()
def score_by_length(data: xr.Dataset, title: str = "") -> PaperFigure:
    """The scores of every checkpoint by test set, at page width for many checkpoints, else at
    column width.
    """
    figure = paper_figure(COLUMN_WIDTH if data.sizes["checkpoint"] <= 4 else PAGE_WIDTH, 2.3)
    ax = figure.subplots()
    draw_scores(ax, data)
    ax.set_title(title or _seeds(data).capitalize())
    legend_below(figure, handles(data), DASHED)
    return figure


@style()
def method_panels(data: xr.Dataset) -> PaperFigure:
    """Scores by test set with an axis `method` more: one panel per method, side by side."""
    figure = paper_figure(PAGE_WIDTH if data.sizes["method"] > 1 else COLUMN_WIDTH, 2.4)
    axes = figure.subplots(1, data.sizes["method"], sharey=True, squeeze=False)[0]
    for ax, method in zip(axes, data["method"].values, strict=True):
        of_method = data.sel({"method": method})
        draw_scores(ax, of_method)
        ax.set_title(f"{method}: {_seeds(of_method)}")
    for ax in axes[1:]:
        ax.set_ylabel("")
    legend_below(figure, handles(data), DASHED)
    return figure


def handles(data: xr.Dataset) -> list[Line2D]:
    """Legend entries of the checkpoints of `data`."""
    return [Line2D([], [], **MARK, **look) for look in looks(data).values()]


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
    for row, (name, look) in enumerate(looks(data).items()):
        values = scores.values[row]
        x = places + (0.0 if numeric else 0.5 * ((row + 0.5) / len(scores) - 0.5))
        line, means = look if numeric else {**look, "linestyle": "none"}, nanmean(values, axis=1)
        marks: list[Artist] = [*ax.plot(x, means, **MARK, **line, gid=f"score {name}")]
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
        ax.margins(x=0.11 if len(sets) <= FEW else 0.08)  # room for what was moved
    _axis(ax, sets, numeric, data)
    return ax


def legend_under(ax: Axes, data: xr.Dataset, columns: int = 2, down: float = -0.22) -> None:
    """The legend of the checkpoints of `data` below `ax`, with lines long enough for their dashes:
    in `columns`, or as many as fit into its part of the figure.
    """
    grid, figure = ax.get_gridspec(), ax.get_figure(root=True)
    assert figure is not None
    width = figure.bbox.width / (1 if grid is None else grid.ncols)
    entries: Any = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, down),
        "handlelength": DASHED,
        "borderaxespad": 0.0,
    }
    for count in range(columns, 0, -1):
        legend = ax.legend(handles=handles(data), ncols=count, **entries)
        if legend.get_window_extent().width <= width:
            return


def move_aside(
    ax: Axes, marks: Sequence[Artist], row: int, rows: int, points: float = BESIDE
) -> None:
    """Move the marks of checkpoint `row` of `rows` sideways on `ax`, `points` from one to the next:
    on paper, not in the data.
    """
    aside = offset_copy(
        ax.transData, ax.get_figure(root=True), points * (row - (rows - 1) / 2), 0.0, units="points"
    )
    for mark in marks:
        mark.set_transform(aside)


def draw_seeds(ax: Axes, x: np.ndarray, values: np.ndarray, colour: str, name: str) -> list[Artist]:
    """A thin bar from the smallest to the largest seed of each test set of `values` [test_set,
    seed], and a dot per seed.
    """
    several = np.isfinite(values).sum(axis=1) > 1
    low, high = np.nanmin(values[several], axis=1), np.nanmax(values[several], axis=1)
    bars = ax.vlines(x[several], low, high, color=colour, linewidth=0.5, gid=f"seeds {name}")
    dots = np.broadcast_to(x[:, None], values.shape)[several].ravel(), values[several].ravel()
    return [bars, *ax.plot(*dots, "o", color=colour, **SEED_DOTS, gid=f"seed dots {name}")]


def draw_errors(
    ax: Axes, x: np.ndarray, middle: np.ndarray, error: np.ndarray, colour: str, name: str
) -> Artist:
    """A thin bar from `middle` - `error` to `middle` + `error` at each of `x`."""
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
