"""A run as a table with one row per head, to sort, filter and correlate with pandas.

Knows no measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.run import require_run

if TYPE_CHECKING:
    import pandas as pd

_MOST_LABELS = 32


def head_table(run: xr.DataTree) -> pd.DataFrame:
    """Return one row per layer and head, and one column per number of a head.

    Columns are named GROUP.VARIABLE, and GROUP.VARIABLE[LABEL] where a variable has labels beside
    the head: "attention_mass.mass[needle]". Values of several prompts are averaged, NaN left out.
    Variables with further axes of numbers (tokens, distances, components) are left out.

    Args:
        run: Run of `analyze`.

    Returns:
        The table.

    Raises:
        InputError: The run has no numbers per head.
    """
    import pandas as pd

    require_run(run)
    columns: dict[str, xr.DataArray] = {}
    for node in run.subtree:
        if node.dataset is None or not {"layer", "head"} <= set(node.dataset.dims):
            continue
        for name, variable in node.dataset.data_vars.items():
            if {"layer", "head"} <= set(variable.dims) and np.issubdtype(variable.dtype, np.number):
                columns |= columns_of(f"{node.path.strip('/').replace('/', '.')}.{name}", variable)
    if not columns:
        raise InputError("this run has no numbers per head; wanted a run of ri.analyze")
    table = pd.DataFrame(
        {name: values.stack(row=("layer", "head")).to_series() for name, values in columns.items()}
    )
    return table.rename_axis(["layer", "head"]).reset_index()


def columns_of(name: str, variable: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the columns of a variable in a table of heads.

    Args:
        name: Name of the variable, with which the names of columns begin.
        variable: Variable with the axes `layer` and `head`.

    Returns:
        Arrays [layer, head] by name: one, or one per label; none where an axis has no labels.
    """
    if "prompt" in variable.dims:
        variable = variable.mean("prompt", skipna=True)
    further = [dim for dim in variable.dims if dim not in ("layer", "head")]
    if any(not _has_labels(variable, str(dim)) for dim in further):
        return {}
    if not further:
        return {name: _bare(variable)}
    labels = (
        variable.stack(label=further)
        if len(further) > 1
        else variable.rename({further[0]: "label"})
    )
    parts = [labels.isel(label=number) for number in range(labels.sizes["label"])]
    return {f"{name}[{_label(part)}]": _bare(part) for part in parts}


def _has_labels(variable: xr.DataArray, dim: str) -> bool:
    return (
        dim in variable.coords
        and variable[dim].dtype.kind in "OUT"
        and variable.sizes[dim] <= _MOST_LABELS
    )


def _label(part: xr.DataArray) -> str:
    label = part["label"].item()
    return ",".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _bare(values: xr.DataArray) -> xr.DataArray:
    return values.reset_coords(drop=True).transpose("layer", "head")
