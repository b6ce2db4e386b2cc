"""Files and directories that appear whole or not at all.

    with replaced(path) as unfinished: ...     what is written to `unfinished`, a file or a directory beside `path`, takes its place

What stood at `path` stands there still when writing fails, for lack of room, by an error or an interruption. Knows nothing about what is
written.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError, one_line
from repo_interp.processes import launched, machine


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write a file or a directory to; it is flushed to the disk and moved to `path` at the end.

    What is written may be read and written by whom the process's umask lets, whatever library wrote it (safetensors: by its owner alone).
    A directory at `path` is replaced as a whole, and by a directory alone. Where nothing was written, or the block raises, `path` stays as
    it was and nothing else is left. Raises OSError where the disk refuses, and where a file would replace a directory.
    """
    path = Path(path)
    unfinished, previous = (path.with_name(f".{path.name}.{_writer()}.{state}") for state in ("unfinished", "previous"))
    for left_behind in (unfinished, *_of_killed_processes(path)):
        remove(left_behind)
    try:
        yield unfinished
        if not unfinished.exists():
            return
        mask = _umask()
        for written in (unfinished, *(unfinished.rglob("*") if unfinished.is_dir() else ())):
            written.chmod((0o777 if written.is_dir() else 0o666) & ~mask)
            if written.is_file():
                _flush(written)
        if path.is_dir() and not unfinished.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and unfinished.is_dir():  # the system replaces files by files alone
            os.replace(path, previous)
        os.replace(unfinished, path)
    finally:
        remove(unfinished)
        if previous.exists() and not path.exists():
            os.replace(previous, path)
        remove(previous)


def path_of(given: Any, wanted: str) -> Path:
    """`given` as a path. Raises InputError, saying what was `wanted`, for what is none."""
    if not isinstance(given, str | os.PathLike):
        raise InputError(f"a path was wanted, {wanted}; got {one_line(repr(given), 80)}")
    return Path(given)


def regular(path: Path) -> Path:
    """`path`, which is to be read. Raises OSError for a pipe, which may never give anything, and for a device, which may never end.

    What is not there, or a directory, is for the reader to refuse.
    """
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe or a device in place of a file", str(path))
    return path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8 with plain line ends, whole or not at all."""
    with replaced(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def require_directory(path: Path) -> None:
    """Raise InputError where neither a directory stands at `path` nor one can be made there, since a file stands in its way."""
    for place in (path, *path.parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise InputError(f"{place} is a file; wanted a directory")
            return


def remove(path: Path) -> None:
    """Remove the file or directory at `path`, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _writer() -> str:
    """The number of this process; with its machine where several work together, for on another one its number says nothing."""
    return str(os.getpid()) if launched() == 1 else f"{os.getpid()}-{machine()}"


def _of_killed_processes(path: Path) -> Iterator[Path]:
    """What processes of this machine that were killed have left unfinished beside `path`."""
    if not path.parent.is_dir():
        return
    for other in sorted(path.parent.iterdir()):
        writer = other.name.removeprefix(f".{path.name}.").removesuffix(".unfinished")
        process, _, where = writer.partition("-")
        is_of_here = process.isdecimal() and where in ("", machine())
        if is_of_here and other.name == f".{path.name}.{writer}.unfinished" and not _is_running(int(process)):
            yield other


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _umask() -> int:
    """The permissions that this process withholds from its files. Asking means setting: in between, those of others are withheld."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
