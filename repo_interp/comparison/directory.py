"""What a comparison leaves in a directory: compare.nc, report.html and figures/ - all of it or none.

Everything is made in a hidden folder beside and moved into place at the end. Brings together comparisons and plots.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xarray as xr

from repo_interp.comparison.page import write_comparison
from repo_interp.errors import InputError
from repo_interp.run import write_run

_MADE = ("compare.nc", "report.html", "figures")
_UNFINISHED = ".unfinished"


def prepare_comparison(directory: str | os.PathLike[str], overwrite: bool) -> Path:
    """The output directory, not made yet. Raises InputError where it is a file, or holds what may not be replaced."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the comparison")
    if not overwrite and any((directory / name).exists() for name in _MADE):
        raise InputError(f"{directory} holds results already; give another --out, or --overwrite to replace them")
    foreign = sorted(p.name for p in directory.iterdir() if p.name not in (*_MADE, _UNFINISHED)) if directory.is_dir() else []
    if foreign:
        raise InputError(f"{directory} holds other things ({foreign[0]}); give --out a directory of its own")
    return directory


def publish_comparison(comparison: xr.DataTree, directory: Path) -> list[Path]:
    """Write the file of `comparison`, its figures and its page into `directory`, made where it is not there; return the files."""
    fresh = not directory.exists()
    unfinished = directory / _UNFINISHED
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_run(comparison, unfinished / "compare.nc")
        made = write_comparison(comparison, unfinished / "report.html", unfinished / "figures")
        for name in _MADE:
            if (directory / name).is_dir():
                shutil.rmtree(directory / name)
            os.replace(unfinished / name, directory / name)
        return [directory / "compare.nc", *(directory / file.relative_to(unfinished) for file in made)]
    except OSError as error:
        raise InputError(f"{directory} cannot be written ({error.strerror}); choose another --out") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if fresh and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
