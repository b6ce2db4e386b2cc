"""The recipes of docs/recipes.md run on small models, and print what their references print."""

from __future__ import annotations

import importlib.util
import re

import pytest
from places import DOCS

SPEC = importlib.util.spec_from_file_location("recipes", DOCS / "recipes.py")
assert SPEC is not None and SPEC.loader is not None
recipes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(recipes)
CODE = recipes.recipes()
MOST = 19
"""Lines of code of a recipe, without blank lines and imports."""
FEWER = {
    "count=40": "count=12",
    "prompts(40, ": "prompts(12, ",
    "prompts(8, ": "prompts(2, ",
    "max_steps=60, ": "max_steps=4, ",
    "every=20": "every=2",
    "(128, 256, 512)": "(128, 256)",
    'test_set="1024"': 'test_set="512"',
    "(2 * length, 4 * length - 1)": "(length, 2 * length - 1)",
    "{2 * length}-{4 * length - 1}": "{length}-{2 * length - 1}",
    "2 * length - 1 :": "length - 1 :",
}
"""What a test has no time for; texts of four times the training length are of twice."""
ALONE = {
    "A training, step by step": "what a callback writes while the Trainer of transformers runs"
}
"""Recipes without a reference, and why."""
SHARED = {"plain_transformers.py", "plain_repo.py"}
"""What references import."""
NAMES = {
    "from repo_interp.checkpoint_files.directories import known_directory",
    "from repo_interp.checkpoint_files.shipped import zoo_path",
}
"""What references may ask this package for, beside prompts: where a checkpoint lies."""


def on_small_models(code: str) -> str:
    """The code of a recipe or a reference, with small models and few prompts."""
    for large, small in (recipes.SMALL | FEWER).items():
        code = code.replace(large, small)
    return code


def ran(title: str, folder, monkeypatch) -> tuple[str, dict]:
    """What a recipe prints on small models, and its names."""
    names: dict = {}
    monkeypatch.chdir(folder)
    return recipes.printed(on_small_models(CODE[title]), title, names), names


def test_every_recipe_is_short_and_has_its_output():
    text = recipes.PAGE.read_text(encoding="utf-8")
    assert len(CODE) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert all(found["output"].strip() for found in recipes.RECIPE.finditer(text))
    for title, code in CODE.items():
        lines = [line for line in code.splitlines() if line.strip()]
        lines = [line for line in lines if not re.match(r"(from|import) ", line)]
        assert len(lines) <= MOST, title


def test_every_recipe_has_a_reference_beside_it():
    files = {file.name for file in recipes.REFERENCES.glob("*.py")} - SHARED
    assert files == {recipes.reference_file(title).name for title in CODE.keys() - ALONE.keys()}
    for found in recipes.RECIPE.finditer(recipes.PAGE.read_text(encoding="utf-8")):
        if found["title"] in ALONE:
            assert found["reference"] is None
            continue
        assert found["reference"], found["title"]
        assert recipes.lines_that_differ(found["output"], found["reference"]) == []


def test_references_ask_this_package_for_places_and_prompts_alone():
    for file in recipes.REFERENCES.glob("*.py"):
        code = file.read_text(encoding="utf-8")
        asked = {
            line for line in code.splitlines() if re.match(r"\s*(from|import) repo_interp", line)
        }
        allowed = {line for line in asked if line.startswith("import repo_interp as ri  #")}
        assert asked - allowed <= (NAMES if file.name in SHARED else set()), file.name
        assert {*re.findall(r"\bri\.(\w+)", code)} <= {"tasks"}, file.name


@pytest.mark.parametrize("title", CODE)
def test_a_recipe_prints_what_transformers_alone_give(title, tmp_path, monkeypatch):
    output, _ = ran(title, tmp_path, monkeypatch)
    assert len(output.splitlines()) >= 1
    if title in ALONE:
        return
    file = recipes.reference_file(title)
    reference = recipes.printed(on_small_models(file.read_text(encoding="utf-8")), str(file))
    assert reference.strip()
    assert recipes.lines_that_differ(output, reference) == [], output


def test_a_line_of_a_reference_is_one_of_ours_or_differs():
    ours = "loss 2.68\nL3 H1: +0.10, 5 heads\nloss 2.70\n"
    for same in ("loss 2.68\n", "loss 2.67\nloss 2.71\n", "L3 H1: +0.11, 5 heads\nloss 2.70\n"):
        assert recipes.lines_that_differ(ours, same) == []
    for other, lines in (
        ("loss 2.66\n", ["loss 2.66"]),
        ("loss 2.70\n", ["loss 2.70"]),  # out of order
        ("L3 H2: +0.10, 5 heads\nloss 2.70\n", ["L3 H2: +0.10, 5 heads"]),
        ("gain 2.68\n", ["gain 2.68"]),
        ("loss 2.68\nloss 2.70\nloss 2.70\n", ["loss 2.70"]),
    ):
        assert recipes.lines_that_differ(ours, other) == lines


def test_the_first_layer_of_random_weights_is_fitted_as_chance_allows(tmp_path, monkeypatch):
    output, _ = ran("Why random weights are fitted", tmp_path, monkeypatch)
    for line in output.splitlines():
        if "random tokens" in line:
            first, by_chance = re.search(r": r (\S+) .* by chance (\S+)$", line).groups()
            assert float(first) == pytest.approx(float(by_chance), abs=0.02)


def test_more_pairs_build_a_function_of_the_distance_better(tmp_path, monkeypatch):
    output, _ = ran("Any function of the distance, built from rotations", tmp_path, monkeypatch)
    for line in output.splitlines():
        errors = [float(word) for word in line.split(": ")[1].split()]
        assert errors == sorted(errors, reverse=True) and errors[-1] < 1


def test_outputs_agree_where_processors_round_differently_and_nowhere_else():
    assert recipes.agree("head 2:1 moves 0.123 nat, 45 %", "head 2:1  moves 0.124 nat, 45 %")
    assert recipes.agree("loss 3.21e-05", "loss 3.2e-05")
    for other in (
        "head 2:2 moves 0.123 nat",
        "head 2:1 moves 0.128 nat",
        "head 2:1 adds 0.123 nat",
    ):
        assert not recipes.agree("head 2:1 moves 0.123 nat", other)
    assert not recipes.agree("0.1 0.2", "0.1")
