"""The runs of a comparison: names, looks, training steps, and a choice of many.

    checkpoints     one color per scheme, dashes apart within a color
    training steps  one color, from pale to full

Reads the root of a tree with an axis `run`, as `repo_interp.compare` makes it; knows no measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D

from repo_interp.errors import one_line
from repo_interp.plots.marks.reading import checkpoint_name
from repo_interp.plots.marks.scores import layout_colour
from repo_interp.plots.marks.scores import looks as checkpoint_looks
from repo_interp.plots.style import scheme_name
from repo_interp.positions.layouts import LEARNED
from repo_interp.run import require_run

PALEST = 0.22
"""Share of the color that the first step has."""
LONGEST = 40
"""Characters of a run's label; legends of longer ones leave no room for the axes."""
BESIDE = 5
"""Runs that have a panel; of more the first, the last and some between."""


@dataclass(frozen=True)
class Runs:
    """The runs of a comparison in order: names, layouts and looks.

    Runs of one training have training steps too.
    """

    names: tuple[str, ...]
    layouts: tuple[str, ...]
    looks: Mapping[str, Mapping[str, Any]]
    steps: tuple[int, ...] | None

    def handles(self, names: Sequence[str]) -> list[Line2D]:
        """Make legend entries of runs.

        Args:
            names: Names of the runs.

        Returns:
            The entries; of many training steps the first, the last and some between.
        """
        shown = list(names) if self.steps is None else evenly_spaced(names, 6)
        return [Line2D([], [], markersize=3, **self.looks[name]) for name in shown]

    def title(self, name: str) -> str:
        """Return the title of the panel of a run.

        Args:
            name: Name of the run.

        Returns:
            The title.
        """
        return str(self.looks[name]["label"])


def with_run_axis(run: xr.DataTree, array: xr.DataArray) -> tuple[xr.DataArray, Runs]:
    """Add an axis `run` to an array of a single run.

    Args:
        run: Tree of a run, a group per measure.
        array: Array of that run.

    Returns:
        The array, and the run with the color of a scheme that learns positions, or else of the most
        frequent scheme.
    """
    name, layout = checkpoint_name(run), str(run.attrs.get("layout", "")).split(",")
    scheme = next((scheme for scheme in layout if scheme in LEARNED), max(layout, key=layout.count))
    look = {"color": layout_colour(scheme), "linestyle": "-", "marker": "o", "label": name}
    return array.expand_dims(run=[name]), Runs((name,), (scheme,), {name: look}, None)


def by_scheme(array: xr.DataArray) -> tuple[xr.DataArray, Runs]:
    """Split the layers of an array by their scheme, along an axis `run`.

    Args:
        array: Array of a single run with an axis `layer`.

    Returns:
        The array, of all layers first where schemes differ, and the schemes as runs.
    """
    named = array["scheme"]
    looks = {
        scheme: {"color": layout_colour(scheme), "marker": "o", "label": scheme_name(scheme)}
        for scheme in dict.fromkeys(named.values.tolist())
    }
    if len(looks) > 1:
        looks = {"": {"color": "#222222", "marker": "D", "label": "all layers"}, **looks}
    parts = [array.where(named == scheme) if scheme else array for scheme in looks]
    # "" names all layers, and no scheme has this name
    names = xr.IndexVariable("run", [*looks])
    return xr.concat(parts, names), Runs(tuple(looks), tuple(looks), looks, None)


def has_runs(run: xr.DataTree) -> bool:
    """Tell whether a tree holds several runs along an axis `run`.

    Args:
        run: Tree of one run or of several.

    Returns:
        True for several.

    Raises:
        InputError: The tree is not a run.
    """
    require_run(run)
    return "run" in run.dims


def runs_of(comparison: xr.DataTree) -> Runs:
    """Read names and looks of the runs of a comparison.

    Args:
        comparison: Tree with an axis `run`.

    Returns:
        The runs.
    """
    root = comparison.to_dataset()
    names = tuple(map(str, root["run"].values))
    layouts = tuple(map(str, root["layout"].values))
    if "training_step" not in root:
        looks = checkpoint_looks(
            xr.Dataset(
                {"layout": ("checkpoint", list(layouts))}, coords={"checkpoint": list(names)}
            )
        )
        return Runs(
            names,
            layouts,
            {name: {**looks[name], "label": label} for name, label in _labels(names).items()},
            None,
        )
    # One training has one layout, so color is free to show the step
    steps = tuple(map(int, root["training_step"].values))
    full = np.array(to_rgb(layout_colour(layouts[0])))
    looks = {
        name: {
            # Mixed with white: 1 is white in every channel
            "color": to_hex(1 - share * (1 - full)),
            "linestyle": "-",
            "marker": "o",
            "label": f"step {step:,}",
        }
        for name, step, share in zip(names, steps, np.linspace(PALEST, 1, len(names)), strict=True)
    }
    return Runs(names, layouts, looks, steps)


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Labels that fit into a figure, by name; numbered if they are not distinct."""
    labels = {name: one_line(scheme_name(name), LONGEST) for name in names}
    if len(set(labels.values())) == len({scheme_name(name) for name in names}):
        return labels
    return {name: f"{place}: {label}" for place, (name, label) in enumerate(labels.items(), 1)}


def evenly_spaced(items: Sequence[Any], most: int) -> list[Any]:
    """Choose items evenly, the first and the last among them.

    Args:
        items: Items in order.
        most: Largest number to choose.

    Returns:
        The chosen items in the same order.
    """
    if len(items) <= most:
        return list(items)
    return [
        items[place]
        for place in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    ]


def runs_with_values(values: xr.DataArray) -> list[str]:
    """List the runs that have a value other than NaN.

    Args:
        values: Array [run, ...].

    Returns:
        Names of the runs.
    """
    having = values.notnull().any([dim for dim in values.dims if dim != "run"])
    return [str(name) for name in having["run"].values[having.values]]
