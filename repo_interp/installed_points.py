"""Entry points of the installed packages by group, and objects that a program gave a name.

Reading all declarations takes milliseconds, and a layout of thirty layers needs them thirty times.
The list is cached until the import path, or a folder on it, changes. Registered objects exist as
long as the process. This module imports nothing of the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@dataclass(frozen=True)
class RegisteredPoint:
    """An object that is registered by name in a group, without an entry point of a package."""

    name: str
    module: str
    value: Any

    source: Mapping[str, str] = field(default_factory=dict)
    """Identity of the object, to distinguish it from a later object with the same name."""

    dist: None = None
    """No package: `EntryPoint` has this field as well."""

    def load(self) -> Any:
        """Return the object.

        Returns:
            `value`.
        """
        return self.value


_REGISTERED: dict[str, dict[str, RegisteredPoint]] = {}


def register(group: str, name: str, value: Any, source: Mapping[str, str] | None = None) -> None:
    """Give an object a name until the process ends.

    Args:
        group: Group of entry points.
        name: Name, which must be free; an object that was registered under it is replaced.
        value: The object.
        source: Identity of the object, to distinguish it from another one of this name; None: none.
    """
    module = getattr(value, "__module__", None) or "__main__"
    point = RegisteredPoint(name, module, value, source or {})
    _REGISTERED.setdefault(group, {})[name] = point


def installed_points(group: str) -> tuple[EntryPoint | RegisteredPoint, ...]:
    """List entry points of installed packages, importing none, and registered objects.

    Args:
        group: Group of entry points.

    Returns:
        The entry points.
    """
    # Times of folders are part of the key, so a package installed meanwhile is seen.
    installed = _read(group, tuple((folder, _changed(folder)) for folder in sys.path))
    return (*installed, *_REGISTERED.get(group, {}).values())


@lru_cache(maxsize=16)
def _read(group: str, path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _changed(folder: str) -> int:
    """Time of the last change of a folder's entries."""
    try:
        # Installing puts a folder of metadata into it, which changes its time.
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
