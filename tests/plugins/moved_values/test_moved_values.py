"""Norms of values against transformers' attentions and projections; values scaled by a hook."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import xarray as xr
from families import TOKENS, repositioned, tiny
from numpy.testing import assert_allclose
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.plugins.moved_values.view import VIEW

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@torch.no_grad()
def by_hand(stock, tokens):
    """Attention [layer, head, query, key] and values [layer, head, token, d] of transformers."""
    values = []
    undo = [
        layer.self_attn.v_proj.register_forward_hook(
            lambda module, given, out: values.append(out[0].unflatten(-1, (2, -1)).transpose(0, 1))
        )
        for layer in stock.model.layers
    ]
    stock.set_attn_implementation("eager")
    attentions = stock(torch.tensor([tokens]), output_attentions=True).attentions
    for handle in undo:
        handle.remove()
    return torch.stack(attentions)[:, 0].double(), torch.stack(values).repeat_interleave(
        2, 1
    ).double()


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_norms_are_those_of_transformers_attentions_and_values(family):
    torch.manual_seed(0)
    stock = tiny(family)
    model = ri.reposition(deepcopy(stock), "rope")
    prompts = [TOKENS[0].tolist(), TOKENS[1, :13].tolist()]
    found = ri.analyze(model, prompts, measures=("value_norms",))["value_norms"]
    for number, prompt in enumerate(prompts):
        weights, values = by_hand(stock, prompt)
        norms = values.norm(dim=-1)
        moved = (weights * norms[:, :, None]).sum(-1)[..., 1:]
        at_first = weights[..., 1:, 0]
        expected = {
            "first_value": norms[..., 0] / norms[..., 1:].median(-1).values,
            "first_weight": at_first.mean(-1),
            "first_moved": (at_first * norms[..., :1] / moved).mean(-1),
            "output": ((weights @ values).norm(dim=-1)[..., 1:] / moved).mean(-1),
        }
        for name, value in expected.items():
            assert_allclose(found[name].sel(prompt=number), value, **CLOSE)


@pytest.mark.parametrize(("value", "said"), [(0.2, 1), (0.9, 0)])
def test_a_first_token_that_is_looked_at_and_moves_little_is_a_finding(value, said):
    parts = {"first_weight": 0.8, "first_value": value, "first_moved": 0.3, "output": 0.5}
    group = xr.Dataset(
        {
            name: (("prompt", "layer", "head"), np.full((2, 1, 2), part))
            for name, part in parts.items()
        },
        {"layer": [3], "head": [0, 1]},
    )
    found = list(VIEW.findings(xr.DataTree.from_dict({"value_norms": group})))
    assert len(found) == said
    if found:
        assert found[0].sentence == (
            "Of 2 heads that give most attention to the first token, 2 find a small value there: 0.20 "
            "of the median of other tokens, so that it is 30 % of what they move"
        )
        assert (found[0].layer, found[0].head) == (3, 0)


def test_of_packed_documents_the_first_token_is_that_of_each():
    model = repositioned("rope")
    prompt = TOKENS[0].tolist()
    packed = ri.prompt(prompt, model, position_ids=[*range(8), *range(12)])
    norms = [
        ri.analyze(model, [some], measures=("value_norms",))["value_norms"]["first_weight"]
        for some in (packed, prompt[:8], prompt[8:])
    ]
    whole, one, other = (each.isel(prompt=0).values for each in norms)
    assert_allclose(whole[0], (7 * one[0] + 11 * other[0]) / 18, **CLOSE)
    single = ri.analyze(model, [prompt[:1]], measures=("value_norms",))["value_norms"]
    assert all(np.isnan(single[name]).all() for name in single)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scaled_values_are_those_of_a_hook_on_the_projection(family):
    torch.manual_seed(0)
    stock = tiny(family)
    model = ri.reposition(deepcopy(stock), "rope")

    def halve(module, given, out):
        out = out.clone()
        out[:, [0, 5], 8:] *= 0.5  # the second of two key-value heads, of 8 numbers
        return out

    handle = stock.model.layers[1].self_attn.v_proj.register_forward_hook(halve)
    with torch.no_grad():
        expected = stock(TOKENS).logits
        handle.remove()
        with iv.scaled_values(model, 0.5, [(1, 2), (1, 3)], tokens=[0, 5]):
            assert_close(model(TOKENS).logits, expected, **CLOSE)
        with iv.scaled_values(model, 0.0, layers=[0, 1, 2]):  # attention writes nothing
            found = model(TOKENS).logits
        with iv.ablate(model, [(layer, head) for layer in range(3) for head in range(4)]):
            assert_close(found, model(TOKENS).logits, **CLOSE)


def test_generation_with_a_cache_is_generation_without():
    torch.manual_seed(0)
    model = repositioned("repo head")
    given = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with iv.scaled_values(model, 0.0, tokens=[0, 21]):
        cached = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **given)
        whole = model.generate(
            TOKENS, attention_mask=torch.ones_like(TOKENS), use_cache=False, **given
        )
    assert torch.equal(cached, whole)


def test_values_that_cannot_be_scaled_are_refused():
    model = repositioned("rope")
    for line, edit in (
        ("heads of layer 1 share values, 2 each", iv.scaled_values(model, 0.0, [(1, 2)])),
        ("the factor that values are scaled by", iv.scaled_values(model, float("nan"))),
        ("layer 7 was asked for", iv.scaled_values(model, 0.0, layers=7)),
        ("tokens are indices", iv.scaled_values(model, 0.0, tokens=[-1])),
        ("tokens of 3 prompts were named", iv.scaled_values(model, 0.0, tokens=[[0], [1], [2]])),
    ):
        with refused(line), edit, torch.no_grad():
            model(TOKENS)
