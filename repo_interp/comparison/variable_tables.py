"""The numbers of a comparison as plain rows: a table a measure, a row a variable (and name), a column a run.

    cell        mean over everything that a run has of the variable
    difference  second run - first, for two runs;  +-  its standard error over prompts, paired, where both saw the same ones

Knows no terminal and no page.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.comparison.looks import Runs, runs_of, spread
from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.marks.reading import ordered_spans, unit_label
from repo_interp.plots.marks.table import Cell, Table

MOST = 6
"""Columns of runs; of more the first, the last and some between are shown."""
NAMES = 24
"""Names of an axis that get a row each; of longer ones all are averaged."""
PAIR = 2
LEFT_OUT = {
    "positions": ("position",),
    "components": (
        *("logit_by_distance", "position_logit_by_distance", "component_by_distance", "turn_share", "turn_upper"),
        *("vaf_printed", "vaf_curve_printed", "distance_pairs", "frequency"),
    ),
    "three_axis": ("distance_axis", "query_axis", "key_axis"),
    "fake_distance": ("position_axis", "semantic_axis"),
    "rotation": ("start_angle", "query_mean_re", "query_mean_im", "key_mean_re", "key_mean_im"),
    "maps": ("logit_map", "fake_map", "block_size"),
    "output_traces": ("pca_reference", "pca_trace", "pca_share"),
    "scores": ("score", "score_map"),
}
"""Variables whose mean over everything says nothing: signs cancel, or every run has its own axes."""


def comparison_tables(comparison: xr.DataTree) -> list[Table]:
    """A table of every measure that has numbers with a mean."""
    runs = runs_of(comparison)
    made = [measure_table(comparison, measure, runs) for measure in comparison.children]
    return [table for table in made if table.rows]


def measure_table(comparison: xr.DataTree, measure: str, runs: Runs) -> Table:
    """The variables of `measure` as rows, runs as columns."""
    dataset = comparison[measure].to_dataset()
    shown = spread(runs.names, MOST)
    pair = len(runs.names) == PAIR
    paired = pair and comparison.attrs.get("same_prompts") == "yes"
    rows: list[tuple[Cell, ...]] = []
    for variable, array in dataset.data_vars.items():
        if array.dtype.kind != "f" or variable in LEFT_OUT.get(measure, ()) or not np.isfinite(array.values).any():
            continue
        axis = _names_axis(array)
        for label in [None] if axis is None else _ordered(array, axis):
            one = array if axis is None or label is None else array.sel({axis: label})
            means = [float(nanmean(one.sel(run=name).values)) for name in shown]
            if not np.isfinite(means).any():
                continue
            said = unit_label(str(variable).replace("_", " "), array)
            of = "" if label is None else str(label)
            rows.append((said, of, *map(_cell, means), *(_difference(one, runs, paired) if pair else ())))
    named = any(row[1] for row in rows)
    rows = rows if named else [(row[0], *row[2:]) for row in rows]
    columns = ("variable", *(("of",) if named else ()), *(runs.title(name) for name in shown))
    columns += ("difference", "±") if pair else ()
    return Table(measure, _title(measure), columns, tuple(rows), _note(dataset, runs, shown, pair, paired))


def _difference(array: xr.DataArray, runs: Runs, paired: bool) -> tuple[Cell, Cell]:
    """Second run minus first over what both have, and its standard error over prompts."""
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
    found = [str(dim) for dim in array.dims if dim != "run" and array[dim].dtype.kind in "OUS" and array.sizes[dim] <= NAMES]
    return found[0] if found else None


def _ordered(array: xr.DataArray, axis: str) -> list[str]:
    names = [str(name) for name in array[axis].values]
    return ordered_spans(names) if axis == "span" else names


def _title(measure: str) -> str:
    return measure.replace("_", " ").capitalize()


def _note(dataset: xr.Dataset, runs: Runs, shown: list[str], pair: bool, paired: bool) -> str:
    counts = [f"{dataset.sizes[axis]} {axis}s" for axis in ("prompt", "layer", "head") if axis in dataset.sizes]
    said = f"Means over all that a run has of {', '.join(counts)}." if counts else "Means over all that a run has."
    if pair:
        said += f" Difference: {runs.title(runs.names[1])} minus {runs.title(runs.names[0])}, over what both have"
        said += "; ±: its standard error over prompts, paired." if paired else "."
    return said + (f" {len(shown)} of {len(runs.names)} runs; compare.nc has all." if len(shown) < len(runs.names) else "")


def _cell(value: float) -> Cell:
    return value if np.isfinite(value) else None
