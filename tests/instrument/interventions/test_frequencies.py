"""Frequencies of heads, layers and models, and rotary pairs that are removed."""

import re
from contextlib import ExitStack
from copy import deepcopy

import families
import pytest
import torch
from families import TOKENS, repositioned, tiny
from hooks import hooks_of
from own_schemes import model_of, parts, register_all
from refusals import refused
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM
from transformers.models.llama import modeling_llama

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.interventions.extension import allowed_methods
from repo_interp.models.decoder import as_decoder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.biases import ALiBi

NEAR = {"atol": 1e-5, "rtol": 1e-4}


def half_rotated():
    """A model that rotates half of the dimensions of each head."""
    return PhiForCausalLM(PhiConfig(**families.TINY, partial_rotary_factor=0.5))


@torch.no_grad()
def logits(model, *contexts):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def rope():
    torch.manual_seed(0)
    return ri.reposition(tiny("llama"), "rope").eval()


def pair_count(model):
    return len(ri.models.decoder.as_decoder(model).layers[0].frequencies)


def test_without_any_pair_that_turns_a_model_is_one_without_positions(rope):
    nope = ri.reposition(deepcopy(rope), "nope").eval()
    before = hooks_of(rope)
    none = torch.zeros(pair_count(rope))
    assert_close(logits(rope, iv.rescaled(rope, factors=none)), logits(nope), **NEAR)
    by_layer = [iv.rescaled(rope, layer, function=lambda theta: theta * 0) for layer in range(3)]
    assert_close(logits(rope, *by_layer), logits(nope), **NEAR)
    assert hooks_of(rope) == before and (logits(rope) - logits(nope)).abs().max() > 1e-3


@pytest.mark.parametrize("make", [lambda: tiny("llama"), half_rotated], ids=["llama", "phi"])
def test_a_factor_per_pair_is_what_stock_transformers_computes_with_them(make):
    torch.manual_seed(0)
    stock = make().eval()
    ours = ri.reposition(deepcopy(stock), "rope").eval()
    inverse = next(m.inv_freq for m in stock.modules() if hasattr(m, "inv_freq"))
    factors = torch.rand(len(inverse), generator=torch.Generator().manual_seed(2))
    factors[-1] = 0.0
    inverse.mul_(factors)
    changed = logits(ours, iv.rescaled(ours, factors=factors))
    assert_close(changed, logits(stock), **NEAR)
    assert (changed - logits(ours)).abs().max() > 1e-4


def test_heads_layers_and_model_are_the_same_heads_and_nest(rope):
    factors = torch.linspace(0, 1, pair_count(rope))
    pairs = [(layer, head) for layer in range(3) for head in range(4)]
    low = torch.arange(len(factors)) < 2
    bands = torch.where(low, factors, 1.0), torch.where(low, 1.0, factors)
    whole = logits(rope, iv.rescaled(rope, factors=factors))
    for contexts in (
        [iv.rescaled(rope, factors=factors, heads=pairs)],
        [iv.rescaled(rope, factors=factors, layer=[0, 1, 2])],
        [iv.rescaled(rope, factors=band) for band in bands],
    ):
        assert_close(logits(rope, *contexts), whole)


def test_factors_by_layer_and_head_are_those_of_stock_queries_and_keys_turned_by_them(monkeypatch):
    torch.manual_seed(0)
    stock = LlamaForCausalLM(
        LlamaConfig(**families.TINY | {"num_key_value_heads": 4}, attn_implementation="eager")
    ).eval()
    ours = ri.reposition(deepcopy(stock), "rope").eval()
    layers, pairs = len(stock.model.layers), pair_count(ours)
    factors = torch.rand(layers, 4, pairs, generator=torch.Generator().manual_seed(2))
    factors[factors < 0.4] = 0.0
    found = logits(ours, iv.rescaled(ours, factors=factors))
    calls = iter(range(layers))

    def turned(q, k, cosines, sines, *rest):
        by = factors[next(calls)] * stock.model.rotary_emb.inv_freq
        angles = (torch.arange(q.shape[2])[:, None] * by[:, None]).repeat(1, 1, 2)
        half = modeling_llama.rotate_half
        return (x * angles.cos() + half(x) * angles.sin() for x in (q, k))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turned)
    assert_close(found, logits(stock), **NEAR)


def test_factors_by_head_are_changes_of_heads_one_by_one_where_heads_share_keys(rope):
    factors = torch.rand(3, 4, pair_count(rope), generator=torch.Generator().manual_seed(3))
    one_by_one = [
        iv.rescaled(rope, function=lambda theta, by=by: theta * by, heads=(layer, head))
        for layer, of_layer in enumerate(factors)
        for head, by in enumerate(of_layer)
    ]
    whole = logits(rope, *one_by_one)
    assert_close(logits(rope, iv.rescaled(rope, factors=factors.numpy())), whole)
    by_head, some = factors[1], [(1, 0), (1, 3)]
    expected = logits(rope, one_by_one[4], one_by_one[7])
    for given in (factors, by_head, by_head[None]):
        assert_close(logits(rope, iv.rescaled(rope, heads=some, factors=given)), expected)
    by_layer = logits(rope, iv.rescaled(rope, factors=factors[:, :1]))
    layers = [iv.rescaled(rope, layer, factors=factors[layer, 0]) for layer in range(3)]
    assert_close(by_layer, logits(rope, *layers))


def test_ntk_is_another_base(rope):
    count = pair_count(rope)
    base = 10_000.0 * 4.0 ** (count / (count - 1))
    by_base = logits(rope, iv.rescaled(rope, theta=base))
    assert_close(logits(rope, iv.rescaled(rope, ntk=4.0)), by_base, **NEAR)


def test_removing_all_pairs_looks_evenly_and_means_of_one_token_change_nothing(rope):
    every = {"pairs": range(pair_count(rope))}
    bridge, heads = ri.bridge(deepcopy(rope)), [(1, head) for head in range(4)]
    with torch.no_grad(), iv.ablate(bridge, heads, **every):
        _, cache = bridge.run_with_cache(TOKENS)
    pattern = cache["blocks.1.attn.hook_pattern"]
    even = torch.tril(torch.ones(20, 20)) / torch.arange(1, 21)[:, None]
    assert_close(pattern, even.expand_as(pattern), atol=1e-6, rtol=1e-5)
    one = TOKENS[:1, :1]
    means = iv.query_key_means(rope, one)
    with torch.no_grad():
        plain = rope(one).logits
        with iv.ablate(rope, heads, means, **every):
            assert_close(rope(one).logits, plain, **NEAR)
    changed = logits(rope, iv.ablate(rope, heads, means, pairs=[0]))
    assert (changed - logits(rope)).abs().max() > 1e-5


REFUSED = {
    "wanted one number for each of": ("rescaled", (), {"factors": [1.0, 2.0, 3.0]}),
    "[4 heads, pair] or [3 layers,": ("rescaled", (), {"factors": torch.ones(2, 4, 4)}),
    "are [3, 4]; wanted": ("rescaled", (), {"factors": torch.ones(3, 4)}),
    "are []; wanted": ("rescaled", (), {"factors": 0.5}),
    "are NaN or infinite": ("rescaled", (), {"function": lambda theta: theta * torch.nan}),
    "got yarn, factors": ("rescaled", (), {"yarn": 2, "factors": [1.0]}),
    "was wanted; got none": ("rescaled", (0,), {}),
    "factor of an extension is -1": ("rescaled", (), {"linear": -1.0}),
    "head 9 was asked for": ("rescaled", (0, 9), {"linear": 2.0}),
    "not both": ("rescaled", (0,), {"heads": [(0, 0)], "linear": 2.0}),
    "heads=[(layer, head), ...]": ("rescaled", ([0, 1], 1), {"linear": 2.0}),
    "pairs of layer 0 are 0 to": ("ablate", ((0, 0),), {"pairs": [99]}),
    "leave sets out": ("ablate", (), {"sets": [[(0, 0)]], "pairs": [0]}),
    "are no finite": ("ablate", ([(0, head) for head in range(4)], {}), {"pairs": [0]}),
    "name all of them": ("ablate", ((0, 0), {}), {"pairs": [0]}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_and_leaves_nothing(rope, message):
    before, (name, given, named) = hooks_of(rope), REFUSED[message]
    with refused(re.escape(message)):
        logits(rope, getattr(iv, name)(rope, *given, **named))
    assert hooks_of(rope) == before


@pytest.mark.parametrize("scheme", ["nope", "alibi"])
def test_a_model_that_does_not_rotate_is_refused_by_name(scheme):
    model = repositioned(scheme)
    for change in (
        iv.rescaled(model, linear=2.0),
        iv.rescaled(model, 0, linear=2.0),
        iv.ablate(model, (0, 0), pairs=[0]),
    ):
        with refused(rf"\({scheme}.*\).*rotate"):
            logits(model, change)


@pytest.mark.parametrize("scheme", ["repo", "hope", "cope_rope"])
def test_learned_positions_and_other_schemes_take_them(scheme):
    model = repositioned(scheme)
    changed = logits(model, iv.rescaled(model, function=lambda theta: theta / 3))
    assert_close(changed, logits(model, iv.rescaled(model, linear=3.0)))


@pytest.mark.parametrize("scheme", ["by_pair", "by_head_and_pair", "selective_rope"])
def test_positions_by_pair_have_no_base_that_could_be_another(scheme, monkeypatch):
    """Found: YaRN changed the size of logits alone, NTK nothing."""
    register_all(monkeypatch)
    model = model_of(scheme)
    for change in ({"yarn": 2.0}, {"ntk": 2.0}, {"theta": 5e5}):
        with refused(r"no layer of this model .* rotates by one position"):
            logits(model, iv.rescaled(model, **change))
        with refused(rf"layer 1 \({scheme}\) gives every rotary pair its own position"):
            logits(model, iv.rescaled(model, 1, **change))
    for method in (iv.lm_infinite(model, 8), iv.infllm(model, 8), iv.yarn(model, 2.0, 8)):
        with refused("has no distance to change|by one position per token"):
            logits(model, method)
    assert allowed_methods(as_decoder(model)) == ("plain", "interpolation")
    mixed = model_of(f"rope,{scheme},rope")
    before = logits(mixed)
    assert not torch.allclose(logits(mixed, iv.rescaled(mixed, yarn=2.0)), before)
    assert torch.equal(logits(mixed), before)


def test_all_angles_of_positions_by_pair_are_divided_as_those_of_rope(monkeypatch):
    register_all(monkeypatch)
    of_pairs, rope = model_of("by_pair"), model_of("rope")
    for change in ({"linear": 3.0}, {"factors": [1.0, 1.0, 0.0, 0.5]}):
        changed = logits(rope, iv.rescaled(rope, **change))
        assert_close(logits(of_pairs, iv.rescaled(of_pairs, **change)), changed, atol=1e-3, rtol=0)
    interpolated = logits(of_pairs, iv.interpolated(of_pairs, 3.0))
    assert_close(interpolated, logits(rope, iv.interpolated(rope, 3.0)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("change", [{"linear": 2.0}, {"ntk": 2.0}])
def test_a_change_that_changes_nothing_is_refused(change, monkeypatch):
    register_all(monkeypatch)
    model = model_of("still")
    before = hooks_of(model)
    with refused(rf"{next(iter(change))}=2 changes nothing: the frequencies of still stay"):
        logits(model, iv.rescaled(model, **change))
    assert hooks_of(model) == before
    logits(model, iv.rescaled(model, linear=1.0))


def test_a_bias_by_distance_of_another_package_is_extended_as_alibi(monkeypatch):
    """What it is decides, and not the class that it is made of."""
    register_all(monkeypatch)

    def slopes(b, r, d):
        return parts(TokenIndex(), logits=ALiBi(r.heads, slopes=[1 / 8] * r.heads))

    ri.register_scheme("slopes", slopes)
    far, alibi, term = (model_of(layout) for layout in ("far", "slopes", "as_term"))
    assert allowed_methods(as_decoder(far)) == allowed_methods(as_decoder(alibi))
    assert allowed_methods(as_decoder(term)) == ("plain",)
    for method in (iv.interpolated, iv.lm_infinite, iv.infllm):
        changed = logits(far, method(far, 4))
        assert not torch.allclose(changed, logits(far))
        assert_close(changed, logits(alibi, method(alibi, 4)), **NEAR)
    with refused("has no distance to change"):
        logits(term, iv.lm_infinite(term, 8))
