"""Bars of errors by test set (CoPE tables 2 to 4): one per scheme, a dot per seed, the mean below it.

Draws the tables of `errors.error_table`, and knows no claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from position_papers.kit.scores import Scored
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

_HATCHES = ("", "////", "....", "xxxx")
_FLOOR: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.7, "linestyle": "--"}
_GROUP = 0.84
"""Width of the bars of one test set; test sets are 1 apart."""
_PAGE_FROM = 12
"""Bars from which a figure is as wide as a page."""


def error_bars(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Bars of every error table of `panels`, by its title, one row each. Whiskers: standard error over prompts, for a single seed; dashed:
    `floor [test_set]`, where there is one.
    """
    count = max(data.sizes["checkpoint"] * data.sizes["test_set"] for data in panels.values())
    with style():
        figure = paper_figure(PAGE_WIDTH if count >= _PAGE_FROM else COLUMN_WIDTH, 0.45 + 1.55 * len(panels))
        axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
        entries: dict[str, Patch] = {}
        for ax, (title, data) in zip(axes, panels.items(), strict=True):
            for patch in _draw_errors(ax, data):
                entries.setdefault(str(patch.get_label()), patch)
            ax.set_title(f"{title}; numbers below bars: mean error (%)")
        axes[0].set_ylim(0, max(_top(data) for data in panels.values()))
        floors: list[Line2D] = []
        if any("floor" in data for data in panels.values()):
            floors = [Line2D([], [], **_FLOOR, label="always the most frequent answer")]
        legend_below(figure, [*entries.values(), *floors])
    return figure


def bars_caption(scored: Sequence[Scored]) -> str:
    """What a caption says of the training seeds and prompts behind the bars."""
    samples = {checkpoint.name: checkpoint.sample(checkpoint.test_sets[:1]) for checkpoint in scored}
    seeds = {name: len(sample.seeds) for name, sample in samples.items()}
    same = len(set(seeds.values())) == 1
    over = str(next(iter(seeds.values()))) if same else ", ".join(f"{name} {count}" for name, count in seeds.items())
    prompts = sorted({sample.count for sample in samples.values()})
    return (
        f"Bars: means over training seeds ({over}); dots: seeds; whiskers of a single seed: standard error over prompts, at most where "
        "its mean alone is recorded; "
        f"{' to '.join(str(count) for count in dict.fromkeys((prompts[0], prompts[-1])))} prompts each."
    )


def _draw_errors(ax: Axes, data: xr.Dataset) -> list[Patch]:
    """Draw the bars of one table on `ax` and return the legend entries of its checkpoints."""
    values = data["score"].transpose("checkpoint", "test_set", "seed").values
    errors = data["standard_error"].transpose("checkpoint", "test_set").values
    width = _GROUP / len(values)
    dot = {"markersize": 2.2, "color": "#222222", "markeredgecolor": "white", "markeredgewidth": 0.4, "clip_on": False}
    # The numbers stand in a row below the bars, where no dot is.
    below: Any = {
        "xytext": (0, -2.5),
        "textcoords": "offset points",
        "ha": "center",
        "va": "top",
        "fontsize": 5,
        "annotation_clip": False,
    }
    entries, bars_by_colour = [], dict[str, int]()
    for row, (name, look) in enumerate(looks(data).items()):
        hatch = _HATCHES[bars_by_colour.setdefault(look["color"], 0) % len(_HATCHES)]
        bars_by_colour[look["color"]] += 1
        bar = {"facecolor": look["color"], "hatch": hatch, "edgecolor": "white" if hatch else look["color"], "linewidth": 0.4}
        entries.append(Patch(**bar, label=look["label"]))
        for column, seeds in enumerate(values[row]):
            seeds = seeds[np.isfinite(seeds)]
            x = column - _GROUP / 2 + (row + 0.5) * width
            if not seeds.size:
                ax.annotate("n/a", (x, 0), **below, color="#8A8A8A", gid=f"absent {name}")
                continue
            mean, error = float(seeds.mean()), float(np.nan_to_num(errors[row, column]))
            ax.bar(x, mean, 0.9 * width, **bar, gid=f"error {name} {data['test_set'].values[column]}")
            if seeds.size > 1:
                ax.plot(x + width * np.linspace(-0.22, 0.22, seeds.size), seeds, "o", **dot)
            elif error > 0:
                ax.vlines(x, max(0.0, mean - error), mean + error, color="#222222", linewidth=0.7)
            ax.annotate(_number(mean), (x, 0), **below, color="#222222", gid=f"mean {name}")
    if "floor" in data:
        for column, floor in enumerate(data["floor"].sel(test_set=data["test_set"]).values):
            ax.hlines(floor, column - _GROUP / 2, column + _GROUP / 2, **_FLOOR, gid="floor")
    names = [str(name).replace("in_distribution", "in distribution").replace("_", " ") for name in data["test_set"].values]
    ax.set_xticks(range(len(names)), names)
    ax.set(xlim=(-0.5, len(names) - 0.5), ylabel="error (%)")
    ax.tick_params(axis="x", length=0, pad=9)
    ax.grid(axis="y")
    return entries


def _top(data: xr.Dataset) -> float:
    """Where an axis ends that shows all bars, dots and whiskers of `data`."""
    tips = data["score"].max("seed").fillna(0) + data["standard_error"].fillna(0)
    floor = float(data["floor"].max()) if "floor" in data else 0.0
    return max(1.08 * max(float(tips.max()), floor), 1.0)


def _number(value: float) -> str:
    if value == 0 or value >= 99.95:
        return f"{value:.0f}"
    return "<0.1" if value < 0.05 else f"{value:.1f}"
