"""The notebooks run from a clean kernel, offline, without a warning, and show what they say: outputs are kept, small, and of this code."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
from copy import deepcopy

import pytest
from places import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra [notebooks]")
pytest.importorskip("nbclient", reason="notebooks need the extra [notebooks]")
pytest.importorskip("ipykernel", reason="notebooks need the extra [notebooks]")

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TRAINS = "6_your_own_checkpoint"
"""Trains a model, whose numbers are another machine's own."""
ALL = "REPO_INTERP_ALL_NOTEBOOKS"
"""Environment variable with which notebooks of real models run too."""
LARGEST_NOTEBOOK, LARGEST_PICTURE = 350_000, 60_000
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
PLACE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|var|Users|private)\b|site-packages|[A-Z]:\\")
LINK = re.compile(r"\]\(([^)#\s]+)")


@pytest.fixture(scope="module")
def make():
    specification = importlib.util.spec_from_file_location("notebooks_make", FOLDER / "make.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def texts(cell) -> list[str]:
    """What a cell's outputs say, without white space that a version of a library may change."""
    said = [output["text"] if output.output_type == "stream" else output["data"].get("text/plain", "") for output in cell.outputs]
    return [" ".join(text.split()) for text in said]


def kinds(cell) -> list[list[str]]:
    return [[output.output_type, *sorted(output.get("data", {}))] for output in cell.outputs]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_numbered_and_named_in_the_index():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number}_" for number in range(1, 10)]
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in index for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_small_and_names_no_machine(path, make):
    raw = path.read_text(encoding="utf-8")
    notebook = nbformat.from_dict(nbformat.reads(raw, as_version=4))
    nbformat.validate(notebook)
    assert len(raw.encode()) <= LARGEST_NOTEBOOK
    assert not PLACE.search(re.sub(r'"image/png": "[^"]*"', "", raw))
    assert make.tidied(deepcopy(notebook)) == notebook, "times, versions or large pictures are kept: make notebooks"
    pictures = [
        output.data["image/png"]
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert pictures, "no picture is kept: make notebooks"
    assert max(len(base64.b64decode(picture)) for picture in pictures) <= LARGEST_PICTURE


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_asks_a_question_and_says_what_the_answer_does_not_mean(path):
    prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert "**Question.**" in prose[0]
    assert "**What it means.**" in prose[-1] and "**What it does not mean.**" in prose[-1]
    for link in LINK.findall("\n".join(prose)):
        assert (FOLDER / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_a_clean_kernel_and_shows_what_is_kept(path, make):
    missing = make.missing(path)
    if missing is not None:
        pytest.skip(missing)
    if path.stem in make.LONG and not os.environ.get(ALL):
        pytest.skip(f"{path.stem} takes long; it runs with {ALL}=1")
    kept = nbformat.read(path, as_version=4)
    made = make.executed(deepcopy(kept))
    for before, after in zip(code_cells(kept), code_cells(made), strict=True):
        assert "error" not in [output.output_type for output in after.outputs]
        assert "stderr" not in [output.get("name") for output in after.outputs]
        assert kinds(after) == kinds(before), before.source
        for old, new in zip(texts(before), texts(after), strict=True):
            assert NUMBER.sub("#", new) == NUMBER.sub("#", old), f"read the prose again, then: make notebooks\n{before.source}"
            if path.stem != TRAINS:
                numbers = [float(number) for number in NUMBER.findall(new)]
                assert numbers == pytest.approx([float(number) for number in NUMBER.findall(old)], rel=0.1, abs=0.05), (
                    before.source
                )
