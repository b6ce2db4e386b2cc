"""Mutants of positions/, measures/ and the measures of plugins/ by mutmut.

mutmut (pyproject.toml, [tool.mutmut]) writes every mutant into mutants/, runs for each mutant the
tests that reach its function, and stores the verdicts, so that a later run continues. All mutants
take hours. `--share 0.1` tries a tenth, drawn by the digest of `--draw` and the mutant's name, so a
larger share contains a smaller one; only these are counted. Tests that were written for the survivors
of one draw are judged by the next draw. `--minutes` ends earlier; mutants with fast tests come first.
A mutant whose tests do not end is killed by a limit of CPU time, never by the clock.

survivors.toml explains survivors by the function and the changed code, since the numbers of mutants
change with every edit. A survivor marked `equivalent`, which no test could notice, counts as held;
every other survivor counts as a gap.
"""

from __future__ import annotations

import ast
import hashlib
import json
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pandas

from benchmarks.running import Frame, Row, read_toml, row

FLOORS = {
    "positions.": "positions",
    "measures.kernels.": "measures/kernels",
    "measures.": "measures",
    "plugins.": "plugins",
}
"""Row in which a mutant counts, by the beginning of its name; the first match decides."""
KILLED = (1, 3, 24, 36, 152, 255, -24)
"""mutmut's exit codes for tests that fail or do not end; 0 means that they pass."""
EQUIVALENT = "equivalent: "
"""Beginning of the reasons of mutants that no test could notice."""


def mutants(given: Namespace) -> Iterator[Row]:
    """At least 85 % of mutants of positions, measures, kernels and plug-ins fail a test, or are
    equivalent to the original for every test.
    """
    here = Path("mutants")
    if not here.exists():
        _mutmut(["repo_interp.positions.embedding*"], given.minutes)  # which writes all of them
    chosen = [name for name in verdicts(here) if drawn(name, given.share, given.draw)]
    if left := [name for name in chosen if verdicts(here)[name] is None]:
        _mutmut([f"repo_interp.{name}" for name in left], given.minutes)
    table: Frame = (
        pandas.Series(verdicts(here), dtype=float).rename_axis("name").reset_index(name="code")
    )
    table["floor"] = [
        next(row for begin, row in FLOORS.items() if name.startswith(begin))
        for name in table["name"]
    ]
    every = table.groupby("floor").size()
    table = table[table["name"].isin(chosen)]
    of_draw = table.groupby("floor").size()
    table = table[table["code"].notna()]
    table["killed"] = table["code"].isin(KILLED)
    reasons = {
        change: reason
        for reason, changes in read_toml(Path(__file__).with_name("survivors")).items()
        for change in changes
    }
    table["reason"] = [
        None if killed else reasons.get(changed(here, name))
        for name, killed in zip(table["name"], table["killed"], strict=True)
    ]
    table["equivalent"] = table["reason"].str.startswith(EQUIVALENT).eq(True)
    for floor, rows in table.groupby("floor", sort=False):
        killed, equivalent = rows["killed"].sum(), rows["equivalent"].sum()
        note = f"of {of_draw[floor]} drawn of {every[floor]:,} mutants; tests notice {killed}, "
        note += f"{equivalent} are equivalent"
        yield row(floor, tried=len(rows), held=killed + equivalent, needed=0.85, note=note)
    survivors = table[~table["killed"]]
    unknown = survivors["code"].map(
        lambda code: "not looked at" if code == 0 else "no test reaches it"
    )
    reasons = survivors["reason"].fillna(unknown).value_counts().sort_index()
    yield row(
        "survivors", note="; ".join(f"{count} live: {reason}" for reason, count in reasons.items())
    )


def drawn(name: str, share: float, draw: int) -> bool:
    """Whether a mutant is of the share: by the draw and its name alone."""
    return int(hashlib.sha256(f"{draw} {name}".encode()).hexdigest()[:8], 16) < share * 2**32


def changed(directory: Path, name: str) -> str:
    """What a mutant changes: its function, and the statements that the original has not.

    Args:
        directory: Where mutmut has put the mutants.
        name: Name of the mutant, without "repo_interp.".

    Returns:
        "module.function: statement; ...", as `ast` writes them.
    """
    module, _, mutant = name.rpartition(".")
    function = mutant.rpartition("__mutmut_")[0]
    file = (directory / "repo_interp" / module.replace(".", "/")).with_suffix(".py")
    known = _functions(file if file.exists() else file.with_suffix("") / "__init__.py")
    original = known[f"{function}__mutmut_orig"]
    lines = [line for line in known[mutant] if line not in original]
    return f"{module}.{function}: {'; '.join(lines)}"


@cache
def _functions(file: Path) -> dict[str, list[str]]:
    """Lines of the body of every function, in the form that `ast` gives them."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name: [line.strip() for line in ast.unparse(node).splitlines()[1:]]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
    }


def verdicts(directory: Path) -> dict[str, int | None]:
    """mutmut's exit code of every mutant, None where it has none yet, by its name without
    "repo_interp.".
    """
    found = {}
    for file in sorted(directory.glob("repo_interp/**/*.meta")):
        found |= json.loads(file.read_text())["exit_code_by_key"]
    return {name.removeprefix("repo_interp."): code for name, code in found.items()}


def _mutmut(names: list[str], minutes: float) -> None:
    # A busy machine would let tests run into mutmut's limit by the clock; that of CPU time stays
    code = (
        "from mutmut.workers import isolation; isolation.register_timeout = lambda *_, **__: None\n"
        "from mutmut.__main__ import cli; cli()"
    )
    command = [sys.executable, "-c", code, "run", "--max-children", "1", *names]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it keeps the verdicts that it has
            process.wait()
