"""A directory of results, to which one process at a time writes.

It holds run.nc or compare.nc, report.html, figures/, and the table of heads as
.csv and .parquet, by the name of its group.

    with claim_results(out, "niah-repo", overwrite) as results:
            refused where it holds other things or another process writes
        run = analyze(..., store=results.store)
        published = results.publish(run, write_report)

The data file is written first, and stays even if figures or the page fail: `Published.failures`
names failed drawings. Each of the three appears completely or not at all. Without a published run
no file is left, except finished batches after an interruption or on a full disk, from which the
same command continues.

This module knows run files, and nothing about how a run is measured or drawn.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import xarray as xr

from repo_interp.entry_points import VIEWS, names
from repo_interp.errors import InputError, Taken, Unfinished
from repo_interp.run import write_run
from repo_interp.runtime import processes
from repo_interp.storage.claims import Claim, claim
from repo_interp.storage.files import (
    LOCK,
    is_left_behind,
    remove,
    replace_whole,
    require_writable,
    write_text,
)

RUN, COMPARISON = "run.nc", "compare.nc"
"""Data files of the two kinds of results."""
NO_PARQUET = (
    "{name}.parquet was not written: it needs pyarrow (pip install "
    "'repo-interp[tables]'); {name}.csv has the same table"
)
_TABLES = (".csv", ".parquet")
_PAGE, _FIGURES = "report.html", "figures"
_STORE = ".batches"
# No space, quota exceeded, file too large: the user can make room and go on
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Draw = Callable[[xr.DataTree, Path, Path], Sequence[str]]
"""Writes the page (a file) and the figures (a directory, not there yet) of a run; returns one line
per failure.
"""


@dataclass(frozen=True)
class Published:
    """Files that were written, and one line per figure, page or table that failed."""

    files: tuple[Path, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """One line per table that could not be written."""

    @property
    def tables(self) -> tuple[Path, ...]:
        """The tables among the files."""
        return tuple(file for file in self.files if file.name in _known_tables())

    @property
    def figures(self) -> int:
        """Number of figures, in one format or more."""
        return len({file.stem for file in self.files if file.parent.name == _FIGURES})


class Results:
    """A directory to which only this process writes results; made by `claim_results`."""

    def __init__(self, directory: Path, data_file: str, claim: Claim | None) -> None:
        """`claim`: None where another process of the command has claimed `directory`."""
        self.directory, self.data_file = directory, directory / data_file
        self.page, self.figures, self.store = (
            directory / _PAGE,
            directory / _FIGURES,
            directory / _STORE,
        )
        self._claim = claim

    @property
    def has_batches(self) -> bool:
        """Whether there are finished batches or points from which an analysis can continue."""
        return any(path.suffix in (".nc", ".json") for path in self.store.rglob("*"))

    def publish(self, run: xr.DataTree, draw: Draw) -> Published:
        """Write a run, then draw its page and figures, in the place of older results.

        Args:
            run: Run to write.
            draw: Function that draws the page and the figures.

        Returns:
            The files that were written, and failures.
        """
        self.write(run)
        return self.draw(run, draw)

    def write(self, run: xr.DataTree) -> None:
        """Write a run in the place of an older one.

        With several processes only the process that claimed the directory writes.

        Args:
            run: Run to write.

        Raises:
            InputError: The run cannot be written; the older one stays then.
        """
        if self._claim is None:
            return
        try:
            write_run(run, self.data_file)
        except OSError as error:
            raise InputError(
                f"{self.data_file} cannot be written ({error.strerror or error}); nothing "
                "was changed"
            ) from None
        # They show the older run, and a crash before `draw` must not leave them with the new one
        for path in (self.page, self.figures, *map(self.directory.joinpath, _known_tables())):
            remove(path)

    def draw(self, run: xr.DataTree, draw: Draw) -> Published:
        """Draw the page and the figures of a run that was written.

        A failure of `draw` leaves the run.

        Args:
            run: Run that was written.
            draw: Function that draws the page and the figures.

        Returns:
            The files that were written, and failures.
        """
        tables, notes = self._tables(run)
        try:
            with replace_whole(self.page) as page, replace_whole(self.figures) as figures:
                failures = tuple(draw(run, page, figures))
        except OSError as error:
            failures = (f"figures and page cannot be written ({error.strerror or error})",)
        drawn = sorted(self.figures.iterdir()) if self.figures.is_dir() else []
        return Published(
            (self.data_file, *([self.page] if self.page.exists() else []), *tables, *drawn),
            failures,
            tuple(notes),
        )

    def _tables(self, run: xr.DataTree) -> tuple[list[Path], list[str]]:
        """Write the table of heads of a run that has one; return files and lines on failures."""
        if self.data_file.name != RUN:
            return [], []
        from repo_interp.plots.view_catalogue import view_of_heads

        view = view_of_heads(run)
        table = None if view is None or view.heads is None else view.heads(run)
        if view is None or table is None:
            return [], []
        try:
            return write_table(table, self.directory, view.group)
        except OSError as error:
            return [], [f"the table of heads cannot be written ({error.strerror or error})"]

    def withdraw(self) -> None:
        """Remove the finished batches."""
        if self._claim is not None:
            remove(self.store)

    def release(self) -> None:
        """Let other processes write here, and remove the directory if it is empty."""
        if self._claim is not None:
            self._claim.release()


def _known_tables() -> set[str]:
    """Names of files of tables that a view can give."""
    return {f"{group}{ending}" for group in names(VIEWS) for ending in _TABLES}


def write_table(table: Any, directory: Path, name: str) -> tuple[list[Path], list[str]]:
    """Write a table of heads as CSV and Parquet.

    Args:
        table: A pandas DataFrame.
        directory: Directory of the files, which exists.
        name: Name of the files without their endings.

    Returns:
        The files; and a line for the Parquet file where pyarrow is not installed.
    """
    file, parquet = (directory / f"{name}{ending}" for ending in _TABLES)
    write_text(file, table.to_csv(index=False, lineterminator="\n"))
    # pyarrow is optional; the CSV is enough without it.
    try:
        with replace_whole(parquet) as unfinished:
            table.to_parquet(unfinished, index=False, engine="pyarrow")
    except ImportError:
        return [file], [NO_PARQUET.format(name=name)]
    return [file, parquet], []


def stage(directory: Path) -> Literal["nothing", "begun", "measured", "finished"]:
    """Return the stage of the work on the results in a directory.

    Args:
        directory: Directory of results.

    Returns:
        "measured" lacks the page and the figures, which come last.
    """
    if (directory / _STORE).is_dir():
        return "begun"
    if not (directory / RUN).is_file():
        return "nothing"
    return "finished" if (directory / _PAGE).is_file() else "measured"


@contextmanager
def claim_results(
    directory: str | os.PathLike[str] | None,
    default: str,
    overwrite: bool = False,
    data_file: str = RUN,
) -> Iterator[Results]:
    """Claim a directory of results for this process.

    Errors leave only finished batches, if the same command can continue from them. With several
    processes of one command, the first claims the directory for all, and only it publishes.

    Args:
        directory: Directory, created if needed; None: runs/`default`, with a number where that
            exists.
        default: Name below runs.
        overwrite: Whether to replace results.
        data_file: Name of the data file.

    Yields:
        The results.

    Raises:
        Taken: The directory is a file, holds other things, or results that `overwrite` does not
            allow to replace, or another process writes to it.
        InputError: The directory cannot be written.
    """
    claimed: list[Results] = []

    def first() -> Path:
        claimed.append(
            _free(Path("runs") / default, data_file)
            if directory is None
            else _claim(Path(directory), data_file, overwrite)
        )
        return claimed[0].directory

    place = processes.from_first(first)
    # Other processes know the directory, but hold no claim and write nothing.
    results = claimed[0] if claimed else Results(place, data_file, None)
    try:
        yield results
    # These leave finished batches, from which the same command can continue.
    except (KeyboardInterrupt, Taken, Unfinished):
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            results.withdraw()
            raise
        raise InputError(
            f"{results.directory} cannot be written ({error.strerror}); make room and give "
            "the same command"
        ) from None
    except BaseException:
        results.withdraw()
        raise
    finally:
        results.release()


def require_claimable(
    directory: str | os.PathLike[str] | None, overwrite: bool = False, data_file: str = RUN
) -> None:
    """Check the conditions of `claim_results` before there is a run to write.

    Args:
        directory: Directory of results; None: one that is free.
        overwrite: Whether to replace results.
        data_file: Name of the data file.

    Raises:
        InputError: As by `claim_results`.
    """
    if directory is None or not processes.is_first():
        return
    place = Path(directory)
    with suppress(OSError):  # such as a name that is too long, which is refused below
        _require_free(place, data_file, overwrite)
    require_writable(place)
    if (place / LOCK).exists():  # of a process that writes there, or was killed
        claim(place).release()


def _free(first: Path, data_file: str) -> Results:
    """The first of `first`, `first`-2, ... that is not taken."""
    for number in count(1):
        with suppress(Taken):
            return _claim(
                first if number == 1 else first.with_name(f"{first.name}-{number}"),
                data_file,
                overwrite=False,
            )
    # `count` does not end
    raise AssertionError


def _claim(directory: Path, data_file: str, overwrite: bool) -> Results:
    try:
        _require_free(directory, data_file, overwrite)
        results = Results(directory, data_file, claim(directory))
        try:
            # another process may have published in between
            _require_free(directory, data_file, overwrite)
            for path in directory.iterdir():
                # The lock is the one that this process holds
                if path.name != LOCK and is_left_behind(path.name):
                    remove(path)
        except BaseException:
            results.release()
            raise
    except OSError as error:
        raise InputError(
            f"{directory} cannot be written ({error.strerror or error}); choose another --out"
        ) from None
    return results


def _require_free(directory: Path, data_file: str, overwrite: bool) -> None:
    """Raise Taken where the directory is a file, or holds other things or kept results."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise Taken(f"{directory} is a file; wanted a directory for the results")
    # Half-written files of a process that was killed are no results; `_claim` removes them
    there = {path.name for path in directory.iterdir() if not is_left_behind(path.name)}
    if not overwrite and data_file == RUN and stage(directory) == "measured":
        raise Taken(
            f"{directory} holds numbers without a page; give --resume to draw it, another --out, or "
            "--overwrite to measure again"
        )
    if not overwrite and there & {data_file, _PAGE, _FIGURES}:
        raise Taken(
            f"{directory} holds results already; give another --out, or --overwrite to replace them"
        )
    foreign = sorted(there - {data_file, _PAGE, _FIGURES, _STORE} - _known_tables())
    if foreign:
        raise Taken(
            f"{directory} holds other things ({foreign[0]}); give --out a directory of its own"
        )
