"""Cache of measurements, by all that they depend on, so that an interrupted or repeated experiment
measures only what is new.

    key = SHA-256(function, source of its file, version of repo_interp, dependencies)                  file = DIRECTORY/NAME-KEY.nc
    finished points of an unfinished measurement                                                       DIRECTORY/NAME-KEY.points/

The key changes with a checkpoint, an option, the version of repo_interp, and the file of the
experiment. It does not change with edits of repo_interp between two versions: delete the directory
after such an edit. This module knows nothing about single papers.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import xarray as xr
from filelock import FileLock

from repo_interp import __version__
from repo_interp.run import read_netcdf, write_netcdf
from repo_interp.storage.store import Store

Kept = TypeVar("Kept", xr.Dataset, xr.DataTree)
SMALL = 1_000_000
"""Largest size in bytes of a measurement that stays in memory after reading, since several
experiments read it.
"""
Depends = Mapping[str, str | int | float | bool | None]


class Cache:
    """Measurements on the disk. `directory` None: nothing is kept."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        progress: Callable[..., None] = lambda *done: None,
    ) -> None:
        """Keep measurements in `directory`.

        Long measurements call `progress` with their name, the finished amount, and the total.
        """
        self._directory, self.progress = None if directory is None else Path(directory), progress
        self._small: dict[Path, Any] = {}

    def get(self, function: Callable[..., Kept], depends: Depends, *given: Any) -> Kept:
        """Return `function(*given)`, from the disk if the same call was measured before.

        `function` must be at the top level of a module. `depends` has everything that determines
        its result besides the code: digests of checkpoints, options, seeds. With a directory the
        result is always read back from the file, so that the first and later calls return the same.
        """
        if self._directory is None:
            return function(*given)
        file = self._place(function, depends, "nc")
        if file in self._small and file.exists():
            return self._small[file].copy(deep=True)
        if not file.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / ".gitignore").write_text("*\n", encoding="utf-8")
            lock = file.with_suffix(".lock")
            with FileLock(lock):  # of two processes with the same request, one measures
                try:
                    if not file.exists():
                        write_netcdf(function(*given), file)
                        shutil.rmtree(file.with_suffix(".points"), ignore_errors=True)
                finally:
                    with suppress(OSError):
                        lock.unlink()
        tree = read_netcdf(file)
        kept: Any = tree if tree.children else tree.to_dataset()
        if kept.nbytes <= SMALL:
            self._small[file] = kept.copy(deep=True)
        return kept

    def points(self, function: Callable[..., xr.Dataset], depends: Depends) -> Store:
        """Return the store of finished points of `function`, until the whole result exists.
        Measurements that take hours get it as an argument.
        """
        return Store(None if self._directory is None else self._place(function, depends, "points"))

    def _place(self, function: Callable[..., Any], depends: Depends, ending: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{_name(function)}-{_key(function, depends)}.{ending}"


def _name(function: Callable[..., Any]) -> str:
    """Return the path of a function for a file name: "repo.mirror.measure"."""
    module = function.__module__.removeprefix("position_papers.")
    return f"{module}.{function.__name__.lstrip('_')}"


def _key(function: Callable[..., Any], depends: Depends) -> str:
    source = inspect.getsourcefile(function)
    if source is None:
        raise ValueError(f"{function!r} has no source file; wanted a function of a module")
    written = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    key = json.dumps([_name(function), dict(sorted(depends.items())), written, __version__])
    return hashlib.sha256(key.encode()).hexdigest()[:24]
