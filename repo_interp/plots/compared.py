"""The view of several runs: a tree with an axis `run`, made by `repo_interp.compare`.

    charts      charts of `View.beside`; other variables in `View.compared` by the rule of
                `marks.beside`
    tables      one row per variable (and name), one column per run, then the tables of
                `View.beside`
    cell        mean over all values of a run, by the schemes of layers; a variable with equal
                values in every run is only named
    difference  second run - first, for two runs;  +-  half width of its 95 % interval over prompts,
                paired, if both runs have the same prompts (of the run, or of a test set)

Any group without a view is drawn by the rule. This module knows no measure, no terminal and no
page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.intervals import paired_difference, same_prompts
from repo_interp.plots.marks import (
    Cell,
    Chart,
    Drawing,
    Finding,
    Runs,
    Table,
    cells,
    charts_of,
    counted,
    evenly_spaced,
    learned_schemes,
    number,
    ordered_spans,
    runs_of,
    unit_label,
)
from repo_interp.plots.style import scheme_name
from repo_interp.plots.view import View
from repo_interp.positions.layouts import FIXED

MOST = 6
"""Columns of runs; of more the first, the last and some between are shown."""
NAMES = 24
"""Names of an axis that get rows; a longer axis is averaged."""


def view_of_runs(group: str, view_of: Callable[[str], View | None]) -> View:
    """Make a view of one group of several runs.

    Args:
        group: Name of the group in the tree.
        view_of: Finds the view of a single run by its group. If it raises InputError, tables are
            still made; only the figures fail.

    Returns:
        A view with one chart per compared variable and a table with one column per run.
    """
    words = group.replace("_", " ").capitalize()

    def charts(tree: xr.DataTree) -> Iterator[Chart]:
        view, dataset, runs = view_of(group), tree[group].to_dataset(), runs_of(tree)
        drawn = []
        for chart in () if view is None else view.beside.charts(tree):
            # If a view draws a variable differently, its chart has the name that the rule would
            # give.
            drawn += [chart.name] if isinstance(chart, Drawing) else []
            yield chart
        compared = (
            list(dataset.data_vars) if view is None or view.compared is None else view.compared
        )
        for variable in [
            name for name in compared if name in dataset and f"{group}_{name}" not in drawn
        ]:
            values = dataset[variable]
            if view is not None and variable in view.by_index:
                values = _beyond_the_index(values)
            yield from charts_of(f"{group}_{variable}", values, runs)

    def tables(tree: xr.DataTree) -> list[Table]:
        try:
            view = view_of(group)
        except InputError:
            view = None
        averages = _table(tree, group, words, view or View(group, "", ""))
        return [
            table
            for table in (averages, *(() if view is None else view.beside.tables(tree)))
            if table.rows
        ]

    return View(group, words, "", charts, tables, partial(_findings, group, view_of))


def _beyond_the_index(values: xr.DataArray) -> xr.DataArray:
    """Leave out layers that have no positions or the token index in all runs."""
    if not {"layer", "run"} <= {*values.dims} or "scheme" not in values.coords:
        return values
    # A run without the layer has an empty name there.
    moving = (~values["scheme"].isin([*FIXED, ""])).any("run").values
    return values.isel(layer=moving) if moving.any() else values


def _findings(
    group: str, view_of: Callable[[str], View | None], tree: xr.DataTree
) -> Iterator[Finding]:
    """Differences of two runs beyond their interval, sorted by the lower bound of their size."""
    view, runs = view_of(group), runs_of(tree)
    if len(runs.names) != 2:
        return
    table = _table(tree, group, group.replace("_", " "), view or View(group, "", ""))
    if "±" not in table.columns:
        return
    # The last four cells are the first run, the second, their difference and its half interval.
    rows = [
        (" of ".join(filter(None, map(str, row[:-4]))), np.array(row[-4:], dtype=float))
        for row in table.rows
        if None not in row[-4:]
    ]
    # abs(difference) > half interval: the interval excludes 0.
    beyond = [(words, numbers) for words, numbers in rows if abs(numbers[2]) > numbers[3]]
    meanings = {
        str(name).replace("_", " "): str(array.attrs.get("long_name", name))
        for name, array in tree[group].data_vars.items()
    }
    for words, (first, second, difference, reach) in beyond:
        # A row begins with its variable; the longest name wins, as "loss change" begins with "loss"
        # too.
        name = max(filter(words.startswith, meanings), key=len)
        yield Finding(
            f"{table.title.capitalize()}: {words} is {'higher' if difference > 0 else 'lower'} "
            f"in {runs.title(runs.names[1])} ({number(second)}) than in "
            f"{runs.title(runs.names[0])} ({number(first)})",
            f"{meanings[name]}: mean difference {number(difference)}, 95 % interval over prompts, paired: "
            f"{number(difference - reach)} to {number(difference + reach)}; {len(beyond)} of "
            f"{len(rows)} differences in this table are beyond theirs; by chance 1 in 20 would be",
            # Relative, so that variables with different units can be ranked.
            (abs(difference) - reach) / (abs(first) + abs(second)),
            group,
        )


def _table(tree: xr.DataTree, group: str, title: str, view: View) -> Table:
    """The variables of a group as rows, runs as columns."""
    dataset, runs = tree[group].to_dataset(), runs_of(tree)
    shown, pair = evenly_spaced(runs.names, MOST), len(runs.names) == 2
    # Of scores the prompts may agree in some test sets only: [] or [test_set].
    paired = (
        same_prompts(dataset, tree.attrs.get("same_prompts") == "yes")
        if pair
        else xr.DataArray(False)
    )
    numbers = {
        (f"{name}".replace("_", " "), scheme): part
        for name, array in dataset.data_vars.items()
        if array.dtype.kind == "f" and name not in view.not_averaged and array.notnull().any()
        for scheme, part in _by_scheme(array).items()
    }
    same = [key for key, array in numbers.items() if _is_same(array)]
    # If nothing differs, the table lists all variables instead of none.
    same = same if len(same) < len(numbers) else []
    rows: list[tuple[Cell, ...]] = []
    given_by_index, fixed = pair and _is_given(dataset), False
    for (name, scheme), array in numbers.items():
        axis = next(
            (
                dim
                for dim in array.dims
                if dim != "run" and array[dim].dtype.kind in "OUST" and array[dim].size <= NAMES
            ),
            None,
        )
        labels = [] if axis is None else [str(label) for label in array[axis].values]
        labels = ordered_spans(labels) if axis == "span" else labels or [None]
        # One run learns these positions and the other counts tokens: their difference is no result.
        given = given_by_index and name.replace(" ", "_") in view.by_index
        fixed |= given
        for label in [] if (name, scheme) in same else labels:
            values = array if label is None else array.sel({axis: label})
            whole = (label or "").rpartition(".")[0]
            if whole in labels and np.array_equal(values, array.sel({axis: whole}), equal_nan=True):
                continue  # the only needle is all needles
            means = values.mean([dim for dim in values.dims if dim != "run"])
            if means.notnull().any():
                alike = bool((paired.sel({axis: label}) if axis in paired.dims else paired).all())
                difference = (None,) * (2 * pair)
                if pair and not given:
                    change, reach = paired_difference(values, alike)
                    difference = *cells([change]), reach
                words = unit_label(name, array) + scheme
                rows.append((words, label or "", *cells(means.sel(run=shown).values), *difference))
    columns = ["variable", "of", *map(runs.title, shown), *("difference", "±")[: 2 * pair]]
    # A column ± without any interval would be a column of dashes.
    for place in (1, -1)[: 1 + pair]:
        if all(row[place] in ("", None) for row in rows):
            columns.pop(place)
            rows = [(*row[:place], *row[place:][1:]) for row in rows]
    note = _note(dataset, runs, shown, paired, "±" in columns, ["".join(key) for key in same])
    note += " –: decided by the token index in one run." if fixed else ""
    return Table(group, title, tuple(columns), tuple(rows), note)


def _by_scheme(array: xr.DataArray) -> dict[str, xr.DataArray]:
    """Split an array by the schemes of its layers in the runs; undivided if all are equal.

    No mean therefore mixes learned positions with others.
    """
    if "layer" not in array.dims or "scheme" not in array.coords:
        return {"": array}
    named = array["scheme"]
    # One name per layer, such as "RoPE and RePo"; the iterated array is [layer, run].
    layers = [
        " and ".join(dict.fromkeys(scheme_name(str(kind)) for kind in kinds.ravel() if kind))
        for kinds in np.moveaxis(np.atleast_2d(named.transpose(..., "layer").values), -1, 0)
    ]
    kinds = xr.DataArray(layers, {"layer": array["layer"]}, ("layer",))
    if len(set(layers)) < 2:
        return {"": array}
    return {f", {kind} layers": array.where(kinds == kind) for kind in dict.fromkeys(layers)}


def _is_given(dataset: xr.Dataset) -> bool:
    """Whether layers learn positions in one run, and none do in another."""
    if "scheme" not in dataset.coords:
        return False
    # [run, layer]
    learned = np.isin(
        dataset["scheme"].transpose("run", ...).values, list(learned_schemes(dataset))
    )
    return bool(learned.ndim > 1 and (learned.any(1) != learned.any()).any())


def _is_same(array: xr.DataArray) -> bool:
    """Whether every run has the same values."""
    values = array.transpose("run", ...).values
    # Exactly, not within a tolerance: rounding that differs between runs is a difference.
    return np.array_equal(*np.broadcast_arrays(values, values[:1]), equal_nan=True)


def _note(
    dataset: xr.Dataset,
    runs: Runs,
    shown: list[str],
    paired: xr.DataArray,
    bounded: bool,
    same: list[str],
) -> str:
    counts = [
        counted(dataset.sizes[axis], axis)
        for axis in ("prompt", "layer", "head")
        if axis in dataset.sizes
    ]
    of = f" of {', '.join(counts)}" if counts else ""
    note = f"Means over all that a run has{of}."
    note += f" Score: {dataset.attrs['metric']}." if "metric" in dataset.attrs else ""
    if len(runs.names) == 2:
        note += (
            f" Difference: {runs.title(runs.names[1])} minus "
            f"{runs.title(runs.names[0])}, over what both have"
        )
        everywhere = "" if paired.all() else ", where both saw the same ones"
        note += (
            f"; ±: half of its 95 % interval over prompts, paired{everywhere}."
            if paired.any() and bounded
            else "."
        )
    note += f" The same in every run: {'; '.join(same)}." if same else ""
    return note + (
        f" {len(shown)} of {len(runs.names)} runs; compare.nc has all."
        if len(shown) < len(runs.names)
        else ""
    )
