"""Errors of position schemes by test set (CoPE table 2, 3, 4): a bar a scheme, a dot a seed, the mean above it.

What is drawn is a dataset as `plots.scores` describes it, whose `score` is an error in per cent. One panel a dataset: the tasks, or
the sizes of one. Knows nothing about how answers are scored.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

_HATCHES = ("", "////", "....", "xxxx")
_GROUP = 0.84
"""Width of the bars of one test set; test sets are 1 apart."""
_PAGE_FROM = 12
"""Bars from which a figure is as wide as a page."""


def error_bars(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Bars of every dataset of `panels`, by its title, in rows of their own. Whiskers: standard error over prompts, for a single seed."""
    bars = max(data.sizes["checkpoint"] * data.sizes["test_set"] for data in panels.values())
    with style():
        figure = paper_figure(PAGE_WIDTH if bars >= _PAGE_FROM else COLUMN_WIDTH, 0.45 + 1.55 * len(panels))
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        entries: dict[str, Patch] = {}
        for ax, (title, data) in zip(axes, panels.items(), strict=True):
            for patch in draw_errors(ax, data):
                entries.setdefault(str(patch.get_label()), patch)
            ax.set_title(title)
        legend_below(figure, list(entries.values()))
    return figure


def draw_errors(ax: Axes, data: xr.Dataset) -> list[Patch]:
    """Draw the bars of one dataset on `ax` and return the legend entries of its checkpoints."""
    values = data["score"].transpose("checkpoint", "test_set", "seed").values
    errors = data["standard_error"].transpose("checkpoint", "test_set").values
    width = _GROUP / len(values)
    tips = np.nan_to_num(values) + np.nan_to_num(errors)[..., None]
    top = max(1.14 * float(tips.max(initial=0)), 1.0)
    entries, seen = [], dict[str, int]()
    for row, (name, look) in enumerate(looks(data).items()):
        hatch = _HATCHES[seen.setdefault(look["color"], 0) % len(_HATCHES)]
        seen[look["color"]] += 1
        bar = {"facecolor": look["color"], "hatch": hatch, "edgecolor": "white" if hatch else look["color"], "linewidth": 0.4}
        entries.append(Patch(**bar, label=look["label"]))
        for column, seeds in enumerate(values[row]):
            seeds = seeds[np.isfinite(seeds)]
            x = column - _GROUP / 2 + (row + 0.5) * width
            if not seeds.size:
                ax.text(x, 0, "n/a", ha="center", va="bottom", fontsize=4.6, color="#5A5A5A", rotation=90, gid=f"absent {name}")
                continue
            mean, error = float(seeds.mean()), float(np.nan_to_num(errors[row, column]))
            ax.bar(x, mean, 0.9 * width, **bar, gid=f"error {name} {data['test_set'].values[column]}")
            highest = float(seeds.max())
            if seeds.size > 1:
                spots = x + width * np.linspace(-0.22, 0.22, seeds.size)
                ax.plot(
                    spots,
                    seeds,
                    "o",
                    markersize=2.2,
                    color="#222222",
                    markeredgecolor="white",
                    markeredgewidth=0.4,
                    clip_on=False,
                )
            elif error > 0:
                ax.vlines(x, max(0.0, mean - error), mean + error, color="#222222", linewidth=0.7)
                highest = mean + error
            ax.text(x, highest + 0.02 * top, _number(mean), ha="center", va="bottom", fontsize=5)
    names = [str(name).replace("in_distribution", "in distribution").replace("_", " ") for name in data["test_set"].values]
    ax.set_xticks(range(len(names)), names)
    ax.set(xlim=(-0.5, len(names) - 0.5), ylim=(0, top), ylabel="error (%)")
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y")
    return entries


def _number(value: float) -> str:
    if value == 0 or value >= 99.95:
        return f"{value:.0f}"
    return "<0.1" if value < 0.05 else f"{value:.1f}"
