"""docs/learned_positions.md has what notebook 11 prints, and no other number; it is short."""

from __future__ import annotations

import importlib
import json

import pytest
from places import DOCS

WORDS = 1500
"""Most words of the page, without blocks and code."""


@pytest.fixture
def page(monkeypatch):
    """The module that fills the page."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("learned_positions")


def test_the_page_has_what_the_notebook_prints_and_no_other_number(page):
    text, outputs = page.PAGE.read_text(encoding="utf-8"), [output for _, output, _ in page.cells()]
    assert page.filled(text, outputs) == text, "python docs/learned_positions.py"
    assert page.unprinted(text, outputs) == []
    assert len(page.BLOCK.findall(text)) >= 3
    assert len(page.QUOTED.sub(" ", text).split()) <= WORDS


@pytest.mark.parametrize(
    ("prose", "missing"),
    [
        ("15 of 60 rows cost +.31", []),
        ("16 rows", ["16"]),
        ("it costs -0.31", ["-.31"]),
        ("1,200 rows, of layer 15.", []),
        ("1,201 rows", ["1201"]),
        ("[16 rows](at.md#17), `18`, SmolLM2-135M", ["16"]),
    ],
)
def test_a_number_that_no_cell_prints_is_named(page, prose, missing):
    assert page.unprinted(prose, ["15 of 60\n", "+0.310 0.31 1200\n"]) == missing


def test_blocks_are_filled_and_a_cell_that_prints_another_number_is_a_fault(
    page, tmp_path, monkeypatch, capsys
):
    cell = {"cell_type": "code", "source": ["print(7 * 8)"]}
    output = {"output_type": "stream", "name": "stdout", "text": ["56\n"]}
    notebook, file = tmp_path / "a.ipynb", tmp_path / "page.md"
    monkeypatch.setattr(page, "NOTEBOOK", notebook)
    monkeypatch.setattr(page, "PAGE", file)
    notebook.write_text(json.dumps({"cells": [cell | {"outputs": [output]}]}))
    file.write_text("It is 56.\n\n<!-- printed: 1 -->\n```text\n```\n")
    assert list(page.faults(check=False)) == []
    assert file.read_text().endswith("```text\n56\n```\n") and list(page.faults(check=True)) == []
    output["text"] = ["57\n"]
    notebook.write_text(json.dumps({"cells": [cell | {"outputs": [output]}]}))
    assert [fault.split(" ")[0] for fault in page.faults(check=True)] == [
        "page.md",
        "page.md",
        "code",
    ]
