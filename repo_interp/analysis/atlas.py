"""The atlas of heads: one row per head, with all numbers that a run has of it.

    of group            variables, and their reduction                  columns
    atlas               scores and names, as they are                   name, induction, ...
    attention_mass      mass, mean over prompts                         mass[needle], ...
    position_sources    share: sources of f_phi                         reads[token], ...
                        kind: use by the head, in words                 kind
    components          band with most of the variance of the logits    band
    three_axis          r, mean over prompts                            three_axis_r
    fake_distance       r, mean over prompts                            fake_distance_r
                        semantic_share, mean over prompts               semantic_share
    rotation            number of slow dominating pairs                 slow_pairs
    effects             effect of an intervention                       effect[linearised], ...

A variable that the run lacks has no column. Knows run files; knows nothing about how any of it is
measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from repo_interp.analysis.heads import columns_of
from repo_interp.errors import InputError
from repo_interp.files import replaced, write_text
from repo_interp.measures.labels import described
from repo_interp.run import TABLES, require_run

if TYPE_CHECKING:
    from repo_interp.analysis.head_file import HeadTable

GROUP = "atlas"
NO_PARQUET = (
    "atlas.parquet was not written: it needs pyarrow (pip install "
    "'repo-interp[tables]'); atlas.csv has the same table"
)
_HEAD, _FIRST = ("layer", "head"), ("scheme", "name")


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
    if not set(_HEAD) <= set(group.dims):
        raise InputError(
            "this run has nothing for an atlas of heads; analyse with the experiment atlas: "
            "--experiments atlas"
        )
    import pandas as pd

    from repo_interp.analysis.head_file import HeadTable, provenance

    columns: dict[str, xr.DataArray] = {}
    if "scheme" in group.coords:
        columns["scheme"] = (
            group["scheme"].broadcast_like(group["head"]).transpose(*_HEAD).reset_coords(drop=True)
        )
    for name, variable in group.data_vars.items():
        # Scores by label are the evidence for `name`; rules and thresholds belong to no head
        if set(_HEAD) <= set(variable.dims) and "label" not in variable.dims:
            columns |= columns_of(str(name), variable)
    # A stable sort: scheme and name come first, all others stay in their order
    columns = {name: columns[name] for name in sorted(columns, key=lambda name: name not in _FIRST)}
    table = pd.DataFrame(
        {name: values.stack(row=_HEAD).to_series() for name, values in columns.items()}
    )
    table = table.loc[:, table.notna().any()]  # of a label that no head has a number for
    table = HeadTable(table.rename_axis(list(_HEAD)).reset_index())
    table.attrs.update(provenance(run))
    return table


def add_columns(groups: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Add numbers of single heads from other groups to the group `atlas`.

    Args:
        groups: Groups of a run by name; those without numbers of heads change nothing.

    Returns:
        The group at the layers and heads of the atlas; without a group `atlas`, the columns of the
        others.
    """
    base = groups.get(GROUP, xr.Dataset())
    found: dict[str, xr.DataArray] = {}
    for name, variable, column, become in _TAKEN:
        if name in groups and variable in groups[name]:
            mean = _over_prompts(groups[name][variable])
            values = mean if become is None else become(mean)
            # An empty column would suggest that something was measured
            if set(_HEAD) <= set(values.dims) and _says_something(values):
                found[column] = values
    if not found:
        return base
    # Measures and the atlas may have been made of different layers or heads
    place = {axis: base[axis] for axis in _HEAD if axis in base.coords}
    made = {name: _at_heads(values, place) for name, values in found.items()}
    # `_at_heads` drops coordinates, so without an atlas the schemes come from a measure
    if place or "scheme" not in next(iter(found.values())).coords:
        return base.assign(made)
    return xr.Dataset(made).assign_coords(scheme=next(iter(found.values()))["scheme"])


def write_atlas(
    run: xr.DataTree, directory: str | os.PathLike[str]
) -> tuple[list[Path], list[str]]:
    """Write the atlas of a run as CSV and Parquet.

    Args:
        run: Run of `analyze`.
        directory: Directory of the files, which exists.

    Returns:
        The files; and a line for the Parquet file where pyarrow is not installed.
    """
    directory, table = Path(directory), atlas(run)
    file, parquet = (directory / name for name in TABLES)
    write_text(file, table.to_csv(index=False, lineterminator="\n"))
    # pyarrow is optional; the CSV is enough without it.
    try:
        with replaced(parquet) as unfinished:
            table.to_parquet(unfinished, index=False, engine="pyarrow")
    except ImportError:
        return [file], [NO_PARQUET]
    return [file, parquet], []


def _over_prompts(values: xr.DataArray) -> xr.DataArray:
    return (
        values.mean("prompt", skipna=True, keep_attrs=True) if "prompt" in values.dims else values
    )


def _band(by_band: xr.DataArray) -> xr.DataArray:
    by_band = by_band.transpose("layer", "head", "band")
    # Heads without a rotation have NaN in all bands, where argmax would name the first band
    known = np.isfinite(by_band.values).any(-1)
    largest = np.where(np.isfinite(by_band.values), by_band.values, -np.inf).argmax(-1)
    text = np.where(known, by_band["band"].values.astype(object)[largest], "")
    band = by_band.isel(band=0, drop=True).copy(data=text)
    return described(
        band, "band of rotary components that accounts for most of the variance of the logits", "1"
    )


def _slow_pairs(slow: xr.DataArray) -> xr.DataArray:
    # -1 stands for layers without rotary pairs, which have no count rather than 0
    count = (slow == 1).sum("component").where((slow >= 0).any("component"))
    return described(count, "slow dominating rotary pairs", "pairs")


_TAKEN: tuple[tuple[str, str, str, Callable[[xr.DataArray], xr.DataArray] | None], ...] = (
    ("attention_mass", "mass", "mass", None),
    ("position_sources", "share", "reads", None),
    ("position_sources", "kind", "kind", None),
    ("components", "vaf_band", "band", _band),
    ("three_axis", "r", "three_axis_r", None),
    ("fake_distance", "r", "fake_distance_r", None),
    ("fake_distance", "semantic_share", "semantic_share", None),
    ("rotation", "slow_dominating", "slow_pairs", _slow_pairs),
    ("effects", "effect", "effect", None),
)
"""Group, its variable that belongs to the atlas, the name of the column, and the reduction of its
mean over prompts.
"""


def _says_something(values: xr.DataArray) -> bool:
    """Whether any head has a number, or a text."""
    return bool((values != "").any() if values.dtype.kind in "OU" else np.isfinite(values).any())


def _at_heads(values: xr.DataArray, place: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Return values at the layers and heads of an atlas, empty where they have none.

    Layer and head come first, without further coordinates.
    """
    values = values.reset_coords(drop=True).transpose("layer", "head", ...)
    empty: Any = "" if values.dtype.kind in "OU" else np.nan
    return values.reindex(place, fill_value=empty)
