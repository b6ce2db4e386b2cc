"""Lines and branches of positions/ and measures/ that the tests reach by which mutants are judged."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from trust.outcome import Outcome, Row

FLOORS = ("positions", "measures")
NEEDED = 0.9


def run(given: Namespace) -> Outcome:
    """Measure with coverage.py; a row of lines and one of branches per floor."""
    tests = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"][
        "pytest_add_cli_args_test_selection"
    ]
    rows = []
    with TemporaryDirectory() as scratch:
        data, report = Path(scratch) / "data", Path(scratch) / "report.json"
        measured = [sys.executable, "-m", "coverage", "run", "--branch", f"--data-file={data}"]
        sources = "--source=" + ",".join(f"repo_interp/{floor}" for floor in FLOORS)
        subprocess.run([*measured, sources, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], check=True)
        subprocess.run([sys.executable, "-m", "coverage", "json", f"--data-file={data}", "-q", "-o", str(report)], check=True)
        found = json.loads(report.read_text())["files"]
    for floor in FLOORS:
        parts = [file["summary"] for name, file in found.items() if name.startswith(f"repo_interp/{floor}/")]
        for what, every, reached in (
            ("lines", "num_statements", "covered_lines"),
            ("branches", "num_branches", "covered_branches"),
        ):
            total, covered = (sum(part[key] for part in parts) for key in (every, reached))
            rows.append(Row(f"{floor}, {what}", total, covered))
    return Outcome(tuple(rows), needed=NEEDED)
