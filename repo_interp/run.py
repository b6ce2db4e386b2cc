"""A run: labelled results of an analysis, with where they come from, in one netCDF file.

A run is an `xarray.DataTree` with one node a measure; `run.nc` holds it with one group a measure, opened by
`xarray.open_datatree("run.nc")` too. Every variable has `long_name` and `units`; nodes with an axis `layer` have the coordinate
`scheme (layer)`; the root's attributes say what was measured: checkpoint and its digest, layout, dtype, prompts and their digest,
versions, and each measure's parameters in its group's attributes. No clock time is stored: the same input gives the same bytes.

Knows nothing about models or measures.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.errors import InputError

_ENGINE = "h5netcdf"
_STATED = ("numpy", "torch", "transformer-lens", "transformers", "xarray", "repo-interp")


def make_run(groups: Mapping[str, xr.Dataset], provenance: Mapping[str, Any]) -> xr.DataTree:
    """Put groups and provenance together. Raises ValueError for a variable without `long_name` or `units`."""
    for name, group in groups.items():
        for variable, array in group.data_vars.items():
            if "long_name" not in array.attrs or "units" not in array.attrs:
                raise ValueError(f"{name}/{variable} has no long_name or no units")
    tree = xr.DataTree.from_dict({"/": xr.Dataset(), **{f"/{name}": group for name, group in groups.items()}})
    tree.attrs = dict(provenance)
    return tree


def with_schemes(group: xr.Dataset, schemes: Sequence[str]) -> xr.Dataset:
    """`group` with the coordinate `scheme (layer)`; unchanged where it has no axis `layer`. `schemes` names every layer's."""
    if "layer" not in group.dims:
        return group
    return group.assign_coords(scheme=("layer", [schemes[int(layer)] for layer in group.layer.values]))


def versions() -> dict[str, str]:
    """Versions of what computes a run, as attributes."""
    return {"python": platform.python_version()} | {name.replace("-", "_"): version(name) for name in _STATED}


def write_run(run: xr.DataTree, path: str | os.PathLike[str]) -> None:
    """Write `run` to `path` as netCDF, whole or not at all."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    encoding = {
        f"{node.path}": {name: _encoding(array) for name, array in node.data_vars.items()}
        for node in run.subtree
        if node.data_vars
    }
    try:
        run.to_netcdf(unfinished, engine=_ENGINE, encoding=encoding)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_run(path: str | os.PathLike[str]) -> xr.DataTree:
    """Read a run from a run file, or from the directory that has one as run.nc, into memory. Raises InputError when there is none."""
    path = Path(path)
    file = path / "run.nc" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"there is no run at {path}; wanted a run.nc, or the directory that `repo-interp analyze --out` wrote")
    try:
        with xr.open_datatree(file, engine=_ENGINE) as stored:
            return stored.load()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} is not a run file: {' '.join(str(error).split())[:200]}") from None


def _encoding(array: xr.DataArray) -> dict[str, Any]:
    if array.dtype.kind in "OUS" or array.size < 1024:
        return {}
    compressed: dict[str, Any] = {"zlib": True, "complevel": 4, "shuffle": True}
    if np.issubdtype(array.dtype, np.floating):
        compressed["_FillValue"] = np.nan
    return compressed
