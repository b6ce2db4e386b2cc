"""A grid of measurements whose finished points stay on disk, so that an interrupted one goes on where it stopped.

    point = a name and a few numbers        DIRECTORY/NAME.json, written whole or not at all, with a seal

Numbers come back as they were, to the last bit; a point whose file is damaged is measured again, with a warning. Several processes share
the points of a grid (`processes.spread`). Whoever gives the directory sees to it that it belongs to one experiment on one model and its
prompts (`belonging_to`): what another question left there is thrown away, with a warning. Without a directory nothing is kept.
Knows nothing about what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from repo_interp import processes
from repo_interp.errors import Note, warn
from repo_interp.files import replaced, sealed, unsealed, write_text

Point = dict[str, Any]
"""Numbers and lists of numbers, by name."""


class OtherQuestion(Note):
    """What is kept belongs to another question, and is thrown away."""


class Damaged(Note):
    """What is kept is damaged, and is measured again."""


def belonging_to(fingerprint: str, directory: Path) -> Path:
    """`directory`, emptied where it holds what belongs to another `fingerprint`; warns OtherQuestion before."""
    mark = directory / "fingerprint"
    if not mark.is_file() or mark.read_text(encoding="utf-8") != fingerprint:
        if mark.is_file() and any(path.is_file() and path != mark for path in directory.rglob("*")):
            warn(f"{directory} keeps finished parts of another question (prompts, measures or options differ)", OtherQuestion)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_text(mark, fingerprint)
    return directory


class ResumableGrid:
    """Numbers by the name of a point."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, every: float = 0.0) -> None:
        """Points are written to `directory` together, once `every` seconds have passed since the last were (0: each at once)."""
        self._directory, self._every = None if directory is None else Path(directory), every
        self._waiting: dict[str, str] = {}
        self._written = time.monotonic()

    def get_or_compute(
        self, points: Mapping[str, Callable[[], Point]], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Point]:
        """Every one of `points`: what its function returns, or what it returned before.

        `progress` is called with points that are there and in all. Of several processes each computes some, and all get all.
        """
        kept = processes.from_first(lambda: {name: point for name in points if (point := self._read(name)) is not None})
        waiting = [name for name in points if name not in kept]

        def compute(name: str) -> Point:
            point = points[name]()
            if self._directory is None:
                return point
            text = self._waiting[name] = json.dumps(point)
            if time.monotonic() - self._written >= self._every:
                self._write()
            return json.loads(text)

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(len(kept) + done, len(points))

        try:
            computed = dict(zip(waiting, processes.spread(waiting, compute, tell), strict=True))
        except BaseException:
            with suppress(OSError):  # the disk may be full: then that is what is raised
                if self._directory is not None:
                    self._write()
            raise
        return {name: kept[name] if name in kept else computed[name] for name in points}

    def _write(self) -> None:
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        while self._waiting:
            name = next(iter(self._waiting))
            with replaced(self._directory / f"{name}.json") as unfinished:
                unfinished.write_bytes(sealed(self._waiting[name].encode()))
            del self._waiting[name]
        self._written = time.monotonic()

    def _read(self, name: str) -> Point | None:
        """The point `name`; None where it is not kept, or damaged."""
        if self._directory is None or not (file := self._directory / f"{name}.json").is_file():
            return None
        try:
            point = json.loads(unsealed(file.read_bytes(), file))
            if not isinstance(point, dict):
                raise ValueError("no point")
            return point
        except (OSError, ValueError, RecursionError):
            warn(f"{file} is damaged: what it kept is measured again", Damaged)
            return None
