"""SIGKILL at random moments, and several processes on one command.

Given again, a command ends with the bytes of one that nobody disturbed; nothing half-written is left. 2 and 4 processes leave the bytes
of one; where one of two is killed, the other ends on its own, and one or two go on with what both have kept. Moments are drawn by a
seed, even over the CPU time of an undisturbed run.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.forked import AGAIN, COMMANDS, Done, files, preload, resumed, team
from benchmarks.running import Row

LAST = {".png": b"IEND\xaeB`\x82", ".pdf": b"%%EOF", ".svg": b"</svg>", ".html": b"</html>"}
"""Last bytes of whole files."""


def kills(given: Namespace, name: str, count: int = 1) -> Iterator[Row]:
    """SIGKILL of one process at random moments; given again: the bytes of an undisturbed run, nothing half-written."""
    preload()
    with tempfile.TemporaryDirectory() as scratch:
        first, again = (COMMANDS[name], (*COMMANDS[name], AGAIN[name])) if name in COMMANDS else (resumed, resumed)
        clocked = (".jsonl", ".pt") if name == "train" else ()  # clock times; gone at the end
        calm = team(count, first, place := _empty(scratch, "calm"))
        expected = files(place / "out", clocked)
        wrong, kept, ended, generator = different(calm, expected, expected), [0], 0, np.random.default_rng(0)
        moments = np.sort(generator.uniform(0, 1, 0 if wrong else given.kills))
        for moment in moments:
            victim = int(generator.integers(count))
            place = _empty(scratch, "killed")
            cut = team(count, first, place, kill=(victim, moment * calm[victim].cpu))
            ended += all(each.code == 0 for each in cut)
            kept.append(len([path for path in place.rglob("*") if path.is_file()]))
            complaints = half_written(place / "out")
            done = team(1 + int(generator.integers(count)), again, place)
            complaints += different(done, files(place / "out", clocked), expected)
            complaints += [path.name for path in (place / "out").rglob(".*") if path.name.endswith((".unfinished", ".previous"))]
            wrong += [f"process {victim} killed at {moment:.0%}: {complaint}" for complaint in complaints[:1]]
        note = f"{calm[0].cpu:.1f} CPU s undisturbed, {len(expected)} files compared; killed with up to {max(kept)} files there"
        yield row(name, len(moments) or 1, wrong, note + (f"; {ended} had ended before" if ended else ""))


def processes(given: Namespace, name: str) -> Iterator[Row]:
    """Several processes on one command leave the bytes of one."""
    preload()
    with tempfile.TemporaryDirectory() as scratch:
        expected: dict[str, str] = {}
        wrong, cpu = [], []
        for count in (1, 2, 4):
            done = team(count, COMMANDS[name], place := _empty(scratch, str(count)))
            found = files(place / "out")
            expected = expected or found
            cpu.append(f"{max(each.cpu for each in done):.1f}")
            wrong += [f"{count} processes: {complaint}" for complaint in different(done, found, expected)]
        note = f"2, 4 processes against 1, {len(expected)} files; CPU s of the busiest: {', '.join(cpu)}"
        yield row(name, 2, wrong, note)


def half_written(directory: Path) -> list[str]:
    """Complaints about results that are not whole."""
    from safetensors import safe_open

    from repo_interp.run import read_run

    complaints = []
    for path in map(directory.joinpath, files(directory)):
        try:
            if path.name == "run.nc":
                read_run(path)
            elif path.suffix == ".safetensors":
                safe_open(path, "np").__enter__()
            elif not path.read_bytes().rstrip().endswith(LAST.get(path.suffix, b"")):
                complaints.append(f"half-written {path.name}")
        except Exception as error:
            complaints.append(f"half-written {path.name}: {error}")
    return complaints


def different(done: list[Done], found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Complaints about processes that failed, and files that are not as `expected`."""
    failed = [f"it ends with {each.code}: {each.errors[-300:]}" for each in done if each.code]
    other = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    return failed or ([f"other bytes than undisturbed: {', '.join(other[:5])}"] if other or not found else [])


def row(what: str, tried: int, wrong: list[str], note: str) -> Row:
    """A row of the table; what went wrong is in its note."""
    return {"what": what, "tried": tried, "held": max(0, tried - len(wrong)), "needed": 1.0, "note": "; ".join([note, *wrong])}


def _empty(scratch: str, name: str) -> Path:
    """An empty directory."""
    place = Path(scratch) / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place
