"""What an analysis leaves in a directory: run.nc, report.html and figures/ - all of it or none.

Everything is made in a hidden folder beside and moved into place at the end. Brings together runs and plots.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.pages.report import write_report
from repo_interp.run import write_run

STORE = ".batches"
"""Folder of an output directory in which finished batches wait."""

_MADE = ("run.nc", "report.html", "figures")
_UNFINISHED = ".unfinished"


def prepare(directory: str | os.PathLike[str], overwrite: bool) -> Path:
    """The output directory, made where it is not there yet. Raises InputError where it holds a run that may not be replaced."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the results")
    if not overwrite and any((directory / name).exists() for name in _MADE):
        raise InputError(f"{directory} holds a run already; give another --out, or --overwrite to replace it")
    foreign = (
        [] if not directory.is_dir() else [p.name for p in directory.iterdir() if p.name not in (*_MADE, STORE, _UNFINISHED)]
    )
    if foreign:
        raise InputError(f"{directory} holds other things ({sorted(foreign)[0]}); give --out a directory of its own")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory} cannot be made ({error.strerror}); choose another --out") from None
    return directory


def publish(run: xr.DataTree, directory: Path) -> list[Path]:
    """Write the run file, the figures that its groups allow and the report page; return the files."""
    unfinished = directory / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        write_run(run, unfinished / "run.nc")
        files = write_report(run, unfinished / "report.html", unfinished / "figures")
        made = [Path("run.nc"), *(file.relative_to(unfinished) for file in files)]
        for name in _MADE:
            target = directory / name
            if target.is_dir():
                shutil.rmtree(target)
            if (unfinished / name).exists():
                os.replace(unfinished / name, target)
        return [directory / name for name in made]
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def withdraw(directory: Path) -> None:
    """Take back an output directory in which nothing was published: nothing half-written is left."""
    shutil.rmtree(directory / STORE, ignore_errors=True)
    shutil.rmtree(directory / _UNFINISHED, ignore_errors=True)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()
