"""A file system of 2 MB that is nearly full: a command that finds no room says so in one line, and what stood there stands.

A tmpfs is mounted where this is allowed; else no file may grow beyond the room that is left (RLIMIT_FSIZE), and the row says so. Exit code
2: nothing was changed. Exit code 1: the numbers are there and whole, and the line says which pictures are not.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trust.forked import Done, command, files, preload
from trust.kills import half_written
from trust.outcome import Outcome, Row
from trust.subjects import Subject, hidden, subjects

SIZE = 2 * 2**20
ROOMS = (0, 4096, 32768, 131072)
"""Bytes that are left."""


def run(given: Namespace) -> Outcome:
    """Starve every command of room."""
    preload()
    rows, details = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for subject in subjects(Path(scratch)):
            if given.only and subject.name not in given.only:
                continue
            before = earlier(subject, Path(scratch))
            wrong, ways, refused = [], set(), 0
            for room in ROOMS:
                with nearly_full(Path(scratch) / "disk", before, room) as (place, way, limit):
                    stood = files(place / "out", hidden)
                    done = command(other(subject), place, before=limit)
                    refused += done.code != 0
                    wrong += [f"{subject.name}, {room:,} bytes left: {said}" for said in complaints(done, place, stood)]
                    ways.add(way)
            rows.append(
                Row(subject.name, len(ROOMS), len(ROOMS) - len(wrong), f"{', '.join(sorted(ways))}; {refused} found no room")
            )
            details.extend(wrong)
    return Outcome(tuple(rows), tuple(details))


def earlier(subject: Subject, scratch: Path) -> Path:
    """A directory with earlier results, without the pictures, so that they fit."""
    made = scratch / f"{subject.name}-earlier"
    made.mkdir()
    done = command(subject.words, made)
    if done.code:
        raise RuntimeError(f"{subject.name} fails undisturbed: {done.errors}")
    for path in (made / "out").rglob("*"):
        if path.suffix in (".png", ".svg", ".pdf", ".html", ".pt"):
            path.unlink()
    for path in (made / "out").rglob(".cache"):
        shutil.rmtree(path)
    return made


def other(subject: Subject) -> tuple[str, ...]:
    """The command whose results replace the earlier ones, and are others; training goes elsewhere, for `--overwrite` removes first."""
    if subject.name == "train":
        return (*subject.words[:-1], "other", "--seed", "1")
    return (*subject.words, "--overwrite", *(() if subject.name == "analyze" else ("--seed", "1")))


def complaints(done: Done, place: Path, stood: dict[str, str]) -> list[str]:
    """What is not as it must be after a command that may have found no room."""
    there = files(place / "out", hidden)
    said = [line for line in done.errors.splitlines() if "s so far" not in line]
    if done.code == 2:
        if there != stood:
            return [f"what stood there changed: {sorted(set(stood.items()) ^ set(there.items()))[0][0]}"]
        return [] if len(said) == 1 else [f"{len(said)} lines: {' / '.join(said)[-300:]}"]
    if done.code == 1:
        if any("Traceback" in line for line in said):
            return [f"a traceback: {said[-1][-300:]}"]
        return half_written(place / "out")[:1]
    return [] if done.code == 0 else [f"exit code {done.code}: {' / '.join(said)[-300:]}"]


@contextmanager
def nearly_full(at: Path, before: Path, room: int) -> Iterator[tuple[Path, str, Callable[[], None]]]:
    """A directory with a copy of `before` in it and `room` bytes left; how this was done, and what a process must call first."""
    at.mkdir()
    mounted = mount(at)
    try:
        shutil.copytree(before / "out", at / "out")
        if not mounted:
            yield at, "no file larger than the room", lambda: limited(room)
            return
        fill(at / "filler", room)
        yield at, "tmpfs of 2 MB", lambda: None
    finally:
        if mounted:
            subprocess.run(["umount", str(at)], check=True)
        shutil.rmtree(at)


def mount(at: Path) -> bool:
    """Whether a tmpfs could be mounted."""
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(at)], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def fill(file: Path, room: int) -> None:
    """Write a file until `room` bytes are left."""
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        filler.truncate(max(0, os.fstat(filler.fileno()).st_size - room))


def limited(room: int) -> None:
    """Let this process write no file beyond `room` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
