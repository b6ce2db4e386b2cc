"""Oldest and newest libraries: the sessions of noxfile.py, one row each."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace

from trust.outcome import Outcome, Row

SESSIONS = ("oldest", "newest")


def run(given: Namespace) -> Outcome:
    """Run every session, each in an environment of its own, which the first time takes minutes to make."""
    return Outcome(tuple(_session(end) for end in given.only or SESSIONS))


def _session(end: str) -> Row:
    command = [sys.executable, "-m", "nox", "--no-color", "-s", f"versions(end='{end}')"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    pins = re.findall(r"^nox > ((?:torch|transformers|transformer-lens)==\S+)$", said, re.MULTILINE)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", said)}
    passed = counts.get("passed", 0)
    return Row(end, max(1, sum(counts.values())), passed, ", ".join(pins) or said.strip().splitlines()[-1][:200])
