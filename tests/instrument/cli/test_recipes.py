"""The recipes of docs/recipes.md run on small models, and agree with plain transformers."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from places import DOCS
from transformers import AutoModelForCausalLM

from repo_interp.shipped import zoo_path

SPEC = importlib.util.spec_from_file_location("recipes", DOCS / "recipes.py")
assert SPEC is not None and SPEC.loader is not None
recipes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(recipes)
CODE = recipes.recipes()
MOST = 30
"""Lines of code of a recipe, without blank lines and imports."""
FEWER = {r"count=40": "count=12", r"max_steps=60, ": "max_steps=4, ", r"every=20": "every=2"}
"""What a test has no time for."""


def ran(title: str, folder, monkeypatch) -> tuple[str, dict]:
    """What a recipe prints on small models, and its names."""
    code, names = CODE[title], {}
    for large, small in (recipes.SMALL | FEWER).items():
        code = code.replace(large, small)
    monkeypatch.chdir(folder)
    return recipes.printed(code, title, names), names


@pytest.fixture(scope="module")
def stock():
    """The small RoPE model as transformers alone opens it."""
    path = zoo_path("language/rope")
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval().float()


def test_every_recipe_is_short_and_has_its_output():
    text = recipes.PAGE.read_text(encoding="utf-8")
    assert len(CODE) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert all(found[5].strip() for found in recipes.RECIPE.finditer(text))
    for title, code in CODE.items():
        lines = [line for line in code.splitlines() if line.strip()]
        lines = [line for line in lines if not re.match(r"(from|import) ", line)]
        assert len(lines) <= MOST, title


HELD = (
    "Massive values in queries and keys",
    "Induction heads, and what feeds them",
    "Why random weights are fitted",
    "Any function of the distance, built from rotations",
)
"""Recipes whose numbers the tests below hold to others; the rest call what has tests of its own."""


@pytest.mark.parametrize("title", [title for title in CODE if title not in HELD])
def test_a_recipe_runs(title, tmp_path, monkeypatch):
    assert len(ran(title, tmp_path, monkeypatch)[0].splitlines()) >= 3


def test_the_loss_without_pairs_is_that_of_projections_without_them(stock, tmp_path, monkeypatch):
    """Pairs of queries and keys are set to their means of the undisturbed pass, before rotation."""
    printed, names = ran(HELD[0], tmp_path, monkeypatch)
    tokens, means, handles = names["tokens"], {}, []
    width = stock.config.hidden_size // stock.config.num_attention_heads
    pairs = [int(pair) for pair in names["order"][-4:]]
    entries = [*pairs, *(pair + width // 2 for pair in pairs)]

    def changed(module, arguments, output):
        heads = output.unflatten(-1, (-1, width)).clone()
        means.setdefault(module, heads.mean(1, keepdim=True))  # the first pass is undisturbed
        heads[..., entries] = means[module][..., entries]
        return heads.flatten(-2) if ablating else None

    for layer in stock.model.layers:
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            handles.append(project.register_forward_hook(changed))
    with torch.no_grad():
        ablating = False
        losses = [float(stock(tokens, labels=tokens).loss)]
        ablating = True
        losses.append(float(stock(tokens, labels=tokens).loss))
    for handle in handles:
        handle.remove()
    assert f"loss {losses[0]:.2f}\nfour largest pairs to their mean: {losses[1]:.2f}\n" in printed
    assert losses[0] != losses[1]


def test_induction_is_read_off_stock_patterns(stock, tmp_path, monkeypatch):
    _, names = ran(HELD[1], tmp_path, monkeypatch)
    with torch.no_grad():
        passed = stock(names["tokens"], output_attentions=True)
    patterns = torch.stack(passed.attentions)[:, 0]
    expected = patterns.diagonal(-63, -2, -1)[..., 1:].mean(-1)
    torch.testing.assert_close(names["scores"](63), expected, atol=1e-5, rtol=1e-4)


def test_the_first_layer_of_random_weights_is_fitted_as_chance_allows(tmp_path, monkeypatch):
    output, _ = ran(HELD[2], tmp_path, monkeypatch)
    for line in output.splitlines():
        if "random tokens" in line:
            first, by_chance = re.search(r": r (\S+) .* by chance (\S+)$", line).groups()
            assert float(first) == pytest.approx(float(by_chance), abs=0.02)


def test_pairs_build_a_function_of_the_distance_as_well_as_can_be(tmp_path, monkeypatch):
    _, names = ran(HELD[3], tmp_path, monkeypatch)
    # what is left is orthogonal to all waves: a closed form of the least-squares error
    waves, wanted = names["waves"].numpy(), names["wanted"].numpy()
    basis, sizes, _ = np.linalg.svd(waves, full_matrices=False)
    basis = basis[:, sizes > sizes[0] * len(waves) * np.finfo(float).eps]
    left = wanted - basis @ (basis.T @ wanted)
    error = np.linalg.norm(left) / np.linalg.norm(wanted)
    assert_allclose(names["errors"][-1], error, rtol=1e-3, atol=1e-4)
