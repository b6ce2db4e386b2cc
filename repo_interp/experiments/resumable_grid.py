"""A grid of measurements whose finished points stay on disk, so that an interrupted one goes on where it stopped.

    point = a name and a few numbers        DIRECTORY/NAME.json, written whole or not at all

Numbers come back as they were, to the last bit. Whoever gives the directory sees to it that it belongs to one experiment on one model
and its prompts. Without a directory nothing is kept. Knows nothing about what is measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repo_interp.files import write_text


class ResumableGrid:
    """Numbers by the name of a point."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = None if directory is None else Path(directory)

    def get_or_compute(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The point `name`: what `compute` returns - numbers and lists of numbers - or what it returned before."""
        if self._directory is None:
            return compute()
        file = self._directory / f"{name}.json"
        if not file.is_file():
            self._directory.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(compute()))
        return json.loads(file.read_text(encoding="utf-8"))
