"""Entry points of the installed packages by group, read once as long as nothing is installed.

Reading what all packages declare takes milliseconds, and the layout of thirty layers asks thirty
times. What was read counts until the import path, or a folder on it, has changed. Stands below
every floor.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


def installed_points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of `group` that installed packages declare. Imports none of them."""
    return _read(group, tuple((folder, _changed(folder)) for folder in sys.path))


@lru_cache(maxsize=16)
def _read(group: str, path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _changed(folder: str) -> int:
    """When something was put into a folder of the import path, or taken out of it."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
