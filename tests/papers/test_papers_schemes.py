"""Schemes of 2024 and 2025 as plug-ins: slow loops, caches, and a run."""

import math

import numpy as np
import pytest
import torch
from families import tiny
from torch.nn import functional as F
from torch.testing import assert_close

import repo_interp as ri
from position_papers import schemes
from repo_interp.errors import InputError
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks import Prompt

NAMES = ("forgetting", "selective_rope", "pope", "path")
HEADS, KV_HEADS, D_HEAD, D_MODEL, TOKENS, SCALE = 4, 2, 6, 10, 7, 0.4


@pytest.fixture(params=[name for name in NAMES if name != "selective_rope"])
def scheme(request):
    torch.manual_seed(0)
    module = {
        "forgetting": lambda: schemes.Forgetting(D_MODEL, HEADS),
        "pope": lambda: schemes.Polar(HEADS, D_HEAD, base=50.0),
        "path": lambda: schemes.Householder(D_MODEL, KV_HEADS, D_HEAD),
    }[request.param]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(0.7 * torch.rand_like(parameter))
    return request.param, module


def of_batch():
    """Queries, keys, hidden states and masks of two prompts, the second padded on the left."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*sizes):
        return torch.randn(2, *sizes, generator=generator)

    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[1, :2] = False
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & valid[:, None] & valid[:, :, None]
    index = (valid.cumsum(-1) - 1).clamp(min=0)
    queries, keys = drawn(HEADS, TOKENS, D_HEAD), drawn(KV_HEADS, TOKENS, D_HEAD)
    return queries, keys, drawn(TOKENS, D_MODEL), index, seen[:, None]


def slow(name, module, q, k, hidden, i, j, index, head):
    """The whole logit of one pair, from the formulas."""
    group = head // (HEADS // KV_HEADS)
    between = hidden[j + 1 : i + 1]
    if name == "forgetting":
        return SCALE * q @ k + F.logsigmoid(module.gate(between))[:, head].sum()
    if name == "pope":
        total = 0.0
        for c in range(D_HEAD):
            theta = 50.0 ** (-c / D_HEAD)
            delta = min(max(float(module.delta[head, c]), -2 * math.pi), 0.0)
            size = F.softplus(q[c]) * F.softplus(k[c])
            total += size * math.cos(float(index[j] - index[i]) * theta + delta)
        return SCALE * total
    moved = k
    for t in range(j + 1, i + 1):
        w = module.direction(hidden[t]).view(KV_HEADS, D_HEAD)[group]
        w = w / w.norm()
        beta = 2 * torch.sigmoid(module.strength(hidden[t])[group])
        moved = moved - beta * w * (w @ moved)
    return SCALE * q @ moved


@torch.no_grad()
def test_logits_equal_the_papers_formulas_pair_by_pair_also_of_some_rows(scheme):
    name, module = scheme
    queries, keys, hidden, index, seen = of_batch()
    gate_keys = module.gate_keys(hidden)

    def added(rows):
        own = queries[:, :, rows], keys, index[:, rows], index, seen[:, :, rows]
        return module(*own, SCALE, None, gate_keys)

    whole, rows = added(torch.arange(TOKENS)), torch.tensor([6, 3])
    assert_close(added(rows), whole[:, :, rows], atol=1e-6, rtol=1e-5)
    for place in np.ndindex(2, HEADS, TOKENS, TOKENS):
        prompt, head, i, j = place
        if not seen[prompt, 0, i, j]:
            assert float(whole[place]) == 0.0
            continue
        q, k = queries[prompt, head, i], keys[prompt, head // 2, j]
        wanted = slow(name, module, q, k, hidden[prompt], i, j, index[prompt], head)
        assert_close(SCALE * q @ k + whole[place], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_it_is_analyzed_and_generates_from_a_cache(name):
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), f"rope,{name},{name}")
    tokens = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens).logits
        half = model(tokens[:, :7], use_cache=True)
        rest = model(tokens[:, 7:], past_key_values=half.past_key_values).logits
    assert_close(rest, whole[:, 7:], atol=1e-4, rtol=1e-4)
    (prompt,) = prompts_of(tokens)
    run = ri.analyze(model, [prompt], measures=("attention_mass",))
    mass = run["attention_mass"]["mass"].sel(span="needle", layer=1).values.ravel()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        pattern = model(tokens, output_attentions=True).attentions[1][0, :, 10, 3:5].sum(-1)
    np.testing.assert_allclose(mass, pattern.numpy(), atol=1e-5)


def prompts_of(tokens):
    spans = {"needle": (3, 4)}
    return [Prompt(tokens=tuple(row), spans=spans, generated=(11,)) for row in tokens.tolist()]


@torch.no_grad()
def test_selective_rope_turns_by_sums_between_key_and_query_and_measures_follow():
    """The layer's logits pair by pair, and the measures that know positions by pair."""
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), "rope,selective_rope,selective_rope")
    layer = as_decoder(model).layers[1]
    layer.assigner.angle.weight.mul_(30.0)
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    found, hidden = {}, []

    def keep(module, arguments, keywords):
        hidden.append(keywords["hidden_states"])

    def note(inputs):
        found[inputs.layer] = inputs

    handle = layer.module.register_forward_pre_hook(keep, with_kwargs=True, prepend=True)
    capture(as_decoder(model), tokens, torch.ones(2, 12, dtype=torch.bool), torch.arange(2), note)
    handle.remove()
    inputs, angles = found[1], layer.assigner.angle(hidden[0])
    logits, half = inputs.logits(torch.arange(12)), inputs.queries.shape[-1] // 2
    query, key = (
        torch.complex(part[..., :half], part[..., half:]) for part in (inputs.queries, inputs.keys)
    )
    for prompt, head, i, j in ((0, 0, 5, 2), (1, 3, 11, 0), (1, 2, 7, 7)):
        phase = angles[prompt, j + 1 : i + 1].sum(0)
        turned = query[prompt, head, i] * key[prompt, head // 2, j].conj()
        wanted = (turned * torch.polar(torch.ones(half), phase)).real.sum() * inputs.logit_scale
        assert_close(logits[prompt, head, i, j], wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(inputs.rotated_queries, inputs.queries)

    names = {"positions", "components", "three_axis", "attention_mass", "octaves", "maps"}
    run = ri.analyze(model, prompts_of(tokens), (*names, "patterns"))
    assert set(run.children) == names
    assert run.attrs["stopped"].startswith("patterns: patterns reads one position per token")
    positions, maps, curves = (run[name] for name in ("positions", "maps", "components"))
    by_pair = positions["position_by_pair"].sel(layer=1, head=0).transpose("prompt", "token", ...)
    np.testing.assert_allclose(by_pair.values, angles.cumsum(1).numpy(), atol=1e-4)
    for values, known in (
        (positions["position"], 0),
        (positions["position_by_pair"], 1),
        (maps["fake_map"], 0),
    ):
        assert values.sel(layer=1 - known).isnull().all()
        assert values.sel(layer=known).notnull().any()
    seen = np.tri(12, dtype=bool)
    kept = maps["logit_map"].sel(layer=1).values[..., seen]
    np.testing.assert_allclose(kept, logits[0][:, seen].numpy(), atol=1e-5)
    assert curves["position_reach"].sel(layer=1).isnull().all()
    summed = curves["component_by_distance"].sum("component").sel(layer=1)
    whole = curves["logit_by_distance"].sel(layer=1).mean("head")
    np.testing.assert_allclose(summed.values, whole.values, atol=1e-5)
    with (
        ri.interventions.frozen(model, layer=1),
        pytest.raises(InputError, match="leave the layer"),
    ):
        model(tokens)
