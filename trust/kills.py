"""SIGKILL at random moments: given again, a command ends with the bytes of one that nobody disturbed, and nothing half-written is left.

Moments are drawn by a seed, even over the CPU time of an undisturbed run. After each kill the files that are there are looked at: a run
file opens and a picture is whole, for files appear whole or not at all.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np

from trust.forked import Done, command, files, preload
from trust.outcome import Outcome, Row
from trust.subjects import Subject, subjects

WHOLE = {
    ".png": (b"\x89PNG", b"IEND\xaeB`\x82"),
    ".pdf": (b"%PDF", b"%%EOF"),
    ".svg": (b"<?xml", b"</svg>"),
    ".html": (b"<!", b"</html>"),
}
"""First and last bytes of whole files."""


def run(given: Namespace) -> Outcome:
    """Kill every command `given.kills` times."""
    preload()
    rows, details = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for subject in subjects(Path(scratch)):
            if given.only and subject.name not in given.only:
                continue
            row, said = killed(subject, Path(scratch), given.kills)
            rows.append(row)
            details.extend(said)
    return Outcome(tuple(rows), tuple(details))


def killed(subject: Subject, scratch: Path, times: int) -> tuple[Row, list[str]]:
    """The row of one command, and what went wrong."""
    calm = scratch / f"{subject.name}-calm"
    calm.mkdir()
    undisturbed = command(subject.words, calm)
    expected = files(calm / "out", subject.left_out)
    if undisturbed.code or not expected:
        return Row(subject.name, 1, 0, "fails undisturbed"), [f"{subject.name}: {undisturbed.errors[-300:]}"]
    moments = np.sort(np.random.default_rng(0).uniform(0, undisturbed.cpu, times))
    wrong, ended = [], 0
    for number, moment in enumerate(moments):
        place = scratch / f"{subject.name}-{number}"
        place.mkdir()
        cut = command(subject.words, place, kill_at=float(moment))
        ended += cut.code == 0
        complaints = half_written(place / "out") + resumed(subject, place, expected, cut)
        wrong += [f"{subject.name}, killed after {moment:.2f} s: {complaint}" for complaint in complaints[:1]]
        shutil.rmtree(place)
    note = f"{undisturbed.cpu:.1f} CPU s undisturbed, {len(expected)} files compared"
    return Row(subject.name, times, times - len(wrong), note + (f"; {ended} had ended before" if ended else "")), wrong


def resumed(subject: Subject, place: Path, expected: dict[str, str], cut: Done) -> list[str]:
    """Complaints about what is there after the command was given again."""
    again = command((*subject.words, *subject.again), place)
    if again.code:
        return [f"given again it ends with {again.code}: {again.errors[-300:]}"]
    found = files(place / "out", subject.left_out)
    if found != expected:
        other = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        return [f"other bytes than undisturbed: {', '.join(other[:5])}"]
    left = [path for path in (place / "out").rglob(".*") if path.name.endswith((".unfinished", ".previous"))]
    return [f"left behind: {left[0].name}"] if left else []


def half_written(directory: Path) -> list[str]:
    """Complaints about files, other than those of work that goes on, that are not whole."""
    from safetensors import safe_open

    from repo_interp.run import read_run

    complaints = []
    for path in directory.rglob("*") if directory.exists() else ():
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(directory).parts):
            continue
        try:
            if path.name == "run.nc":
                read_run(path)
            elif path.suffix == ".safetensors":
                safe_open(path, "np").__enter__()
            elif path.suffix in WHOLE:
                begin, end = WHOLE[path.suffix]
                content = path.read_bytes().strip()
                if not (content.startswith(begin) and content.endswith(end)):
                    complaints.append(f"half-written {path.name}")
        except Exception as error:
            complaints.append(f"half-written {path.name}: {error}")
    return complaints
