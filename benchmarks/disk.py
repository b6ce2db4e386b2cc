"""A file system of 32 MB that is nearly full: a command that finds no room says so in one line, and what stood there stands.

Exit code 2: nothing was changed. Exit code 1: the numbers are there and whole, and the line says which pictures are not. Where no tmpfs may
be mounted the part fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.forked import AGAIN, COMMANDS, Done, files, preload, team
from benchmarks.kills import half_written, row
from benchmarks.running import Row

SIZE = 2**25
ROOMS = (0, 4096, 32768, 131072)
"""Bytes that are left."""


def disk(given: Namespace, name: str) -> Iterator[Row]:
    """32 MB, nearly full: one line, and what stood there stands."""
    preload()
    with tempfile.TemporaryDirectory() as scratch:
        (before := Path(scratch) / "before").mkdir()
        (calm,) = team(1, COMMANDS[name], before)
        if calm.code:
            raise RuntimeError(f"fails undisturbed: {calm.errors}")
        # Other results than the earlier ones. Training goes elsewhere, for `--overwrite` removes first.
        other = (*COMMANDS[name][:-1], "other") if name == "train" else (*COMMANDS[name], AGAIN[name])
        seed = () if name == "analyze" else ("--seed", "1")
        wrong, refused = [], 0
        for room in ROOMS:
            with nearly_full(Path(scratch) / "disk", before, room) as place:
                stood = files(place / "out")
                (done,) = team(1, (*other, *seed), place)
                refused += done.code != 0
                wrong += [f"{room:,} bytes left: {said}" for said in _complaints(done, place, stood)]
        yield row(name, len(ROOMS), wrong, f"tmpfs of 32 MB; {refused} found no room")


def _complaints(done: Done, place: Path, stood: dict[str, str]) -> list[str]:
    """The first thing that is not as it must be after a command that may have found no room."""
    there = files(place / "out")
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
def nearly_full(at: Path, before: Path, room: int) -> Iterator[Path]:
    """A directory with a copy of `before` in it and `room` bytes left. Raises CalledProcessError where nothing may be mounted."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(at)], check=True, capture_output=True)
    try:
        shutil.copytree(before / "out", at / "out")
        with (at / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(at).free - room)
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
        at.rmdir()
