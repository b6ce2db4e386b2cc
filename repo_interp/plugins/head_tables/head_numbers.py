"""A run as a table with one row per head, to sort, filter and correlate with pandas.

This module knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.run import require_run

if TYPE_CHECKING:
    import pandas as pd

_MOST_LABELS, _MOST_NUMBERS = 32, 16
"""Most labels of an axis that become columns, for texts and for numbers."""
_PLACES = ("token", "query", "key", "distance", "chunk")
_PLACES += ("query_block", "key_block", "distance_block")
"""Axes that grow with the prompt; equal labels do not mean the same in two prompts."""


def head_table(run: xr.DataTree) -> pd.DataFrame:
    """Return one row per layer and head, and one column per number of a head.

    Columns are named GROUP.VARIABLE, or GROUP.VARIABLE[LABEL] for variables with further labels:
    "attention_mass.mass[needle]", "octaves.mass[3]". Texts of a head, such as
    "position_sources.kind", have a column too. Values are means over prompts without NaN. Variables
    by place in a prompt (token, distance), and variables with an axis of more than 32 names or 16
    numbers (components of large heads), have no columns: the attribute `left_out` of the table
    names them, and the run has their arrays.

    Args:
        run: Run of `analyze`.

    Returns:
        The table; `table.attrs["left_out"]` has a text such as "attention_rows.weight (query,
        rank)" per variable.

    Raises:
        InputError: The run has no numbers per head.
    """
    import pandas as pd

    require_run(run)
    columns: dict[str, xr.DataArray] = {}
    left_out: list[str] = []
    for node in run.subtree:
        if node.dataset is None or not {"layer", "head"} <= set(node.dataset.dims):
            continue
        for name, variable in node.dataset.data_vars.items():
            title = f"{node.path.strip('/').replace('/', '.')}.{name}"
            if variable.dtype.kind in "OUT" and {*variable.dims} == {"layer", "head"}:
                columns[title] = _bare(variable)  # such as the kind of a head
            # Booleans are not numbers for numpy, so flags per head have no column
            if {"layer", "head"} <= set(variable.dims) and np.issubdtype(variable.dtype, np.number):
                columns |= columns_of(title, variable)
                if long := [str(dim) for dim in _further(variable) if not _fits(variable, dim)]:
                    left_out.append(f"{title} ({', '.join(long)})")
    if not columns:
        raise InputError("this run has no numbers per head; wanted a run of ri.analyze")
    table = pd.DataFrame(
        {name: values.stack(row=("layer", "head")).to_series() for name, values in columns.items()}
    )
    table = table.rename_axis(["layer", "head"]).reset_index()
    table.attrs["left_out"] = left_out
    return table


def columns_of(name: str, variable: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the columns of a variable in a table of heads.

    Args:
        name: Name of the variable, the prefix of the columns' names.
        variable: Variable with the axes `layer` and `head`.

    Returns:
        Arrays [layer, head] by name: one, or one per label; empty if an axis is too long.
    """
    if "prompt" in variable.dims:
        variable = variable.mean("prompt", skipna=True)
    further = _further(variable)
    if not all(_fits(variable, dim) for dim in further):
        return {}
    if not further:
        return {name: _bare(variable)}
    labels = (
        # Further axes are stacked into one with tuples as labels: NAME[needle,3]
        variable.stack(label=further)
        if len(further) > 1
        else variable.rename({further[0]: "label"})
    )
    parts = [labels.isel(label=number) for number in range(labels.sizes["label"])]
    return {f"{name}[{_label(part)}]": _bare(part) for part in parts}


def _further(variable: xr.DataArray) -> list[Hashable]:
    return [dim for dim in variable.dims if dim not in ("layer", "head", "prompt")]


def _fits(variable: xr.DataArray, dim: Hashable) -> bool:
    """Whether the labels of an axis are few enough for columns."""
    is_text = variable[dim].dtype.kind in "OUT"
    return dim not in _PLACES and variable.sizes[dim] <= (
        _MOST_LABELS if is_text else _MOST_NUMBERS
    )


def _label(part: xr.DataArray) -> str:
    label = part["label"].item()
    return ",".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _bare(values: xr.DataArray) -> xr.DataArray:
    return values.reset_coords(drop=True).transpose("layer", "head")
