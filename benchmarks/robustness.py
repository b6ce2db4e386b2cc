"""`python -m benchmarks.robustness [PART ...]`: tests of robustness; docs/trust.md is the table.

The exit code is 1 if something did not hold. All parts take hours, mostly for the mutants;
`kills/score --kills 3` takes a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas

from benchmarks.interruptions import disk, kills, processes  # noqa: F401 - parts, by their names
from benchmarks.mutants import mutants  # noqa: F401
from benchmarks.running import Frame, Row, read_parts, read_toml, row, run, sections

COLUMNS = ("what", "tried", "held", "needed", "note")
TABLE, PAGE = Path("benchmarks/robustness.csv"), Path("docs/trust.md")
STATED = read_toml(__file__)
OFFICIAL = (
    "instrument/models/test_official",
    "plugins/loading_checks/test_parity",
    "instrument/analysis/test_run_goldens",
)
RANGED = ("transformers", "transformer-lens")
"""Libraries to test in their oldest and newest versions, by the ranges in pyproject.toml; the
version of torch is that of constraints.txt.
"""


def catalogue(given: Namespace) -> Iterator[Row]:
    """Every bad input gives one line and exit code 2. No result is silently wrong, no result is lost,
    and no code from a checkpoint runs.
    """
    for what, tests in STATED["catalogue"].items():
        yield _tested(what, tests)


def fuzz(given: Namespace) -> Iterator[Row]:
    """Random layouts, prompts, config.json, runs, schemes of a file, cards, edits, caches and flags
    give a value or a refusal. Written files can be read again, and damaged stored results are not used.
    """
    properties = ["instrument/cli/test_fuzz"]
    variables = {"HYPOTHESIS_PROFILE": "fuzz", "FUZZ_EXAMPLES": str(given.examples)}
    tried = _tested("properties", properties, **variables)
    yield tried | {"note": f"{tried['note']}, {given.examples:,} examples of each"}


def versions(given: Namespace, end: str) -> Iterator[Row]:
    """Official checkpoints and Hugging Face's logits with other versions of the libraries, in a
    separate environment in .versions/.
    """
    place = Path(".versions") / end
    python = str(place / "bin" / "python")
    if not place.exists():
        venv.create(place, with_pip=True)

    def pip(words: str) -> str:
        command = [python, "-m", "pip", *words.split()]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    stated = read_toml("pyproject")["project"]["dependencies"]
    lower = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(stated), re.MULTILINE))
    # An open range would fetch gigabytes of CUDA libraries.
    pip("install --quiet --constraint constraints.txt torch")
    oldest = " ".join(f"{name}=={lower[name]}" for name in RANGED if end == "oldest")
    pip(f"install --quiet --upgrade . pytest hypothesis {oldest}")
    found = re.findall(
        r"^(?:torch|transformers|transformer-lens)==\S+", pip("freeze"), re.MULTILINE
    )
    # The installed package is tested, not the checkout.
    options = ["-W", "default", "--import-mode=append", "-o", "pythonpath=tests/support"]
    yield _tested(end, OFFICIAL, *options, python=python, PYTHONPATH="") | {
        "note": ", ".join(found)
    }


def _tested(
    what: str, tests: Sequence[str], *options: str, python: str = sys.executable, **variables: str
) -> Row:
    """Run tests of the suite, and return a row with the numbers of tests and of passed tests."""
    paths = [f"tests/{name}.py" for name in tests]
    with TemporaryDirectory() as scratch:
        report = f"{scratch}/report.xml"
        command = [python, *["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml"], report]
        subprocess.run([*command, *options, *paths], env=os.environ | variables)
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    }
    tried = count["tests"] - count["skipped"]
    held = tried - count["failures"] - count["errors"]
    return row(what, tried=tried, held=held, needed=1.0, note=", ".join(paths))


PARTS = read_parts(STATED["parts"], globals())


def write_page(file: Path, table: Frame) -> None:
    """Write docs/trust.md from the table, or a page beside another table."""
    verdicts = ["**held**" if holds(row) else "**did not hold**" for _, row in table.iterrows()]
    shown = table[["part", "what", "tried", "held", "note"]].assign(verdict=verdicts)
    page = PAGE if file == TABLE else file.with_suffix(".md")
    written_by_hand = PAGE.read_text(encoding="utf-8").partition("\n\n## catalogue")[0]
    page.write_text(
        "\n".join([written_by_hand, *sections(table, shown, PARTS)]) + "\n", encoding="utf-8"
    )


def holds(row: Any) -> bool:
    """Whether enough trials of a row held; true for a remark, which has no trials."""
    return bool(pandas.isna(row.get("tried"))) or bool(
        row["tried"] > 0 and row["held"] >= row["needed"] * row["tried"]
    )


def main() -> int:
    """Run the parts."""
    parser = ArgumentParser(
        prog="python -m benchmarks.robustness", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=20, help="moments per command")
    parser.add_argument("--examples", type=int, default=5000, help="of each fuzzed property")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants")
    parser.add_argument("--draw", type=int, default=0, help="number of the draw of that share")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="for the mutants; the next time goes on"
    )
    return 0 if all(map(holds, run(parser, PARTS, COLUMNS, TABLE, write_page))) else 1


if __name__ == "__main__":
    sys.exit(main())
