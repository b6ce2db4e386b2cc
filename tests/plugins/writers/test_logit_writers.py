"""Writers of a logit: their products add up to it in every family, and are those of slow hooks."""

import numpy as np
import pytest
import torch
from families import TINY, TOKENS, repositioned, tiny
from hooks import hooks_of
from numpy.testing import assert_allclose
from refusals import refused
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.models.decoder import as_decoder

PROMPT = TOKENS[0].tolist()
HERE = {"layer": 2, "head": 1, "query": 15, "key": 9}
SCHEMES = ("rope", "repo", "nope", "alibi", "hope", "learned", "cope", "fire")
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3", "gpt_neox")
"""Plain; biases; QK-norms by head; of all heads, norm after attention; soft caps; both; side by side
with layer norms, biases and a partial rotation.
"""


def model_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    if name == "gpt_neox":
        sizes = {key: size for key, size in TINY.items() if "key_value" not in key}
        config = GPTNeoXConfig(
            **sizes, use_parallel_residual=True, initializer_range=0.2, rotary_pct=0.5
        )
        model = ri.reposition(AutoModelForCausalLM.from_config(config).eval(), "rope")
    elif name in SCHEMES:
        model = repositioned(name)
    else:
        model = ri.reposition(tiny(name), "rope")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key or "bias" in key:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.to(dtype)


@pytest.mark.parametrize("name", [*SCHEMES, *FAMILIES])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_products_of_writers_add_up_to_the_logit_and_to_each_pair(name, dtype, error):
    model = model_of(name, dtype)
    before = hooks_of(model)
    found = ri.logit_writers(model, PROMPT, **HERE)
    assert hooks_of(model) == before
    assert found.sizes["query_writer"] == 12  # embedding, 2 x (4 heads + MLP), constants
    whole = ri.explain_logit(model, PROMPT, **HERE)
    parts = found["contribution"]
    added = float(whole["soft_cap"] + whole["bias"])
    assert abs(float(parts.sum()) + added - float(whole["logit"])) < error
    assert abs(float(found["rounding"])) < error
    turns = whole["frequency"].values != 0
    pairs = whole["pair"].values
    expected = [*pairs[turns], *([] if turns.all() else [pairs[~turns].sum()])]
    assert_allclose(parts.sum(("query_writer", "key_writer")), expected, atol=error)
    assert found["pair"].values.tolist() == [
        *np.flatnonzero(turns),
        *([] if turns.all() else [-1]),
    ]
    # No part is lost in another: the largest is no sum
    assert float(abs(parts).max()) > 0.01


def test_a_partial_rotation_has_its_rest_and_nothing_rotated_is_one_pair():
    pairs = {
        name: ri.logit_writers(model_of(name), PROMPT, **HERE)["pair"].values.tolist()
        for name in ("rope", "gpt_neox", "nope")
    }
    assert pairs == {"rope": [0, 1, 2, 3], "gpt_neox": [0, 1, -1], "nope": [-1]}


def written_by(model, tokens):
    """What enters layer 2 of a Llama or Qwen, by part, with hooks on linear maps."""
    layers, seen, hooks = model.model.layers, {}, []

    def keep(name):
        return lambda module, given, out: seen.__setitem__(name, (given[0][0], out))

    hooks.append(model.model.embed_tokens.register_forward_hook(keep("embedding")))
    for place, layer in enumerate(layers[:2]):
        hooks.append(layer.self_attn.o_proj.register_forward_hook(keep((place, "o"))))
        hooks.append(layer.mlp.register_forward_hook(keep((place, "mlp"))))
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    found = {"embedding": seen["embedding"][1][0]}
    for place, layer in enumerate(layers[:2]):
        for head in range(4):
            columns = slice(8 * head, 8 * head + 8)
            weight = layer.self_attn.o_proj.weight.detach()[:, columns]
            found[f"L{place} H{head}"] = seen[place, "o"][0].detach()[:, columns] @ weight.T
        found[f"L{place} MLP"] = seen[place, "mlp"][1][0].detach()
    return found


def turned(vector, position):
    """Half-split rotation of 8 dimensions with base 10,000, as complex numbers."""
    pairs = torch.complex(vector[:4], vector[4:])
    return pairs * torch.exp(1j * position * 10_000.0 ** (-torch.arange(4.0) / 4))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_part_is_that_of_plain_hooks_and_frozen_norms(family):
    model = model_of(family)
    attention, norm = model.model.layers[2].self_attn, model.model.layers[2].input_layernorm
    parts = written_by(model, TOKENS[:1])
    whole = sum(parts.values())

    def side(token, projection, head, qk_norm):
        scale = (whole[token].square().mean() + norm.variance_epsilon).rsqrt() * norm.weight
        rows = slice(8 * head, 8 * head + 8)
        weight = projection.weight[rows]
        bias = torch.zeros(8) if projection.bias is None else projection.bias[rows]
        plain = weight @ (whole[token] * scale) + bias
        after = torch.ones(8)
        if qk_norm is not None:
            after = (plain.square().mean() + qk_norm.variance_epsilon).rsqrt() * qk_norm.weight
        vectors = {name: after * (weight @ (part[token] * scale)) for name, part in parts.items()}
        vectors["bias"] = after * bias
        return {name: turned(vector, token) for name, vector in vectors.items()}

    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    # Heads 0 and 1 share key 0
    queries = side(15, attention.q_proj, 1, norms[0])
    keys = side(9, attention.k_proj, 0, norms[1])
    found = ri.logit_writers(model, PROMPT, **HERE)["contribution"]
    assert [str(name) for name in found["query_writer"].values] == list(queries)
    size = float(abs(found).max())
    for one, query in queries.items():
        for other, key in keys.items():
            expected = (query * key.conj()).real * attention.scaling
            got = found.sel(query_writer=one, key_writer=other)
            assert_allclose(got, expected, atol=2e-5 * size, err_msg=f"{one}, {other}")
    bias = float(abs(found.sel(query_writer="bias")).max())
    assert (bias > 0.01 * size) == (family == "qwen2")


def test_against_another_key_is_the_difference_of_two_logits():
    model = model_of("repo")
    one, two = (ri.logit_writers(model, PROMPT, **HERE | {"key": key}) for key in (9, 4))
    found = ri.logit_writers(model, PROMPT, **HERE, against=4)
    assert_allclose(found["contribution"], one["contribution"] - two["contribution"], atol=1e-6)
    assert float(found["logit"]) == pytest.approx(float(one["logit"] - two["logit"]), abs=1e-6)
    assert found.attrs["against"] == 4 and " less that for token 4 " in found.attrs["finding"]


def test_a_bridge_edits_and_the_first_layer_add_up_too():
    model = model_of("repo")
    expected = ri.logit_writers(model, PROMPT, **HERE)
    bridged = ri.logit_writers(ri.bridge(model_of("repo")), PROMPT, **HERE)
    assert_allclose(bridged["contribution"], expected["contribution"], atol=1e-5)
    with iv.scaled(model, 3.0):
        edited = ri.logit_writers(model, PROMPT, **HERE)
    # The same queries and keys of an unchanged layer 0, at other positions
    assert abs(float(edited["rounding"])) < 1e-5
    assert abs(float(edited["logit"] - expected["logit"])) > 1e-3
    first = ri.logit_writers(model, PROMPT, **HERE | {"layer": 0})
    assert first["query_writer"].values.tolist() == ["embedding", "bias"]
    assert abs(float(first["rounding"])) < 1e-5


def test_the_finding_names_the_largest_product_and_the_figure_shows_it():
    model = ri.open_model("reversal/repo")
    prompt = ri.tasks.make_task("reversal").prompts(1)[0]
    last = len(prompt.tokens) - 1
    found = ri.logit_writers(model, prompt, layer=2, head=1, query=last, key=5)
    product = found["contribution"].sum("pair")
    one, other = product.stack(both=("query_writer", "key_writer")).idxmax().item()
    assert f"is {one} in the query with {other} in the key" in found.attrs["finding"]
    assert found["query_layer"].values.tolist()[:2] == [-1, 0] and found["key_layer"][-1] == -2
    assert found["key_head"].sel(key_writer="L1 H1") == 1
    figure = ri.plots.logit_writers(found)
    left, right, *_ = figure.axes
    cells = left.images[0].get_array()
    assert cells.sum() == pytest.approx(float(product.sum()), abs=1e-5)
    assert cells.max() == pytest.approx(float(product.max()), abs=1e-6) or "others" in str(
        [label.get_text() for label in left.get_yticklabels()]
    )
    heights = [bar.get_height() for bar in right.patches[: found.sizes["pair"]]]
    assert_allclose(heights, found["contribution"].sum(("query_writer", "key_writer")))
    assert f"logit {float(found['logit']):.2f}" in figure.get_suptitle()
    with refused("writers of a logit are what ri.logit_writers returns"):
        ri.plots.logit_writers(found[["logit"]])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"key": 16}, "token 15 does not see token 16"),
        ({"layer": 7}, "layer 7 was asked for"),
        ({"head": 4}, "head 4 was asked for"),
        ({"against": 30}, "key 30 was asked for"),
    ],
)
def test_what_has_no_logit_is_refused(change, line):
    with refused(line):
        ri.logit_writers(model_of("rope"), PROMPT, **HERE | change)


def test_half_precision_and_queries_that_are_no_linear_map_are_refused():
    with refused("the weights are in bfloat16"):
        ri.logit_writers(model_of("rope", torch.bfloat16), PROMPT, **HERE)
    model = model_of("rope")
    projection = as_decoder(model).by_layer[2].module.q_proj
    undo = projection.register_forward_hook(lambda module, given, out: torch.tanh(3 * out))
    with refused("by more than norms and linear maps"):
        ri.logit_writers(model, PROMPT, **HERE)
    undo.remove()
