"""Values by key on disk, from which interrupted work continues.

Batches of an analysis, points of an experiment, answers, measurements:

    store.get_or_compute({key: compute, ...})     {key: value, ...}: results of `compute`, new or from before
    store.stream({key: compute, ...})             only the values, one after the other, if they do not fit into memory together
    DIRECTORY/KEY.json, DIRECTORY/KEY.nc          a value, by its `Form`: written as a whole or not at all, with a seal

A stored value is restored to the last bit; if its file is damaged, it is computed again, with a
note. Several processes share the keys (`processes.share_work`). Values are written only after some
time has passed: a short analysis writes nothing, and an interrupted one writes the values that it
still has in memory. Without a directory nothing is kept. This module knows nothing about the
computations.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repo_interp.errors import Note, warn
from repo_interp.runtime import processes
from repo_interp.storage.files import replace_whole, sealed, unsealed, write_text

_WRITING_SHARE = 0.1
"""Most share of the time for writing, if writing takes long relative to computing, as with small
batches of a small model.
"""
_MOST_WAITING = 256
"""Most values that one of several processes keeps in memory before it writes them.
"""
Progress = Callable[[int, int], None]
"""Called with how many values there are so far, and in all."""


class OtherQuestion(Note):
    """Kept values belong to another question, and are thrown away."""


class Damaged(Note):
    """A kept value is damaged, and is computed again."""


@dataclass(frozen=True)
class Form:
    """Format of values of one kind.

    `read` raises ValueError or OSError for a damaged file.
    """

    suffix: str
    write: Callable[[Any, Path], None]
    read: Callable[[Path], Any]


def _write_point(point: dict[str, Any], file: Path) -> None:
    with replace_whole(file) as unfinished:
        # Sealed, since a damaged digit is JSON as well
        unfinished.write_bytes(sealed(json.dumps(point).encode()))


def _read_point(file: Path) -> dict[str, Any]:
    point = json.loads(unsealed(file.read_bytes(), file))
    if not isinstance(point, dict):
        raise ValueError("no point")
    return point


POINTS = Form(".json", _write_point, _read_point)
"""Numbers and lists of numbers by name."""


@dataclass
class _Computed:
    """A value, or None if it is only on disk."""

    value: Any


@dataclass
class _Waiting:
    """Computed values that are not written yet, and how long writing has taken."""

    every: float
    values: dict[Path, tuple[Form, _Computed]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    writing: float = 0.0

    def __post_init__(self) -> None:
        self.last = self.begun

    def add(self, file: Path, form: Form, computed: _Computed) -> None:
        self.values[file] = form, computed
        # Each of several processes has results in memory, and loses them when it is killed.
        while processes.launched() > 1 and len(self.values) > _MOST_WAITING:
            self.write_first()
        if time.monotonic() - self.last < self.every:
            return
        # 0 writes at once; else writing takes at most a tenth of the time so far.
        while self.values and (
            self.every == 0 or self.writing < _WRITING_SHARE * (time.monotonic() - self.begun)
        ):
            self.write_first()
        self.last = time.monotonic()

    def write_first(self) -> None:
        start, file = time.monotonic(), next(iter(self.values))
        form, computed = self.values[file]
        # Keys may name subfolders, and clear removes them.
        file.parent.mkdir(parents=True, exist_ok=True)
        form.write(computed.value, file)
        # Only after it was written: an interruption in between must not lose it.
        del self.values[file]
        # The memory is freed; who wants the value reads it back.
        computed.value = None
        self.writing += time.monotonic() - start

    def write_all(self) -> None:
        while self.values:
            self.write_first()


class Store:
    """Values by key.

    As a context, it writes values in memory when the context ends with an error or an
    interruption.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        every: float = 0.0,
        question: Callable[[], str] | None = None,
    ) -> None:
        """Open a directory, or keep nothing.

        Values are written to `directory` together, `every` seconds after the last write (0: at
        once). `question` returns a digest of all inputs that affect the values; values of another
        question are deleted, after a warning OtherQuestion. None: only the keys identify values.
        """
        self._directory = None if directory is None else Path(directory)
        self._waiting = _Waiting(every)
        if directory is not None and question is not None:
            # The first process decides and empties; the others wait for it in from_first.
            processes.from_first(lambda: _make_room(question(), Path(directory)))

    def part(self, name: str) -> Store:
        """Return the store of a part of the work, in a subdirectory.

        Values wait and are written with all others.

        Args:
            name: Name of the subdirectory.

        Returns:
            The store.
        """
        # A shallow copy: the parts share `_waiting`, so that time is counted once for all.
        part = copy(self)
        part._directory = None if self._directory is None else self._directory / name
        return part

    def get_or_compute(
        self,
        computations: Mapping[str, Callable[[], Any]],
        progress: Progress | None = None,
        form: Form = POINTS,
    ) -> dict[str, Any]:
        """Return values by key, computed or read.

        Several processes divide the computations.

        Args:
            computations: Function of every key.
            progress: Receives the numbers of values done and in all.
            form: Form of the files.

        Returns:
            Values by key, in the order of the keys.
        """
        return dict(zip(computations, self.stream(computations, progress, form), strict=True))

    def stream(
        self,
        computations: Mapping[str, Callable[[], Any]],
        progress: Progress | None = None,
        form: Form = POINTS,
    ) -> Iterator[Any]:
        """Return the values of `get_or_compute` one after the other.

        A single process computes a value on demand.

        Args:
            computations: Function of every key.
            progress: Receives the numbers of values done and in all.
            form: Form of the files.

        Returns:
            Iterator of values, in the order of the keys.
        """
        shared = (
            self._computed_together(computations, progress, form) if processes.count() > 1 else {}
        )
        # Progress was already reported while processes shared the work.
        return self._in_order(computations, shared, None if shared else progress, form)

    def clear(self) -> None:
        """Throw everything away: the work is done."""
        if self._directory is not None and processes.is_first():
            shutil.rmtree(self._directory, ignore_errors=True)

    def write(self) -> None:
        """Write all values in memory."""
        self._waiting.write_all()

    def __enter__(self) -> Store:
        """The store itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Write all values in memory after an error."""
        # GeneratorExit means that the caller stopped iterating, which is no failure.
        if kind not in (None, GeneratorExit):
            with suppress(OSError):  # the disk may be full: then that is raised
                self.write()

    def _computed_together(
        self, computations: Mapping[str, Callable[[], Any]], progress: Progress | None, form: Form
    ) -> dict[str, _Computed]:
        """Compute absent values by all processes; a value that was written is not sent."""
        # Determined once: a process may write a value that another one would find missing.
        missing = processes.from_first(
            lambda: [key for key in computations if self._read(key, form) is None]
        )
        there, total = len(computations) - len(missing), len(computations)

        def compute(key: str) -> _Computed:
            return self._keep(key, _Computed(computations[key]()), form)

        def tell(done: int, _: int) -> None:
            if progress is not None:
                progress(there + done, total)

        # An error in any process: all write their values before it is raised.
        with self:
            return dict(zip(missing, processes.share_work(missing, compute, tell), strict=True))

    def _in_order(
        self,
        computations: Mapping[str, Callable[[], Any]],
        shared: dict[str, _Computed],
        progress: Progress | None,
        form: Form,
    ) -> Iterator[Any]:
        for done, (key, compute) in enumerate(computations.items(), 1):
            # Values are computed inside the context, so that an interruption keeps the earlier
            # ones.
            with self:
                # Popped, so that a yielded value is freed
                value = shared.pop(key, _Computed(None)).value
                # None also for a value that was written, and so was not sent by its process
                value = self._read(key, form) if value is None else value
                if value is None:
                    value = compute()
                    self._keep(key, _Computed(value), form)
                if progress is not None:
                    progress(done, len(computations))
            yield value

    def _keep(self, key: str, computed: _Computed, form: Form) -> _Computed:
        if self._directory is not None:
            self._waiting.add(self._directory / f"{key}{form.suffix}", form, computed)
        return computed

    def _read(self, key: str, form: Form) -> Any:
        """The value of `key`; None if it is not kept, or damaged."""
        if (
            self._directory is None
            or not (file := self._directory / f"{key}{form.suffix}").is_file()
        ):
            return None
        try:
            return form.read(file)
        # Damage is a false seal or broken JSON, both ValueErrors, or
        # nesting that exhausts the stack.
        except (OSError, ValueError, RecursionError):
            warn(f"{file} is damaged: its values are measured again", Damaged)
            return None


NOT_KEPT = Store()
"""A store without a directory."""


def _make_room(question: str, directory: Path) -> None:
    """Make `directory`, and empty it if it belongs to another `question`."""
    mark = directory / "fingerprint"
    if mark.is_file() and mark.read_text(encoding="utf-8") == question:
        return
    # Only files count as work: empty folders are left by interrupted processes.
    if mark.is_file() and any(path.is_file() and path != mark for path in directory.rglob("*")):
        warn(
            f"{directory} keeps finished parts of another question (prompts, measures or "
            "options differ)",
            OtherQuestion,
        )
    # The mark is written last, so an interruption before leaves a folder that is emptied again.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_text(mark, question)
