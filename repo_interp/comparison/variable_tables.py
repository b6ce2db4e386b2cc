"""The numbers of a comparison as tables: one table per measure, one row per variable (and name), one column per run.

    cell        mean over everything that a run has of the variable; what is the same in every run, value by value, is named alone
    difference  second run - first, for two runs;  +-  its standard error over prompts, paired, where both saw the same ones: all of a
                run's, or those of a test set

`View.not_averaged` says whose mean over everything says nothing. Knows no terminal and no page.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.comparison.head_names import changed_names
from repo_interp.comparison.looks import Runs, group_title, runs_of, spread
from repo_interp.errors import InputError
from repo_interp.plots.catalogue import view_of
from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.reading import ordered_spans, unit_label
from repo_interp.plots.marks.table import Cell, Table

MOST = 6
"""Columns of runs; of more the first, the last and some between are shown."""
NAMES = 24
"""Names of an axis that get a row each; a longer axis is averaged."""
PAIR = 2
"""Runs between which there is a column of differences."""


def comparison_tables(comparison: xr.DataTree) -> list[Table]:
    """One table per measure that has numbers with a mean, and one of the heads whose name changes."""
    runs = runs_of(comparison)
    tables = [measure_table(comparison, measure, runs) for measure in comparison.children]
    changed = changed_names(comparison, runs)
    tables += [] if changed is None else [changed]
    return [table for table in tables if table.rows]


def measure_table(comparison: xr.DataTree, measure: str, runs: Runs) -> Table:
    """The variables of `measure` as rows, runs as columns."""
    dataset, not_averaged = comparison[measure].to_dataset(), _not_averaged(measure)
    shown = spread(runs.names, MOST)
    pair = len(runs.names) == PAIR
    paired = _same_prompts(comparison, dataset) if pair else xr.DataArray(False)
    rows: list[tuple[Cell, ...]] = []
    numbers = {
        str(variable): array
        for variable, array in dataset.data_vars.items()
        if array.dtype.kind == "f" and variable not in not_averaged and np.isfinite(array.values).any()
    }
    same = [variable for variable, array in numbers.items() if _is_the_same(array)]
    same = same if len(same) < len(numbers) else []
    for variable, array in numbers.items():
        if variable in same:
            continue
        axis = _names_axis(array)
        for label in [None] if axis is None else _ordered(array, axis):
            values = array if axis is None or label is None else array.sel({axis: label})
            means = [float(nanmean(values.sel(run=name).values)) for name in shown]
            if np.isfinite(means).any():
                name, of = unit_label(variable.replace("_", " "), array), "" if label is None else str(label)
                rows.append(
                    (name, of, *map(_cell, means), *(_difference(values, runs, _of_label(paired, axis, label)) if pair else ()))
                )
    named = any(row[1] for row in rows)
    rows = rows if named else [(row[0], *row[2:]) for row in rows]
    columns = ("variable", *(("of",) if named else ()), *(runs.title(name) for name in shown))
    columns += ("difference", "±") if pair else ()
    return Table(measure, group_title(measure), columns, tuple(rows), _note(dataset, runs, shown, pair, paired, same))


def _not_averaged(measure: str) -> tuple[str, ...]:
    try:
        view = view_of(measure)
    except InputError:  # of another package, broken: that costs its figures, which say so
        return ()
    return () if view is None else view.not_averaged


def _is_the_same(array: xr.DataArray) -> bool:
    """Whether every run has the values of the first."""
    first, *others = array.transpose("run", ...).values
    return all(np.array_equal(first, other, equal_nan=True) for other in others)


def _same_prompts(comparison: xr.DataTree, dataset: xr.Dataset) -> xr.DataArray:
    """Whether both runs saw the same prompts; by test set where the measure has prompts of its own."""
    if "prompts_digest" not in dataset:
        return xr.DataArray("test_set" not in dataset.dims and comparison.attrs.get("same_prompts") == "yes")
    first, second = dataset["prompts_digest"].values
    return xr.DataArray((first == second) & (first != ""), {"test_set": dataset["test_set"]}, ("test_set",))


def _of_label(same: xr.DataArray, axis: str | None, label: str | None) -> bool:
    """Whether the prompts behind one row are the same."""
    return bool((same.sel({axis: label}) if axis in same.dims else same).all())


def _difference(array: xr.DataArray, runs: Runs, paired: bool) -> tuple[Cell, Cell]:
    """Second run minus first over what both have, and its standard error over prompts; of different prompts the means are subtracted."""
    if not paired and "prompt" in array.dims:
        array = array.mean("prompt")
    change = array.sel(run=runs.names[1]) - array.sel(run=runs.names[0])
    if not np.isfinite(change.values).any():
        return None, None
    mean = float(nanmean(change.values))
    if not paired or "prompt" not in change.dims:
        return mean, None
    by_prompt = nanmean(change.transpose("prompt", ...).values.reshape(change.sizes["prompt"], -1), axis=1)
    by_prompt = by_prompt[np.isfinite(by_prompt)]
    return mean, float(by_prompt.std(ddof=1) / np.sqrt(by_prompt.size)) if by_prompt.size > 1 else None


def _names_axis(array: xr.DataArray) -> str | None:
    """The first axis of names that are few enough for a row each."""
    axes = (str(dim) for dim in array.dims if dim != "run" and array[dim].dtype.kind in "OUS" and array.sizes[dim] <= NAMES)
    return next(axes, None)


def _ordered(array: xr.DataArray, axis: str) -> list[str]:
    names = [str(name) for name in array[axis].values]
    return ordered_spans(names) if axis == "span" else names


def _note(dataset: xr.Dataset, runs: Runs, shown: list[str], pair: bool, paired: xr.DataArray, same: list[str]) -> str:
    counts = [f"{dataset.sizes[axis]} {axis}s" for axis in ("prompt", "layer", "head") if axis in dataset.sizes]
    note = f"Means over all that a run has of {', '.join(counts)}." if counts else "Means over all that a run has."
    note += f" Score: {dataset.attrs['metric']}." if "metric" in dataset.attrs else ""
    if pair:
        note += f" Difference: {runs.title(runs.names[1])} minus {runs.title(runs.names[0])}, over what both have"
        everywhere = "" if paired.all() else ", where both saw the same ones"
        note += f"; ±: its standard error over prompts, paired{everywhere}." if paired.any() else "."
    note += f" The same in every run: {', '.join(same).replace('_', ' ')}." if same else ""
    return note + (f" {len(shown)} of {len(runs.names)} runs; compare.nc has all." if len(shown) < len(runs.names) else "")


def _cell(value: float) -> Cell:
    return value if np.isfinite(value) else None
