"""Perplexity of checkpoints by length, and how far each is above one of them (HoPE fig. 5, CoPE
table 8).

What is drawn is a dataset as of `scores`: `score` is a perplexity, `test_set` a length in tokens,
and `training_length` is there. All checkpoints have the same windows, whose perplexities differ far
more than those of checkpoints: the errors over windows that tell checkpoints apart are those of
their differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from position_papers.kit.score_figures import (
    MARK,
    draw_errors,
    draw_seeds,
    legend_under,
    move_aside,
)
from repo_interp.plots.marks.drawing import length_axis
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

LOG_FROM = 4.0
"""Ratio of the highest to the lowest perplexity from which its axis is logarithmic."""


def perplexity_by_length(data: xr.Dataset, title: str) -> PaperFigure:
    """The perplexity of every checkpoint by length in tokens; a dotted line at the training length.

    See `perplexity_panels`.
    """
    return perplexity_panels({title: data})


@style()
def perplexity_panels(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Perplexity by length, one panel per dataset by its title, each with its own legend; where
    datasets hold `difference` and `difference_error` [checkpoint, test_set] (log perplexity above
    that of `difference.attrs["from"]`, in nats per token, and its standard error over the same
    windows), below each panel what they are.
    """
    differ = all("difference" in data for data in panels.values())
    many = len(panels) > 1 or max(data.sizes["checkpoint"] for data in panels.values()) > 4
    figure = paper_figure(PAGE_WIDTH if many else COLUMN_WIDTH, 2.6 + 1.9 * differ)
    grid: Any = figure.subplots(1 + differ, len(panels), sharex=True, sharey="row", squeeze=False)
    lowest, highest = np.inf, -np.inf
    for column, (title, data) in enumerate(panels.items()):
        ax = grid[0, column]
        draw_perplexity(ax, data)
        ax.set_title(title)
        if differ:
            _draw_differences(grid[1, column], data)
            ax.set_xlabel("")
        legend_under(grid[-1, column], data, 3 if len(panels) > 1 else 6 if many else 2, -0.28)
        finite = data["score"].values[np.isfinite(data["score"].values)]
        lowest, highest = min(lowest, finite.min()), max(highest, finite.max())
    for row in grid:
        for ax in row[1:]:
            ax.set_ylabel("")
    if highest > LOG_FROM * lowest:
        for ax in grid[0]:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    return figure


def draw_perplexity(ax: Axes, data: xr.Dataset) -> Axes:
    """Draw one line per checkpoint on `ax`, over lengths that double, with a dot per seed where
    there are several. All have the same windows, whose perplexities differ far more than those of
    checkpoints: the errors over windows that tell checkpoints apart are those of their differences.
    """
    rows = data["score"].transpose("checkpoint", "test_set", "seed").values
    lengths = data["test_set"].values.astype(float)
    for row, (name, look) in enumerate(looks(data).items()):
        known = np.isfinite(rows[row]).any(axis=1)
        x, seeds = lengths[known], rows[row][known]
        marks: list[Artist] = [
            *ax.plot(x, np.nanmean(seeds, axis=1), **look, **MARK, gid=f"perplexity {name}")
        ]
        if seeds.shape[1] > 1:
            marks += draw_seeds(ax, x, seeds, look["color"], name)
        move_aside(ax, marks, row, len(rows))
    length_axis(ax, lengths, data.attrs["training_length"], "length (tokens)")
    ax.margins(x=0.08)
    ax.set_ylabel("perplexity")
    return ax


def _draw_differences(ax: Axes, data: xr.Dataset) -> None:
    """Draw log perplexity above that of one checkpoint, with two standard errors over the windows
    that both have.
    """
    lengths = data["test_set"].values.astype(float)
    margins = data["difference"].transpose("checkpoint", "test_set").values
    errors = data["difference_error"].transpose("checkpoint", "test_set").values
    for row, (name, look) in enumerate(looks(data).items()):
        marks: list[Artist] = [
            *ax.plot(lengths, margins[row], **look, **MARK, gid=f"difference {name}")
        ]
        marks.append(draw_errors(ax, lengths, margins[row], 2 * errors[row], look["color"], name))
        move_aside(ax, marks, row, len(margins))
    ax.axhline(0, color="#333333", linewidth=0.6)
    length_axis(ax, lengths, data.attrs["training_length"], "length (tokens)")
    ax.margins(x=0.08)
    ax.set_ylabel(f"log perplexity above\n{data['difference'].attrs['from']} (nat per token)")
