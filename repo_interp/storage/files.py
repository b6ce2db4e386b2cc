"""Files and directories that appear whole or not at all.

    with replaced(path) as unfinished: ...     `unfinished`, a file or directory, takes its place
    unsealed(sealed(content)) == content       and damaged content is refused

`path` stays as it was when writing fails, for lack of room, by an error or an interruption. This
module knows nothing about the content.
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
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from platformdirs import user_cache_path

from repo_interp.errors import InputError, quoted
from repo_interp.runtime.launcher import launched, machine

LOCK = ".lock"
"""Name of the file in a claimed directory by which others see that it is."""
LEFT_BEHIND = (".unfinished", ".previous")
"""Ends of the names, which begin with a dot, of remainders of a killed process."""
_TOLD_IN_RUST = re.compile(r"\(os error (\d+)\)|\bOs \{ code: (\d+)")
"""How safetensors and tokenizers, which are written in Rust, report errors of the system."""
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_SEAL = b"\nsha256 of what stands before this line: "


def cache_directory() -> Path:
    """Return where converted and fetched files are kept.

    Returns:
        $REPO_INTERP_CACHE, else repo_interp in the user's cache directory, as platformdirs finds it.

    Raises:
        InputError: The user has no home.
    """
    chosen = os.environ.get("REPO_INTERP_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return user_cache_path("repo_interp", appauthor=False)
    # platformdirs raises this where neither HOME nor the system knows the user.
    except RuntimeError:
        raise InputError(
            "there is no home directory to keep files in; name a directory with REPO_INTERP_CACHE"
        ) from None


@contextmanager
def replace_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file or directory that appears at `path` whole or not at all.

    The context returns a path next to `path`. At the end it is flushed, gets the umask's
    permissions and replaces `path`; a directory is replaced in one step if the system supports it.
    If nothing was written, or the block raises, `path` does not change and no other file is left.

    Args:
        path: File or directory to replace.

    Yields:
        Where to write.

    Raises:
        OSError: The disk refuses, or a file would replace a directory.
    """
    path = Path(path)
    # Next to the target, since a rename is atomic only within one disk; hidden by its dot.
    unfinished, previous = (
        path.with_name(f".{path.name}.{_writer()}{state}") for state in LEFT_BEHIND
    )
    # A process with the same number may have left one before.
    remove(unfinished)
    # A process that was killed between two renames has left the old content under `previous`.
    for left_behind in _of_killed_processes(path):
        if left_behind.suffix == previous.suffix and not path.exists():
            os.replace(left_behind, path)
        remove(left_behind)
    try:
        with _system_errors(path):
            yield unfinished
        # The caller decided to write nothing.
        if not unfinished.exists():
            return
        # Temporary files are private to their owner; results should have usual permissions.
        mask = _umask()
        for written in (unfinished, *(unfinished.rglob("*") if unfinished.is_dir() else ())):
            written.chmod((0o777 if written.is_dir() else 0o666) & ~mask)
            if written.is_file():
                # On the disk before the rename, or a power cut could leave
                # an empty file at the name.
                _flush(written)
        # os.replace would fail with a message that does not say which of the two is a directory.
        if path.is_dir() and not unfinished.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and unfinished.is_dir():  # the system replaces only files by files
            _exchange(unfinished, path, previous)
        else:
            os.replace(unfinished, path)
    finally:
        remove(unfinished)


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Name the file in system errors, including errors from Rust."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        # Libraries in Rust raise other errors, with the system's error number in the text.
        told = _TOLD_IN_RUST.search(str(error))
        if told is None:
            raise
        number = int(told[1] or told[2])
        raise OSError(number, os.strerror(number), str(path)) from None


def _exchange(unfinished: Path, path: Path, previous: Path) -> None:
    """Exchange two directories, in one step if the system supports it."""
    # Missing on systems other than Linux, and on older ones
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if (
        rename is not None
        and rename(_HERE, os.fsencode(unfinished), _HERE, os.fsencode(path), _EXCHANGE) == 0
    ):
        return
    # Otherwise in two steps: for a moment the path does not exist; `previous` restores it.
    os.replace(path, previous)
    try:
        os.replace(unfinished, path)
    # BaseException: an interruption here must restore the old directory too.
    except BaseException:
        os.replace(previous, path)
        raise
    remove(previous)


def is_left_behind(name: str) -> bool:
    """Tell whether a file is a remainder of a killed process.

    Args:
        name: Name of a file or directory.

    Returns:
        Whether it is half written, or a lock.
    """
    return name == LOCK or (name.startswith(".") and name.endswith(LEFT_BEHIND))


def sealed(content: bytes | memoryview) -> bytes:
    """Append the SHA-256 of content as its last line.

    Args:
        content: Bytes.

    Returns:
        Content and seal.
    """
    return bytes(content) + _SEAL + hashlib.sha256(content).hexdigest().encode()


def unsealed(content: bytes, name: object) -> bytes:
    """Remove the seal of content, if it has one.

    Args:
        content: Bytes.
        name: The file, for the message.

    Returns:
        Content without its seal.

    Raises:
        InputError: The seal states other bytes.
    """
    length = max(0, len(content) - len(sealed(b"")))
    # Only at the position of a seal, since content may contain the same words
    if not content.startswith(_SEAL, length):
        # Older files without seals, and files of other tools, are read as they are.
        return content
    if content != sealed(memoryview(content)[:length]):
        raise InputError(
            f"{name} is damaged: its bytes are not those that were written; take another "
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
    # Files are read in pieces: weights may be larger than memory.
    running = hashlib.sha256()
    for content in contents:
        if isinstance(content, bytes):
            running.update(content)
        else:
            with content.open("rb") as stream:
                hashlib.file_digest(stream, lambda: running)
    return running.hexdigest()


def path_of(given: Any, wanted: str) -> Path:
    """Return a path that a user gave.

    Args:
        given: Text or path.
        wanted: Description of the wanted path, for the message.

    Returns:
        The path.

    Raises:
        InputError: `given` is no path.
    """
    # Python refuses NUL in a path by a ValueError without the path.
    if not isinstance(given, str | os.PathLike) or "\0" in str(given):
        raise InputError(f"a path was wanted, {wanted}; got {quoted(given)}")
    return Path(given)


def file_to_write(given: Any, name: str) -> Path:
    """Return the path of a file that can be written.

    Args:
        given: Text or path.
        name: Usual name of such a file, for the message.

    Returns:
        The path.

    Raises:
        InputError: The path is a directory, or its parent is missing.
    """
    path = path_of(given, f"such as runs/mine/{name}")
    if path.is_dir():
        raise InputError(
            f"{path} cannot be written: this is a directory; name a file, such as {path / name}"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"{path} cannot be written: there is no directory {path.parent}; make it first"
        )
    return path


def regular(path: Path) -> Path:
    """Return a path that can be read; the reader refuses missing files and directories.

    Args:
        path: The path.

    Returns:
        `path`.

    Raises:
        OSError: It is a pipe, which may never give anything, or a device, which may never end.
    """
    # The reader refuses a missing path, since it knows the expected kind.
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG
    # Opening a named pipe would wait for a writer that never comes.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe or a device in place of a file", str(path))
    return path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text as UTF-8 with plain line ends, whole or not at all.

    Args:
        path: The file.
        text: Its content.
    """
    with replace_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def require_directory(path: Path) -> None:
    """Refuse a path that cannot be a directory.

    Args:
        path: The path.

    Raises:
        InputError: The path or one of its parents is a file.
    """
    for place in (path, *path.parents):
        # exists() is false of a broken link, and still no directory can be made there.
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise InputError(f"{place} is a file; wanted a directory")
            return


def require_writable(path: Path, another: str = "--out") -> None:
    """Refuse a directory in which nothing can be written; nothing is made or left there.

    Args:
        path: The directory.
        another: The option that names it, for the message.

    Raises:
        InputError: The disk refuses.
    """
    try:
        place = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
        # Tried, since permissions do not show that a disk is read-only, or virtual like /proc.
        with TemporaryDirectory(prefix=".", dir=place):
            pass
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}); choose another {another}"
        ) from None


def remove(path: Path) -> None:
    """Remove a file or directory, if there is one.

    Args:
        path: The path.
    """
    # For a link to a directory, remove the link and not its target.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _writer() -> str:
    """Number of this process, with its machine where several work together."""
    # On a shared disk two machines may have processes with equal numbers.
    return str(os.getpid()) if launched() == 1 else f"{os.getpid()}-{machine()}"


def _of_killed_processes(path: Path) -> Iterator[Path]:
    """Files next to `path` that were left by killed processes of this machine."""
    if not path.parent.is_dir():
        return
    for other in sorted(path.parent.iterdir()):
        if other.suffix not in LEFT_BEHIND or not other.name.startswith(f".{path.name}."):
            continue
        writer = other.name.removeprefix(f".{path.name}.").removesuffix(other.suffix)
        process, _, where = writer.partition("-")
        # Of another machine's processes nothing is known, so their files stay.
        if process.isdecimal() and where in ("", machine()) and not _is_running(int(process)):
            yield other


def _is_running(process: int) -> bool:
    try:
        # Signal 0 checks whether the process exists, and does nothing to it.
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # PermissionError means that the process belongs to another user, and runs.
    except (OSError, OverflowError):
        return True
    return True


def _umask() -> int:
    """Permissions that this process withholds; asking for them means setting them for a moment."""
    # No call only reads the mask.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush(file: Path) -> None:
    # fsync flushes the file with any open mode.
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
