"""Entry points of the installed packages by group, read once as long as nothing is installed.

Reading all declarations takes milliseconds, and the layout of thirty layers asks thirty
times. The list counts until the import path, or a folder on it, has changed. Stands below
every floor.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


def installed_points(group: str) -> tuple[EntryPoint, ...]:
    """List the entry points that installed packages declare; imports none of them.

    Args:
        group: Group of entry points.

    Returns:
        The entry points.
    """
    # Times of folders are part of the key, so a package installed meanwhile is seen.
    return _read(group, tuple((folder, _changed(folder)) for folder in sys.path))


@lru_cache(maxsize=16)
def _read(group: str, path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _changed(folder: str) -> int:
    """When something was put into a folder of the import path, or taken out of it."""
    try:
        # Installing puts a folder of metadata into it, which changes its time.
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
