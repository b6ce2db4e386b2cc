"""A directory to which one process writes: filelock's lock on a file in it, gone when it ends.

held = claim(directory) ... held.release()     refused where another process holds it
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from repo_interp.errors import Taken
from repo_interp.storage.files import LOCK

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@dataclass(frozen=True)
class Claim:
    """A directory to which only this process writes, until it releases the claim or ends."""

    directory: Path
    lock: FileLock
    made: tuple[Path, ...]
    """Directories that were made for it, the deepest first."""

    def release(self) -> None:
        """Let others write here; remove directories in which nothing is left."""
        # Removed before it is released: whoever opens the name from now on makes a new file.
        (self.directory / LOCK).unlink(missing_ok=True)
        self.lock.release()
        with suppress(OSError):  # not empty
            self.directory.rmdir()
            for directory in self.made:
                directory.rmdir()


def claim(directory: Path) -> Claim:
    """Claim a directory for this process.

    Args:
        directory: The directory; made if missing.

    Returns:
        The claim.

    Raises:
        Taken: Another process has it.
        OSError: It cannot be made or locked.
    """
    # Noted before they are made, so that release removes no directory of somebody else's
    made = tuple(parent for parent in directory.parents if not parent.exists())
    lock = FileLock(directory / LOCK, timeout=0, mode=0o666, fallback_to_soft=False)
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:  # another process has just removed the directory
            continue
        except Timeout:
            raise Taken(
                f"another process writes to {directory}; wait for it, or give another --out"
            ) from None
        except OSError as error:
            # a network disk without locks: nothing keeps others out
            if error.errno not in _NO_LOCKS:
                raise
        return Claim(directory, lock, made)
