"""The ten recipes of docs/recipes.md run on small models, and agree with plain transformers."""

import importlib.util
import re

import pytest
from places import DOCS

SPEC = importlib.util.spec_from_file_location("recipes", DOCS / "recipes.py")
assert SPEC is not None and SPEC.loader is not None
recipes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(recipes)
CODE = recipes.recipes()
MOST = 30
"""Lines of code of a recipe, without blank lines and imports."""
FEWER = {r"count=40": "count=12", r"max_steps=60, ": "max_steps=4, ", r"every=20": "every=2"}
"""What a test has no time for."""


def ran(title, folder, monkeypatch):
    """What a recipe prints on small models, and its names."""
    code, names = CODE[title], {}
    for large, small in (recipes.SMALL | FEWER).items():
        code = code.replace(large, small)
    monkeypatch.chdir(folder)
    return recipes.printed(code, title, names), names


def test_there_are_ten_each_with_its_output():
    text = recipes.PAGE.read_text(encoding="utf-8")
    assert len(CODE) == 10 == len(re.findall(r"^## ", text, re.MULTILINE))
    assert all(found[5].strip() for found in recipes.RECIPE.finditer(text))
    for title, code in CODE.items():
        lines = [line for line in code.splitlines() if line.strip()]
        lines = [line for line in lines if not re.match(r"(from|import) ", line)]
        assert len(lines) <= MOST, title


@pytest.mark.parametrize("title", CODE)
def test_a_recipe_runs(title, tmp_path, monkeypatch):
    printed, _ = ran(title, tmp_path, monkeypatch)
    assert len(printed.splitlines()) >= 3
