"""How the runs of a comparison look: one colour a scheme, dashes apart within a colour; steps of a training from pale to full.

Reads the root of a comparison (`repo_interp.comparison.align`); draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D

from repo_interp.plots.marks import scores
from repo_interp.plots.style import scheme_name

PALEST = 0.22
"""How much of its colour the first step has."""


@dataclass(frozen=True)
class Runs:
    """The runs of a comparison in order: names, looks, and their steps where they are one training."""

    names: tuple[str, ...]
    layouts: tuple[str, ...]
    looks: Mapping[str, Mapping[str, Any]]
    steps: tuple[int, ...] | None

    def handles(self, names: Sequence[str]) -> list[Line2D]:
        """Legend entries of the runs `names`; of many steps the first, the last and some between."""
        shown = list(names) if self.steps is None else spread(names, 6)
        return [Line2D([], [], markersize=3, **self.looks[name]) for name in shown]

    def title(self, name: str) -> str:
        """What the panel of a run is called."""
        return str(self.looks[name]["label"])

    def step(self, name: str) -> int:
        """The training step of a run. Raises ValueError where the runs are no steps."""
        if self.steps is None:
            raise ValueError("these runs are not the steps of a training")
        return self.steps[self.names.index(name)]


def runs_of(comparison: xr.DataTree) -> Runs:
    """The runs of `comparison`, which `repo_interp.comparison.align.compare` made."""
    root = comparison.to_dataset()
    names = tuple(map(str, root["run"].values))
    layouts = tuple(map(str, root["layout"].values))
    known = scores.looks(xr.Dataset({"layout": ("checkpoint", list(layouts))}, coords={"checkpoint": list(names)}))
    if "training_step" not in root:
        return Runs(names, layouts, {name: {**known[name], "label": scheme_name(name)} for name in names}, None)
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


def _pale(colour: str, share: float) -> str:
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))
