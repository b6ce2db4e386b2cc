"""The atlas of heads as a table: one row per head, with all numbers of the head in a run.

The columns are from `plugins.head_tables.head_columns`. This module reads run files, and knows
nothing about how the numbers are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plugins.head_tables.head_columns import HEAD, add_columns
from repo_interp.plugins.head_tables.head_numbers import columns_of
from repo_interp.run import require_run

if TYPE_CHECKING:
    from repo_interp.plugins.head_tables.head_file import HeadTable

_FIRST = ("scheme", "name")


def atlas(run: xr.DataTree) -> HeadTable:
    """Return one row per layer and head of a run.

    Columns: layer, head, scheme, name, and one for every number of the atlas. Columns of variables
    with labels are named VARIABLE[LABEL]: "mass[needle]". Names and scores exist where the run was
    made with the experiment `atlas`; units and long names are in `run["atlas"]`.

    Args:
        run: Run of `analyze`.

    Returns:
        A pandas DataFrame whose `attrs` are its provenance. `to_json` and `to_parquet` write both;
        `to_duo_attention` and `to_retrieval_head` write files for other libraries.

    Raises:
        InputError: No group has anything for the atlas.
    """
    require_run(run)
    group = add_columns({name: node.to_dataset() for name, node in run.children.items()})
    if not set(HEAD) <= set(group.dims):
        raise InputError(
            "this run has nothing for an atlas of heads; analyze with the experiment atlas: "
            "--experiments atlas"
        )
    import pandas as pd

    from repo_interp.plugins.head_tables.head_file import HeadTable, provenance

    columns: dict[str, xr.DataArray] = {}
    if "scheme" in group.coords:
        columns["scheme"] = (
            group["scheme"].broadcast_like(group["head"]).transpose(*HEAD).reset_coords(drop=True)
        )
    for name, variable in group.data_vars.items():
        # Variables with `label` are about names (rules, thresholds), not about heads
        if set(HEAD) <= set(variable.dims) and "label" not in variable.dims:
            columns |= columns_of(str(name), variable)
    # A stable sort: scheme and name come first, all others keep their order
    columns = {name: columns[name] for name in sorted(columns, key=lambda name: name not in _FIRST)}
    table = pd.DataFrame(
        {name: values.stack(row=HEAD).to_series() for name, values in columns.items()}
    )
    table = table.loc[:, table.notna().any()]  # drop labels without any number
    table = HeadTable(table.rename_axis(list(HEAD)).reset_index())
    table.attrs.update(provenance(run))
    return table
