"""Files and directories that appear whole or not at all, and directories to which one process at a
time writes.

    with replaced(path) as unfinished: ...     what is written to `unfinished`, a file or a directory beside `path`, takes its place
    claim(directory) ... release()             refused where another process holds the directory
    unsealed(sealed(content)) == content       and damaged content is refused

What stood at `path` stands there still when writing fails, for lack of room, by an error or an
interruption. Knows nothing about what is written.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError, Taken, one_line
from repo_interp.processes import launched, machine

LOCK = ".lock"
"""Name of the file in a claimed directory by which others see that it is."""
LEFT_BEHIND = (".unfinished", ".previous")
"""Ends of the names, which begin with a dot, of what a killed process leaves."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_TOLD_IN_RUST = re.compile(r"\(os error (\d+)\)|\bOs \{ code: (\d+)")
"""How safetensors and tokenizers, which are written in Rust, say what the system refused."""
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_SEAL = b"\nsha256 of what stands before this line: "


def cache_directory() -> Path:
    """Where what is converted and fetched is kept: $REPO_INTERP_CACHE, else repo_interp in the
    user's cache directory.

    Raises InputError where the user has no home.
    """
    chosen = os.environ.get("REPO_INTERP_CACHE")
    try:
        return (
            Path(chosen)
            if chosen
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repo_interp"
        )
    except RuntimeError:
        raise InputError(
            "there is no home directory to keep files in; name a directory with REPO_INTERP_CACHE"
        ) from None


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write a file or a directory to; it is flushed to the disk and moved
    to `path` at the end.

    What is written may be read and written by whom the process's umask lets, whatever library wrote
    it (safetensors: by its owner alone). A directory at `path` is replaced as a whole, in one step
    where the system has one, and by a directory alone. Where nothing was written, or the block
    raises, `path` stays as it was and nothing else is left. Raises OSError with a file name where
    the disk refuses, whichever library was told so, and where a file would replace a directory.
    """
    path = Path(path)
    unfinished, previous = (
        path.with_name(f".{path.name}.{_writer()}{state}") for state in LEFT_BEHIND
    )
    remove(unfinished)
    for left_behind in _of_killed_processes(path):
        if left_behind.suffix == previous.suffix and not path.exists():
            os.replace(left_behind, path)
        remove(left_behind)
    try:
        with _system_errors(path):
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
            _exchange(unfinished, path, previous)
        else:
            os.replace(unfinished, path)
    finally:
        remove(unfinished)


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """While the context lasts, what the system refuses is an OSError that names a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        told = _TOLD_IN_RUST.search(str(error))
        if told is None:
            raise
        number = int(told[1] or told[2])
        raise OSError(number, os.strerror(number), str(path)) from None


def _exchange(unfinished: Path, path: Path, previous: Path) -> None:
    """Let two directories take each other's place, in one step where the system can; else `path` is
    missing for a moment.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if (
        rename is not None
        and rename(_HERE, os.fsencode(unfinished), _HERE, os.fsencode(path), _EXCHANGE) == 0
    ):
        return
    os.replace(path, previous)
    try:
        os.replace(unfinished, path)
    except BaseException:
        os.replace(previous, path)
        raise
    remove(previous)


@dataclass(frozen=True)
class Claim:
    """A directory to which this process alone writes, until it releases it or ends, however it
    ends.
    """

    directory: Path
    lock: int
    """Its open lock file."""
    made: tuple[Path, ...]
    """Directories that were made for it, the deepest first."""

    def release(self) -> None:
        """Let others write here; a directory in which nothing is left goes."""
        (self.directory / LOCK).unlink(missing_ok=True)
        os.close(self.lock)
        with suppress(OSError):  # not empty
            self.directory.rmdir()
            for directory in self.made:
                directory.rmdir()


def claim(directory: Path) -> Claim:
    """`directory`, made where it is not there, for this process alone.

    Raises Taken where another has it, OSError where it cannot be.
    """
    import fcntl  # POSIX alone has it

    file, made = (
        directory / LOCK,
        tuple(parent for parent in directory.parents if not parent.exists()),
    )
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(file, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # another process has just removed the directory
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(file)):
                return Claim(directory, lock, made)
        except BlockingIOError:
            os.close(lock)
            raise Taken(
                f"another process writes to {directory}; wait for it, or give another --out"
            ) from None
        except FileNotFoundError:  # its holder has removed it, so that the next one makes another
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:  # a network disk without locks: nothing keeps others out
                return Claim(directory, lock, made)
            os.close(lock)
            raise
        os.close(lock)


def is_left_behind(name: str) -> bool:
    """Whether a file or directory `name` is what a killed process leaves: half of what it wrote, or
    its lock.
    """
    return name == LOCK or (name.startswith(".") and name.endswith(LEFT_BEHIND))


def sealed(content: bytes | memoryview) -> bytes:
    """`content` with a last line that says what its SHA-256 is."""
    return bytes(content) + _SEAL + hashlib.sha256(content).hexdigest().encode()


def unsealed(content: bytes, what: object) -> bytes:
    """`content` without its seal, where it has one.

    Raises InputError, naming `what` it is of, where the seal says otherwise.
    """
    length = max(0, len(content) - len(sealed(b"")))
    if not content.startswith(_SEAL, length):
        return content
    if content != sealed(memoryview(content)[:length]):
        raise InputError(
            f"{what} is damaged: its bytes are not those that were written; take another "
            "copy, or make it again"
        )
    return content[:length]


def digest_of(*contents: Path | bytes) -> str:
    """Return the SHA-256 of files and bytes, one after another.

    Args:
        *contents: Bytes, or paths of files.

    Returns:
        The digest in hexadecimal.
    """
    running = hashlib.sha256()
    for content in contents:
        if isinstance(content, bytes):
            running.update(content)
        else:
            with content.open("rb") as stream:
                hashlib.file_digest(stream, lambda: running)
    return running.hexdigest()


def path_of(given: Any, wanted: str) -> Path:
    """`given` as a path. Raises InputError, saying what was `wanted`, for what is none."""
    if not isinstance(given, str | os.PathLike) or "\0" in str(given):
        raise InputError(f"a path was wanted, {wanted}; got {one_line(repr(given), 80)}")
    return Path(given)


def file_to_write(given: Any, name: str) -> Path:
    """`given` as the path of a file that can be written, called `name`, say.

    Raises InputError for a directory, and where there is none.
    """
    path = path_of(given, f"such as runs/mine/{name}")
    if path.is_dir():
        raise InputError(
            f"{path} cannot be written: a directory stands there; name a file, such as "
            f"{path / name}"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"{path} cannot be written: there is no directory {path.parent}; make it first"
        )
    return path


def regular(path: Path) -> Path:
    """`path`, which is to be read.

    Raises OSError for a pipe, which may never give anything, and for a device, which may never end.

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
    """Raise InputError where neither a directory stands at `path` nor one can be made there, since
    a file stands in its way.
    """
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
    """The number of this process; with its machine where several work together, for on another one
    its number says nothing.
    """
    return str(os.getpid()) if launched() == 1 else f"{os.getpid()}-{machine()}"


def _of_killed_processes(path: Path) -> Iterator[Path]:
    """What processes of this machine that were killed have left beside `path`."""
    if not path.parent.is_dir():
        return
    for other in sorted(path.parent.iterdir()):
        if other.suffix not in LEFT_BEHIND or not other.name.startswith(f".{path.name}."):
            continue
        writer = other.name.removeprefix(f".{path.name}.").removesuffix(other.suffix)
        process, _, where = writer.partition("-")
        if process.isdecimal() and where in ("", machine()) and not _is_running(int(process)):
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
    """The permissions that this process withholds from its files.

    Asking means setting: in between, those of others are withheld.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
