"""The digest of a checkpoint: SHA-256 over config.json and the weight files.

The digest of large files is stored in the cache directory, and computed again if a file changed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from repo_interp.checkpoint_files.position_layout import COUNTED
from repo_interp.checkpoint_files.stated import stated
from repo_interp.checkpoint_files.stored import weight_files
from repo_interp.errors import InputError
from repo_interp.storage.files import cache_directory, digest_of, write_text

KEPT = 2**26
"""Smallest weights in bytes whose digest is stored: hashing them takes a twentieth of a second."""
SETTLED = 2 * 10**9
"""Age in nanoseconds from which on the digest of a file is stored."""


def checkpoint_digest(directory: Path) -> str:
    """Return the SHA-256 over config.json and the weight files of a checkpoint.

    The digest of large files is stored in the cache directory, and computed again if a file
    changed, that is, if its inode, size, or time of a change differs.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        Hexadecimal digits.
    """
    config, files = digested(directory), weight_files(directory)
    before = _states(files)
    # A write within the resolution of the clock would leave the times as they are.
    settled = max(max(times) for _, _, _, *times in before) < time.time_ns() - SETTLED
    if sum(size for _, _, size, *_ in before) < KEPT or not settled:
        return digest_of(config, *files)
    try:
        kept = cache_directory() / "digests" / digest_of(config, repr(before).encode())
    except InputError:  # There is no home directory
        return digest_of(config, *files)
    with suppress(OSError, ValueError):
        found = kept.read_text(encoding="ascii")
        if re.fullmatch("[0-9a-f]{64}", found):
            return found
    digest = digest_of(config, *files)
    if _states(files) == before:
        with suppress(OSError):  # The disk is full or read-only
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, digest)
    return digest


def _states(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Path, inode, size, and times of the last writing and change of files."""
    stated = [(str(file.resolve()), file.stat()) for file in files]
    return [(path, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns) for path, it in stated]


def digested(directory: Path) -> bytes:
    """Return config.json as digests of checkpoints have it, with the number of layers as a number.

    Args:
        directory: Directory of a checkpoint.

    Returns:
        Bytes of the file, as earlier versions wrote them.
    """
    file = directory / "config.json"
    content, marker = file.read_bytes(), json.dumps(COUNTED).encode()
    return (
        # Digests are over the number, so that files from before the text keep theirs.
        content
        if marker not in content
        else content.replace(marker, str(stated(directory)["num_hidden_layers"]).encode())
    )
