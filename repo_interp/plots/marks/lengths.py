"""Scores within and beyond the training length (CoPE fig. 3; HoPE fig. 5, table 1 and 3): perplexity, and copying, by length.

What is drawn are datasets as `plots.scores` describes them, with numbers as test sets. A model that goes on with position
interpolation or YaRN is a checkpoint of its own in them, with the layout of the model. Knows nothing about how answers are scored.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.scores import draw_scores, handles, looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

_LOG_FROM = 4.0
"""Ratio of the highest to the lowest perplexity from which its axis is logarithmic."""


def perplexity_by_length(data: xr.Dataset, title: str) -> PaperFigure:
    """The perplexity of every checkpoint by length in tokens; a dotted line at the training length."""
    many = data.sizes["checkpoint"] > 4
    with style():
        figure = paper_figure(PAGE_WIDTH if many else COLUMN_WIDTH, 2.6)
        ax = figure.subplots()
        draw_perplexity(ax, data)
        finite = data["score"].values[np.isfinite(data["score"].values)]
        if finite.max() > _LOG_FROM * finite.min():
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
