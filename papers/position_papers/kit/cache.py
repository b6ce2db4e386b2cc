"""What was measured once, kept by what it depends on, so that an interrupted or repeated experiment
measures only what is new.

    key = SHA-256(function, source of its file, version of repo_interp, what it depends on)            file = DIRECTORY/NAME-KEY.nc
    finished points of a measurement that is not there as a whole yet                                  DIRECTORY/NAME-KEY.points/

A changed checkpoint, option or version of the instrument has another key, and so has a change in
the experiment's own file. A change of the instrument between two versions has not: delete the
directory after one. Knows nothing about any paper.
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
"""A measurement of at most so many bytes stays in memory once it is read, since several experiments
read the same one.
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

        Long ones call `progress` with what is being done, how much of it is done, and of how much.
        """
        self._directory, self.progress = None if directory is None else Path(directory), progress
        self._small: dict[Path, Any] = {}

    def get(self, function: Callable[..., Kept], depends: Depends, *given: Any) -> Kept:
        """`function(*given)`, from the disk where the same function measured the same before.

        `function` stands at the level of a module; `depends` names all that decides its result
        beside its code: digests of checkpoints, options, seeds. Without a directory the result
        comes as it is; with one it always comes as it was read back, so that both times give the
        same.
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
            with FileLock(lock):  # of two processes that want the same, one measures it
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
        """What keeps the finished points of `function` until the whole is there; measurements of
        hours take it as an argument.
        """
        return Store(None if self._directory is None else self._place(function, depends, "points"))

    def _place(self, function: Callable[..., Any], depends: Depends, ending: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{_name(function)}-{_key(function, depends)}.{ending}"


def _name(function: Callable[..., Any]) -> str:
    """Where a function stands, as part of a file's name: "repo.mirror.measure"."""
    module = function.__module__.removeprefix("position_papers.")
    return f"{module}.{function.__name__.lstrip('_')}"


def _key(function: Callable[..., Any], depends: Depends) -> str:
    source = inspect.getsourcefile(function)
    if source is None:
        raise ValueError(f"{function!r} has no source file; wanted a function of a module")
    written = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    key = json.dumps([_name(function), dict(sorted(depends.items())), written, __version__])
    return hashlib.sha256(key.encode()).hexdigest()[:24]
