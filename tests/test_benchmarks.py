"""`python -m benchmarks` runs, on a small layer, and has a row for every measure asked for. What it times is not judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_small_benchmark_has_a_row_a_measure_and_says_what_was_made():
    small = ["--lengths", "128", "--heads", "2", "--d-head", "16", "--measures", "positions", "components", "three_axis"]
    done = subprocess.run([sys.executable, "-m", "benchmarks", *small], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert len(rows["components"]) == len(rows["three_axis"]) == 7
    assert rows["positions"][:2] == ["-", "-"], "no textbook way beside it"
    assert "2/16 components" in " ".join(done.stdout.split())
