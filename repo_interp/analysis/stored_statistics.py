"""How results of a batch are kept on the disk: statistics by measure and part, faults as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import xarray as xr

from repo_interp.analysis.faults import Fault
from repo_interp.errors import as_input_errors
from repo_interp.measures.statistics import STATISTICS, Statistics
from repo_interp.run import read_netcdf, write_netcdf
from repo_interp.storage.store import Form


def _write(results: Mapping[str, Statistics | Fault], file: Path) -> None:
    # The root is named even if all measures stopped: it carries the faults
    groups, faults = {"/": xr.Dataset()}, {}
    for name, result in results.items():
        if isinstance(result, Fault):
            # JSON, since the fault of a pass has the name "", which no group can have
            faults[name] = astuple(result)
        else:
            groups |= {f"/{name}/{part}": getattr(result, part) for part in STATISTICS}
    tree = xr.DataTree.from_dict(groups)
    tree.attrs["faults"] = json.dumps(faults)
    write_netcdf(tree, file)


def _read(file: Path) -> dict[str, Statistics | Fault]:
    tree = read_netcdf(file)
    with as_input_errors(f"{file} holds no statistics"):
        return {
            **{name: Fault(*fault) for name, fault in json.loads(tree.attrs["faults"]).items()},
            **{
                name: Statistics(**{part: node[part].to_dataset() for part in node.children})
                for name, node in tree.children.items()
            },
        }


BATCHES = Form(".nc", _write, _read)
"""Results of `Job.observe`."""
