"""The notebooks run offline without a warning and print what they keep; they are small, name no
machine, and link to what is there.
"""

from __future__ import annotations

import json
import os
import re
import socket

import matplotlib
import pytest
from places import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: int(path.name.partition("_")[0]))
LONG = ("8_", "9_", "11_")
"""Prefixes of the notebooks that take a minute or more; 9 and 11 need `repo-interp fetch
smollm2-135m`.
"""
ALL = "REPO_INTERP_ALL_NOTEBOOKS"
"""Set this environment variable to run the long ones too."""
LARGEST = 600_000
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
PLACE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|var|Users|private)\b|site-packages|[A-Z]:\\"
)
MANY = re.compile(r"(?<=\.prompts\()(?:9|[1-9]\d+)|\b400\b(?! // 80)")
"""Numbers of prompts, and of steps of training, of which 2 are run: their answers are numbers,
which are not compared.
"""
LINK = re.compile(r"\]\(([^)#\s]+)")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


def words(text):
    """`text` without its numbers, which another machine changes, and without white space, which
    libraries change.
    """
    return " ".join(NUMBER.sub("#", text).split())


def test_the_index_names_each_by_its_number():
    assert [path.name.partition("_")[0] for path in NOTEBOOKS] == [
        str(number) for number in range(1, 12)
    ]
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in index for path in NOTEBOOKS)


@each
def test_it_asks_a_question_keeps_its_pictures_and_names_no_machine(path):
    raw = path.read_text(encoding="utf-8")
    prose = ["".join(cell["source"]) for cell in cells(path, "markdown")]
    assert "**Question.**" in prose[0]
    assert "**What it means.**" in prose[-1] and "**What it does not mean.**" in prose[-1]
    assert [link for link in LINK.findall("\n".join(prose)) if not (FOLDER / link).exists()] == []
    assert '"image/png"' in raw, "no picture is kept: make notebooks"
    assert len(raw.encode()) <= LARGEST
    assert not PLACE.search(re.sub(r'"image/png": "[^"]*"', "", raw))


@each
def test_its_code_runs_offline_and_prints_what_is_kept(path, monkeypatch, capsys):
    if path.name.startswith(LONG) and not os.environ.get(ALL):
        pytest.skip(f"{path.stem} takes long; it runs with {ALL}=1")

    def refuse(*arguments, **named):
        raise OSError("a notebook works offline")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    matplotlib.use("Agg")
    names: dict = {}
    for number, cell in enumerate(cells(path, "code"), 1):
        exec(
            compile(
                MANY.sub("2", "".join(cell["source"])), f"{path.name}, code cell {number}", "exec"
            ),
            names,
        )
        kept = "".join(
            "".join(output["text"])
            for output in cell["outputs"]
            if output["output_type"] == "stream"
        )
        assert words(capsys.readouterr().out) == words(kept), (
            "read the prose again, then: make notebooks"
        )
