"""Charts of a paper, stored with their data, so that figures can be drawn again without a model.

    page.json       `chart` of a figure: function and arguments, where data are names of groups
    charts.nc.xz    these groups, as a compressed netCDF tree

This module knows nothing about single papers.
"""

from __future__ import annotations

import json
import lzma
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from repo_interp.errors import InputError
from repo_interp.plots.marks.chart import Drawing
from repo_interp.run import netcdf_of

CHARTS = "charts.nc.xz"
LARGEST = 2**22
"""Most bytes of the data of a stored chart."""
MOST_BYTES = 2**28
"""Most bytes of the unpacked data of a page."""
PACKAGES = ("position_papers.", "repo_interp.")
"""Packages with the functions of stored charts."""
DRAWN = ("PaperFigure", "Panels")
"""Types that these functions return."""
_ENGINE: Any = "h5netcdf"


def draw(chart: partial[Any]) -> Figure:
    """Draw a chart.

    Args:
        chart: Function with its arguments; it returns a figure or a chart of `repo_interp.plots`.

    Returns:
        The figure.
    """
    drawn = chart()
    return drawn.figure() if isinstance(drawn, Drawing) else drawn


def groups_of(run: xr.DataTree, **groups: xr.Dataset) -> xr.DataTree:
    """Make a run with a few groups, so that a chart stores only these.

    Args:
        run: Tree of a run, a group per measure.
        groups: Groups by name, or the parts of them that the chart draws.

    Returns:
        Tree with the attributes of `run`.
    """
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=run.attrs), **groups})


def write_charts(charts: Iterable[partial[Any]], file: Path) -> list[dict[str, Any]]:
    """Store charts with their data.

    Args:
        charts: Functions of a module with their arguments: datasets, arrays, trees and mappings
            of these, texts, numbers.
        file: File of the data.

    Returns:
        Record of each chart for page.json, empty for a chart of more data than `LARGEST`.
    """
    nodes: dict[str, xr.Dataset] = {}
    records: list[dict[str, Any]] = []

    def name_data(value: Any) -> Any:
        if isinstance(value, xr.DataTree):
            return {"tree": value.to_dict()}
        if isinstance(value, xr.DataArray):
            return {"array": value.to_dataset(name=value.name or "values")}
        if not isinstance(value, xr.Dataset):
            return value.item()
        place = f"/{len(nodes)}"
        # Float32 is finer than any figure, and half the size
        nodes[place] = value.drop_encoding().map(_single, keep_attrs=True)
        return {"data": place}

    for chart in charts:
        before = dict(nodes)
        arguments = json.loads(json.dumps(chart.args, default=name_data))
        if sum(nodes[place].nbytes for place in {*nodes} - {*before}) > LARGEST:
            nodes = before
            records.append({})
            continue
        function: Any = chart.func
        name = f"{function.__module__}:{function.__qualname__}"
        records.append({"function": name, "arguments": arguments})
    image = xr.DataTree.from_dict(nodes).to_netcdf(engine=_ENGINE)
    file.write_bytes(lzma.compress(bytes(image)))
    return records


def _unpacked(packed: bytes) -> bytes:
    """The content of an .xz file; raises ValueError for more than `MOST_BYTES`, or less than all."""
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_BYTES)
    content = reader.decompress(packed, MOST_BYTES)
    if not reader.eof:
        raise ValueError(f"it is cut off, or unpacks to more than {MOST_BYTES >> 20} MB")
    return content


def _single(values: xr.DataArray) -> xr.DataArray:
    return values.astype("float32") if values.dtype == "float64" else values


def read_charts(records: Iterable[Mapping[str, Any]], file: Path) -> list[partial[Any]]:
    """Read stored charts.

    Args:
        records: Records of charts, from `write_charts`.
        file: File of their data.

    Returns:
        The charts.

    Raises:
        InputError: The file is damaged, or another version of this package stored a chart that
            this one does not have.
    """
    try:
        nodes = netcdf_of(_unpacked(file.read_bytes()), file).to_dict()
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise InputError(f"{file} is damaged ({error}); make these figures again") from None

    def find_data(value: dict[str, Any]) -> Any:
        if isinstance(place := value.get("data"), str):
            return nodes[place]
        if isinstance(array := value.get("array"), xr.Dataset):
            return array[next(iter(array.data_vars))]
        if isinstance(groups := value.get("tree"), dict):
            return xr.DataTree.from_dict(groups)
        return value

    charts = []
    for record in records:
        name = record["function"]
        try:
            if not name.startswith(PACKAGES):
                raise ValueError("it is of another package")
            with warnings.catch_warnings():
                # Older charts have earlier names of modules.
                warnings.simplefilter("ignore", DeprecationWarning)
                function = resolve_name(name)
            # A file from outside must not call other functions of these packages.
            if getattr(function, "__annotations__", {}).get("return") not in DRAWN:
                raise ValueError("it draws nothing")
        except (ValueError, ImportError, AttributeError) as error:
            raise InputError(f"{file}: no chart {name!r}: {error}; make it again") from None
        charts.append(
            partial(function, *json.loads(json.dumps(record["arguments"]), object_hook=find_data))
        )
    return charts
