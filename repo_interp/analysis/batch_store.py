"""Finished batches of an analysis on disk, so that an interrupted one goes on where it stopped.

A store belongs to one analysis, known by its fingerprint: the same checkpoint, prompts, measures and parameters. What another
analysis left there is thrown away. Batches are written whole or not at all. Without a directory nothing is kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from repo_interp.measures.statistics import Statistics

_ENGINE = "h5netcdf"


class BatchStore:
    """Statistics by batch number and measure."""

    def __init__(self, directory: str | os.PathLike[str] | None, fingerprint: str) -> None:
        """Open the store for the analysis `fingerprint`; None keeps nothing."""
        self._directory = None if directory is None else Path(directory)
        if self._directory is None:
            return
        mark = self._directory / "fingerprint"
        if not mark.is_file() or mark.read_text() != fingerprint:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(parents=True)
            mark.write_text(fingerprint)

    @property
    def finished(self) -> int:
        """How many batches are kept."""
        return 0 if self._directory is None else len(list(self._directory.glob("batch-*.nc")))

    def read(self, number: int) -> dict[str, Statistics] | None:
        """The statistics of batch `number` by measure, or None where they are not kept."""
        if self._directory is None or not (file := self._file(number)).is_file():
            return None
        with xr.open_datatree(file, engine=_ENGINE) as stored:
            tree = stored.load()
        return {
            name: Statistics(per_prompt=node["per_prompt"].to_dataset(), sums=node["sums"].to_dataset())
            for name, node in tree.children.items()
        }

    def write(self, number: int, statistics: Mapping[str, Statistics]) -> None:
        """Keep the statistics of batch `number`."""
        if self._directory is None:
            return
        groups = {"/": xr.Dataset()}
        for name, found in statistics.items():
            groups |= {f"/{name}/per_prompt": found.per_prompt, f"/{name}/sums": found.sums}
        unfinished = self._file(number).with_suffix(".unfinished")
        xr.DataTree.from_dict(groups).to_netcdf(unfinished, engine=_ENGINE)
        os.replace(unfinished, self._file(number))

    def clear(self) -> None:
        """Throw everything away: the analysis is done."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _file(self, number: int) -> Path:
        assert self._directory is not None
        return self._directory / f"batch-{number:05d}.nc"
