"""What was measured once, kept by what it depends on, so that an interrupted or repeated recipe measures only what is new.

    key = SHA-256(recipe, what it depends on, the sources of repo_interp that compute, versions of torch, numpy and scipy)
    file = DIRECTORY/RECIPE-KEY.nc

A changed checkpoint, option or line of code that computes has another key: nothing old is ever taken for new. Commands and drawings
are no part of it: what was measured is drawn anew each time. Knows nothing about any paper.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import xarray as xr

_PACKAGE = Path(__file__).parents[2]
_ENGINE = "h5netcdf"
_SECONDS = "repo_interp_seconds"
_DRAWING = ("cli", "plots")


class Cache:
    """Measurements on the disk. `directory` None: nothing is kept."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = None if directory is None else Path(directory)
        self.seconds = 0.0
        """What all that was asked for took when it was measured, now or before."""

    def dataset(
        self, recipe: str, depends: Mapping[str, str | int | float | bool | None], measure: Callable[[], xr.Dataset]
    ) -> xr.Dataset:
        """What `measure` returns, from the disk where the same `recipe` was measured on the same things before.

        `depends` names all that decides the result beside the code: digests of checkpoints, options, seeds. Without a directory the
        result comes as it is; with one it always comes as it was read back, so that both times give the same.
        """
        if self._directory is None:
            return self._timed(measure)[0]
        file = self._directory / f"{recipe}-{_key(recipe, depends)}.nc"
        if not file.exists():
            measured, seconds = self._timed(measure)
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / ".gitignore").write_text("*\n", encoding="utf-8")
            unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
            try:
                measured.assign_attrs({_SECONDS: seconds}).to_netcdf(unfinished, engine=_ENGINE)
                os.replace(unfinished, file)
            finally:
                unfinished.unlink(missing_ok=True)
            return _read(file)[0]
        found, seconds = _read(file)
        self.seconds += seconds
        return found

    def _timed(self, measure: Callable[[], xr.Dataset]) -> tuple[xr.Dataset, float]:
        start = time.monotonic()
        measured = measure()
        seconds = time.monotonic() - start
        self.seconds += seconds
        return measured, seconds


def _read(file: Path) -> tuple[xr.Dataset, float]:
    with xr.open_dataset(file, engine=_ENGINE) as stored:
        found = stored.load()
    return found, float(found.attrs.pop(_SECONDS))


def sources_digest(without: tuple[str, ...] = ()) -> str:
    """SHA-256 over the sources of repo_interp, but for the folders `without`, and the versions of what computes."""
    return _sources_digest(tuple(without))


def _key(recipe: str, depends: Mapping[str, str | int | float | bool | None]) -> str:
    stated = json.dumps([recipe, dict(sorted(depends.items())), sources_digest(_DRAWING)])
    return hashlib.sha256(stated.encode()).hexdigest()[:24]


@functools.cache
def _sources_digest(without: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        place = file.relative_to(_PACKAGE)
        if place.parts[0] not in without:
            digest.update(place.as_posix().encode() + b"\0" + file.read_bytes())
    for package in ("torch", "numpy", "scipy"):
        digest.update(f"{package}={version(package)}".encode())
    return digest.hexdigest()
