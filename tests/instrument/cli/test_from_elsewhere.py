"""The pages for users of TransformerLens, BertViz and hooks: all of their Python runs, and both
sides of a task print what the page shows.

A block of the language `py` is BertViz's, which is not installed: it is parsed and not run.
"""

from __future__ import annotations

import ast
import re

import pytest
from places import DOCS

NAMES = ("from_transformer_lens.md", "from_bertviz.md", "from_hooks.md")
BLOCK = re.compile(r"^```(python|py|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+")
LAST_DIGIT = 2e-4
"""Twice the last digit that the pages print: another processor may round the other way."""


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def assert_same(printed, shown):
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers = [[float(each) for each in NUMBER.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=LAST_DIGIT)


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_print_what_the_page_shows(name, tmp_path, monkeypatch, capsys, no_figures):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    printed: list[str] = []
    for number, (language, block) in enumerate(BLOCK.findall(read(name))):
        if language == "python":
            exec(compile(block, f"{name}, block {number}", "exec"), names)
            printed += [out] if (out := capsys.readouterr().out) else []
        elif language == "text":
            assert printed, f"{name}, block {number}: nothing was printed"
            for each in printed:
                assert_same(each, block)
            printed = []
        else:
            ast.parse(block)


def test_the_pages_have_the_same_five_tasks():
    tasks = [re.findall(r"^## (.*)$", read(name), re.MULTILINE)[:5] for name in NAMES]
    assert tasks[0] == tasks[1] == tasks[2]
    for name in NAMES:
        for part in re.split(r"^## ", read(name), flags=re.MULTILINE)[1:6]:
            (sides,) = re.findall(r'^<div class="grid" markdown>\n(.*?)^</div>', part, re.M | re.S)
            assert len(BLOCK.findall(sides)) == 2
            assert len(re.findall("^# repo_interp$", sides, re.M)) == 1


def test_what_is_shown_is_held_to_what_is_printed():
    assert_same("L1 H2 0.9954\n", "L1 H2 0.9955\n")
    for other in ("L1 H2 0.9957\n", "L1 H3 0.9954\n", "0.9954\n"):
        with pytest.raises(AssertionError):
            assert_same("L1 H2 0.9954\n", other)
