"""What the figures and tables of a comparison share: its runs with their colours, what has values, and how figures are named.

    checkpoints     one colour per scheme, dashes apart within a colour
    training steps  one colour, from pale to full

Reads the root of a comparison (`repo_interp.comparison.align`); knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D

from repo_interp.plots.marks import scores
from repo_interp.plots.marks.reading import ordered_spans
from repo_interp.plots.style import PaperFigure, scheme_name

PALEST = 0.22
"""Share of the colour that the first step has."""
CATEGORIES = 16
"""Names of an axis that can be told apart in one figure."""
LOG_ABOVE, LOG_BELOW = 50.0, 1e5
"""Ratios of the largest to the smallest value, all positive, between which a scale is logarithmic."""


@dataclass(frozen=True)
class Runs:
    """The runs of a comparison in order: names, layouts, looks, and their training steps where they are one training."""

    names: tuple[str, ...]
    layouts: tuple[str, ...]
    looks: Mapping[str, Mapping[str, Any]]
    steps: tuple[int, ...] | None

    def handles(self, names: Sequence[str]) -> list[Line2D]:
        """Legend entries of the runs `names`; of many training steps the first, the last and some between."""
        shown = list(names) if self.steps is None else spread(names, 6)
        return [Line2D([], [], markersize=3, **self.looks[name]) for name in shown]

    def title(self, name: str) -> str:
        """The title of the panel of a run."""
        return str(self.looks[name]["label"])

    def step(self, name: str) -> int:
        """The training step of a run. Raises ValueError where the runs are not the steps of a training."""
        if self.steps is None:
            raise ValueError("these runs are not the steps of a training")
        return self.steps[self.names.index(name)]


def runs_of(comparison: xr.DataTree) -> Runs:
    """The runs of `comparison`, which `repo_interp.comparison.align.compare` made."""
    root = comparison.to_dataset()
    names = tuple(map(str, root["run"].values))
    layouts = tuple(map(str, root["layout"].values))
    looks = scores.looks(xr.Dataset({"layout": ("checkpoint", list(layouts))}, coords={"checkpoint": list(names)}))
    if "training_step" not in root:
        return Runs(names, layouts, {name: {**looks[name], "label": scheme_name(name)} for name in names}, None)
    steps = tuple(map(int, root["training_step"].values))
    full = scores.layout_colour(layouts[0])
    looks = {
        name: {"color": _pale(full, share), "linestyle": "-", "marker": "o", "label": f"step {step:,}"}
        for name, step, share in zip(names, steps, np.linspace(PALEST, 1, len(names)), strict=True)
    }
    return Runs(names, layouts, looks, steps)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `items`, the first and the last among them, evenly between."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def runs_with_values(values: xr.DataArray) -> list[str]:
    """The runs that have any value."""
    data = values.transpose("run", ...).values
    return [str(name) for name, of_run in zip(values["run"].values, data, strict=True) if np.isfinite(of_run).any()]


def names_along(values: xr.DataArray, axis: str) -> list[str]:
    """The names on `axis` that have any value, in reading order, as many as can be told apart."""
    names = [str(name) for name in values[axis].values if np.isfinite(values.sel({axis: name}).values).any()]
    if axis == "span":
        names = ordered_spans(names)
        names = [name for name in names if "." not in name] if len(names) > CATEGORIES else names
    return names[:CATEGORIES]


def averaged_over(values: xr.DataArray, axis: str, panel: Hashable | None, drawn: str = "mean and middle half over") -> str:
    """What a line and its band stand for: "mean and middle half over 4 layers of 4 heads"."""
    rest = [
        f"{values.sizes[dim]} {axis_name(dim)}s" for dim in ("layer", "head") if dim in values.dims and dim not in (axis, panel)
    ]
    return f"{drawn} {' of '.join(rest)}" if rest else ""


def axis_name(axis: Hashable) -> str:
    """An axis as a label says it: "query_block" -> "query block"."""
    return str(axis).replace("_", " ")


def group_title(group: str) -> str:
    """A group as headings say it: "three_axis" -> "Three axis"."""
    return group.replace("_", " ").capitalize()


def name_figure(figure: PaperFigure, title: str, detail: str) -> None:
    """Write `title`, and below it `detail`, above `figure`."""
    text = title[:1].upper() + title[1:]
    figure.suptitle(f"{text}\n{detail}" if detail else text, x=0.01, ha="left", fontsize=7.5)


def name_columns(axes: np.ndarray, label: str) -> None:
    """Write `label` below the lowest panel of every column of `axes`, under which there may be places without a panel."""
    for column in axes.T:
        lowest = [ax for ax in column if ax.axison][-1]
        lowest.set_xlabel(label)
        lowest.tick_params(labelbottom=True)


def is_logarithmic(data: np.ndarray) -> bool:
    """Whether values, all positive, spread so far that a scale of them is logarithmic."""
    finite = data[np.isfinite(data)]
    return bool(finite.size and finite.min() > 0 and LOG_ABOVE < finite.max() / finite.min() < LOG_BELOW)


def _pale(colour: str, share: float) -> str:
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))
