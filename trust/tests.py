"""Parts that are tests of the suite: the catalogue of bad inputs, and fuzzing with more examples than the suite has."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from trust.outcome import Outcome, Row

CATALOGUE = ("tests/instrument/cli/test_bad_inputs.py",)
FUZZ = ("tests/instrument/cli/test_fuzz.py",)
PARITY = tuple(f"tests/instrument/models/{name}.py" for name in ("test_parity", "test_checkpoints", "test_broken_checkpoints"))


def catalogue(given: Namespace) -> Outcome:
    """Every bad input is one line, and the wrong answers of the past are right, by Hugging Face's own logits."""
    return Outcome((*_tests("bad inputs", CATALOGUE, {}), *_tests("Hugging Face's logits, broken checkpoints", PARITY, {})))


def fuzz(given: Namespace) -> Outcome:
    """The profile `fuzz`: other examples each time."""
    return Outcome(tuple(_tests("fuzzing", FUZZ, {"HYPOTHESIS_PROFILE": "fuzz", "FUZZ_EXAMPLES": str(given.examples)})))


def _tests(what: str, paths: tuple[str, ...], environment: dict[str, str]) -> tuple[Row, ...]:
    there = [path for path in paths if Path(path).exists()]
    if not there:
        return ()
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *there]
        subprocess.run(command, env=os.environ | environment)
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tried, failed, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return (Row(what, tried - skipped, tried - skipped - failed, ", ".join(there)),)
