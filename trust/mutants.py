"""Mutants of positions/ and measures/ by mutmut: how many of them the tests of these floors notice.

mutmut (pyproject.toml, [tool.mutmut]) writes every mutant into mutants/, runs for each the tests that reach its function, and remembers
verdicts, so that a later run goes on. All of them are hours: `--share 0.1` tries a tenth, drawn by the digest of their names, so that a
larger share holds a smaller one; `--minutes` ends earlier. Survivors were looked at: survivors.toml says why each lives, or that tests
came later that kill it.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from trust.outcome import Outcome, Row

NEEDED = 0.85
ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"positions/": "positions", "measures/kernels/": "measures/kernels", "measures/": "measures"}
"""By the beginning of a path, the row that its mutants count in; the first that fits."""
_KILLED, _SURVIVED = (1, 3, 24, 36, 152, 255, -24), (0,)
"""mutmut's exit codes: of tests that fail or do not end, and of tests that pass."""


def run(given: Namespace) -> Outcome:
    """Try the mutants of the share that have no verdict yet, for so many minutes."""
    here = Path("mutants")
    if not here.exists():
        _mutmut(["repo_interp.positions.embedding*"], minutes=given.minutes)  # which writes all of them
    left = [name for name, code in verdicts(here) if code is None and drawn(name, given.share)]
    if left:
        _mutmut(left, given.minutes)
    return outcome(here, given.share)


def drawn(name: str, share: float) -> bool:
    """Whether a mutant is of the share: by its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < share * 2**32


def verdicts(directory: Path) -> Iterator[tuple[str, int | None]]:
    """Names of all mutants with mutmut's exit code, None where it has none yet."""
    for file in sorted(directory.glob("repo_interp/**/*.meta")):
        yield from json.loads(file.read_text())["exit_code_by_key"].items()


def outcome(directory: Path, share: float) -> Outcome:
    """Counts per floor, and the survivors with why they live."""
    counts = {row: [0, 0, 0] for row in FLOORS.values()}
    survivors = []
    for name, code in verdicts(directory):
        floor = next(
            row for begin, row in FLOORS.items() if name.removeprefix("repo_interp.").replace(".", "/").startswith(begin)
        )
        counts[floor][2] += 1
        if code is None:
            continue
        counts[floor][0] += 1
        counts[floor][1] += code in _KILLED
        if code not in _KILLED:
            survivors.append((name, code))
    rows = [Row(floor, tried, killed, f"of {every:,} mutants") for floor, (tried, killed, every) in counts.items()]
    return Outcome(tuple(rows), tuple(_explained(survivors)), needed=NEEDED)


def _explained(survivors: list[tuple[str, int]]) -> Iterator[str]:
    reasons = tomllib.loads((Path(__file__).parent / "survivors.toml").read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = {}
    for name, code in survivors:
        short = name.removeprefix("repo_interp.")
        why = next((reason for reason, names in reasons.items() if short in names), None)
        if why is None:
            why = "not looked at" if code in _SURVIVED else "no test reaches it"
        groups.setdefault(why, []).append(short)
    for why, names in sorted(groups.items()):
        yield f"{len(names)} live: {why}"


def _mutmut(names: list[str], minutes: float) -> None:
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", "run", "--max-children", "1", *names]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it keeps the verdicts that it has
            process.wait()
