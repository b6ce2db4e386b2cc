"""Mutants of positions/, measures/ and the measures of plugins/ by mutmut.

mutmut (pyproject.toml, [tool.mutmut]) writes every mutant into mutants/, runs for each the tests
that reach its function, and remembers verdicts, so that a later run goes on. All of them are hours:
`--share 0.1` tries a tenth, drawn by the digest of their names, so that a larger share holds a
smaller one; `--minutes` ends earlier. survivors.toml says why each survivor lives.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pandas

from benchmarks.running import Frame, Row, read_toml, row

FLOORS = {
    "positions.": "positions",
    "measures.kernels.": "measures/kernels",
    "measures.": "measures",
    "plugins.": "plugins",
}
"""By the beginning of a name, the row that a mutant counts in; the first that fits."""
KILLED = (1, 3, 24, 36, 152, 255, -24)
"""mutmut's exit codes of tests that fail or do not end; 0 where they pass."""


def mutants(given: Namespace) -> Iterator[Row]:
    """Mutants of positions, measures and kernels that the tests notice; at least 85 %."""
    here = Path("mutants")
    if not here.exists():
        _mutmut(["repo_interp.positions.embedding*"], given.minutes)  # which writes all of them
    left = [
        name for name, code in verdicts(here).items() if code is None and drawn(name, given.share)
    ]
    if left:
        _mutmut([f"repo_interp.{name}" for name in left], given.minutes)
    looked_at = read_toml(Path(__file__).with_name("survivors"))
    table: Frame = (
        pandas.Series(verdicts(here), dtype=float).rename_axis("name").reset_index(name="code")
    )
    table["floor"] = [
        next(row for begin, row in FLOORS.items() if name.startswith(begin))
        for name in table["name"]
    ]
    table["killed"] = table["code"].isin(KILLED)
    for floor, rows in table.groupby("floor", sort=False):
        tried, held = rows["code"].count(), rows["killed"].sum()
        yield row(floor, tried=tried, held=held, needed=0.85, note=f"of {len(rows):,} mutants")
    survivors = table[table["code"].notna() & ~table["killed"]]
    unknown = survivors["code"].map(
        lambda code: "not looked at" if code == 0 else "no test reaches it"
    )
    known = survivors["name"].map(
        {name: reason for reason, names in looked_at.items() for name in names}
    )
    reasons = known.fillna(unknown).value_counts().sort_index()
    yield row(
        "survivors", note="; ".join(f"{count} live: {reason}" for reason, count in reasons.items())
    )


def drawn(name: str, share: float) -> bool:
    """Whether a mutant is of the share: by its name alone."""
    return int(hashlib.sha256(f"repo_interp.{name}".encode()).hexdigest()[:8], 16) < share * 2**32


def verdicts(directory: Path) -> dict[str, int | None]:
    """mutmut's exit code of every mutant, None where it has none yet, by its name without
    "repo_interp.".
    """
    found = {}
    for file in sorted(directory.glob("repo_interp/**/*.meta")):
        found |= json.loads(file.read_text())["exit_code_by_key"]
    return {name.removeprefix("repo_interp."): code for name, code in found.items()}


def _mutmut(names: list[str], minutes: float) -> None:
    code = "from mutmut.__main__ import cli; cli()"
    command = [sys.executable, "-c", code, "run", "--max-children", "1", *names]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it keeps the verdicts that it has
            process.wait()
