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

import repo_interp as ri
from repo_interp.checkpoint_files.shipped import zoo_path

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


def attentions(stock, tokens):
    with torch.no_grad():
        return torch.stack(stock(tokens, output_attentions=True).attentions)[:, 0]


def test_every_recipe_is_short_and_has_its_output():
    text = recipes.PAGE.read_text(encoding="utf-8")
    assert len(CODE) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert all(found[5].strip() for found in recipes.RECIPE.finditer(text))
    for title, code in CODE.items():
        lines = [line for line in code.splitlines() if line.strip()]
        lines = [line for line in lines if not re.match(r"(from|import) ", line)]
        assert len(lines) <= MOST, title


@pytest.mark.parametrize("title", [*CODE][5:7] + [*CODE][8:10] + [*CODE][15:18] + [*CODE][19:])
def test_a_recipe_runs(title, tmp_path, monkeypatch):
    printed, _ = ran(title, tmp_path, monkeypatch)
    assert len(printed.splitlines()) >= 2


def test_norms_of_pairs_are_those_of_the_stock_projections(stock, tmp_path, monkeypatch):
    printed, names = ran("Which frequencies do heads use?", tmp_path, monkeypatch)
    tokens = ri.tokens(names["text"], names["model"])[0]
    with torch.no_grad():
        hidden = stock(tokens, output_hidden_states=True).hidden_states
        expected = []
        for layer, states in zip(stock.model.layers, hidden, strict=False):
            inner = layer.input_layernorm(states)
            sides = []
            for project, count in (
                (layer.self_attn.q_proj, stock.config.num_attention_heads),
                (layer.self_attn.k_proj, stock.config.num_key_value_heads),
            ):
                vectors = project(inner)[0].unflatten(-1, (count, -1))  # [token, head, d_head]
                pairs = torch.stack(vectors.chunk(2, dim=-1))
                norms = pairs.norm(dim=0).mean(0)
                repeats = stock.config.num_attention_heads // count
                sides.append(norms.repeat_interleave(repeats, 0))
            expected.append(sides[0] * sides[1])
    assert_allclose(names["norms"].values, torch.stack(expected).numpy(), rtol=1e-4)
    assert printed.startswith("slowest quarter of the pairs:")


def test_the_loss_without_pairs_is_that_of_projections_without_them(stock, tmp_path, monkeypatch):
    """Pairs of queries and keys are set to their means of the undisturbed pass, before rotation."""
    printed, names = ran("Massive values in queries and keys", tmp_path, monkeypatch)
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
    _, names = ran("Induction heads, and what feeds them", tmp_path, monkeypatch)
    patterns = attentions(stock, names["tokens"])
    expected = patterns.diagonal(-63, -2, -1)[..., 1:].mean(-1)
    torch.testing.assert_close(names["scores"](63), expected, atol=1e-5, rtol=1e-4)


def test_the_first_tokens_share_is_that_of_stock_patterns(stock, tmp_path, monkeypatch):
    printed, names = ran("Where sinks come from", tmp_path, monkeypatch)
    patterns = attentions(stock, torch.tensor([names["words"]]))
    later = patterns.shape[-1] - 1
    middles = 1 + ((np.arange(512) + 0.5) * later / 512).astype(int)
    expected = patterns[:, :, middles, 0].mean(-1)
    assert later > 512
    assert_allclose(names["octaves"]["first_token"].values, expected.numpy(), atol=1e-5)
    share = f"no BOS: {100 * float(expected.mean()):.1f} % on the first token"
    assert printed.count(share) == 2, "two models, which are one here"


def test_interpolation_is_that_of_the_configuration(tmp_path, monkeypatch):
    printed, names = ran(
        "RoPE scaling without training: NTK, YaRN and interpolation", tmp_path, monkeypatch
    )
    path, tokens = zoo_path("language/rope"), names["tokens"]
    stock = AutoModelForCausalLM.from_pretrained(path)
    config = stock.config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    scaled = AutoModelForCausalLM.from_pretrained(path, config=config).eval()
    with torch.no_grad():
        rise = float(scaled(tokens, labels=tokens).loss) - names["plain"]
    assert f"interpolation by 4: {rise:+.3f}" in printed


def test_the_strongest_key_is_that_of_stock_patterns(stock, tmp_path, monkeypatch):
    _, names = ran("A measure of one's own", tmp_path, monkeypatch)
    text = names["inspect"].getsource(names["textwrap"])[:1500]
    patterns = attentions(stock, ri.tokens(text, names["model"])[0])
    strongest = patterns[:, :, 1:].argmax(-1)
    rows = torch.arange(1, patterns.shape[-1])
    expected = (strongest == rows - 1).double().mean(-1)
    assert_allclose(names["share"].isel(prompt=0).values, expected.numpy(), atol=2e-2)


def test_stopped_pairs_are_those_of_stock_frequencies(stock, tmp_path, monkeypatch):
    """p-RoPE and HoPE are transformers' model with some of its frequencies at 0."""
    printed, names = ran("p-RoPE and HoPE without training", tmp_path, monkeypatch)
    tokens, pairs, rotary = names["tokens"], names["pairs"], stock.model.rotary_emb
    frequencies = rotary.inv_freq.clone()

    def line(words, kept) -> str:
        rotary.inv_freq = frequencies * kept
        with torch.no_grad():
            return f"{words}: {float(stock(tokens, labels=tokens).loss):.3f}"

    half = line(f"p-RoPE, {pairs // 2} of {pairs} pairs stopped", torch.arange(pairs) < pairs // 2)
    hope = line("HoPE, training length 128", 128 * frequencies >= 2 * torch.pi)
    plain = line("as it is", 1.0)
    assert {plain, half, hope} <= {*printed.splitlines()}
    assert len({text.split(": ")[1] for text in (plain, half, hope)}) == 3


def test_the_first_layer_of_random_weights_is_fitted_as_chance_allows(tmp_path, monkeypatch):
    output, _ = ran("Why random weights are fitted", tmp_path, monkeypatch)
    for line in output.splitlines():
        if "random tokens" in line:
            first, by_chance = re.search(r": r (\S+) .* by chance (\S+)$", line).groups()
            assert float(first) == pytest.approx(float(by_chance), abs=0.02)


def test_more_pairs_build_a_function_of_the_distance_better(tmp_path, monkeypatch):
    title = "Any function of the distance, built from rotations"
    printed, names = ran(title, tmp_path, monkeypatch)
    for line in printed.splitlines():
        errors = [float(word) for word in line.split(": ")[1].split()]
        assert errors == sorted(errors, reverse=True) and errors[-1] < 1
    # what is left is orthogonal to all waves: a closed form of the least-squares error
    waves, wanted = names["waves"].numpy(), names["wanted"].numpy()
    basis, sizes, _ = np.linalg.svd(waves, full_matrices=False)
    basis = basis[:, sizes > sizes[0] * len(waves) * np.finfo(float).eps]
    left = wanted - basis @ (basis.T @ wanted)
    error = np.linalg.norm(left) / np.linalg.norm(wanted)
    assert_allclose(names["errors"][-1], error, rtol=1e-3, atol=1e-4)


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


def test_windows_and_sinks_have_the_losses_of_transformers_with_additive_masks(
    tmp_path, monkeypatch, stock
):
    _, names = ran("A window needs the first tokens", tmp_path, monkeypatch)
    tokens, found = names["tokens"], names["found"]
    index = torch.arange(tokens.shape[1])
    apart = index[:, None] - index
    for name, hidden in (
        ("as it is", apart < 0),
        ("window 64", (apart < 0) | (apart >= 64)),
        ("with 4 sinks", (apart < 0) | ((apart >= 64) & (index >= 4))),
    ):
        mask = torch.zeros(apart.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = stock(tokens, attention_mask=mask[None, None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        # tokens 128 and later, in blocks of 32
        expected = np.mean([block.mean() for block in losses[127:].split(32)])
        assert_allclose(found["mean_loss"].sel(edit=name), expected, rtol=1e-5)


def test_far_pairs_have_the_losses_of_transformers_that_rotates_by_them(
    tmp_path, monkeypatch, stock
):
    """Interpolation by two, which transformers computes itself."""
    _, names = ran("Far pairs that seem near", tmp_path, monkeypatch)
    frequencies = stock.model.rotary_emb.inv_freq
    tokens = torch.tensor([list(text) for text in names["texts"]])
    found = names["found"]["mean_loss"]
    for name, divisor in (("interpolation", 2), ("as it is", 1)):
        stock.model.rotary_emb.inv_freq = frequencies / divisor
        with torch.no_grad():
            logits = stock(tokens).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        length = names["length"]
        for band, some in enumerate((losses[:, : length - 1], losses[:, length - 1 :])):
            assert_allclose(found.sel(edit=name)[band], some.mean(), rtol=1e-4)
