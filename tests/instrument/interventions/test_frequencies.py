"""Frequencies of heads, layers and models, and rotary pairs that are removed."""

from contextlib import ExitStack
from copy import deepcopy

import families
import pytest
import torch
from families import TOKENS, repositioned, tiny
from hooks import hooks_of
from torch.testing import assert_close
from transformers import PhiConfig, PhiForCausalLM

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.errors import InputError

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


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_a_factor_per_pair_is_what_stock_transformers_computes_with_them(family):
    torch.manual_seed(0)
    stock = half_rotated().eval() if family == "phi" else tiny(family).eval()
    ours = ri.reposition(deepcopy(stock), "rope").eval()
    inverse = next(m for m in stock.modules() if hasattr(m, "inv_freq"))
    factors = torch.rand(len(inverse.inv_freq), generator=torch.Generator().manual_seed(2))
    factors[-1] = 0.0
    inverse.inv_freq.mul_(factors)
    changed = logits(ours, iv.rescaled(ours, factors=factors))
    assert_close(changed, logits(stock), **NEAR)
    assert (changed - logits(ours)).abs().max() > 1e-4


def test_heads_layers_and_model_are_the_same_heads_and_nest(rope):
    factors = torch.linspace(0, 1, pair_count(rope))
    pairs = [(layer, head) for layer in range(3) for head in range(4)]
    whole = logits(rope, iv.rescaled(rope, factors=factors))
    for some in ({"heads": pairs}, {"layer": [0, 1, 2]}):
        assert_close(logits(rope, iv.rescaled(rope, factors=factors, **some)), whole)
    low = torch.arange(len(factors)) < 2
    bands = torch.where(low, factors, 1.0), torch.where(low, 1.0, factors)
    assert_close(logits(rope, *(iv.rescaled(rope, factors=band) for band in bands)), whole)


def test_ntk_is_another_base(rope):
    count = pair_count(rope)
    base = 10_000.0 * 4.0 ** (count / (count - 1))
    by_base = logits(rope, iv.rescaled(rope, theta=base))
    assert_close(logits(rope, iv.rescaled(rope, ntk=4.0)), by_base, **NEAR)


def test_removing_all_pairs_looks_evenly_and_means_of_one_token_change_nothing(rope):
    all_pairs = range(pair_count(rope))
    bridge = ri.bridge(deepcopy(rope))
    heads = [(1, head) for head in range(4)]
    with torch.no_grad(), iv.ablate(bridge, heads, pairs=all_pairs):
        _, cache = bridge.run_with_cache(TOKENS)
    pattern = cache["blocks.1.attn.hook_pattern"]
    even = torch.tril(torch.ones(20, 20)) / torch.arange(1, 21)[:, None]
    assert_close(pattern, even.expand_as(pattern), atol=1e-6, rtol=1e-5)
    one = TOKENS[:1, :1]
    means = iv.query_key_means(rope, one)
    with torch.no_grad():
        plain = rope(one).logits
        with iv.ablate(rope, heads, means, pairs=all_pairs):
            assert_close(rope(one).logits, plain, **NEAR)
    changed = logits(rope, iv.ablate(rope, heads, means, pairs=[0]))
    assert (changed - logits(rope)).abs().max() > 1e-5


REFUSED = {
    "wanted one number for each of": lambda m: iv.rescaled(m, factors=[1.0, 2.0, 3.0]),
    "are NaN or infinite": lambda m: iv.rescaled(m, function=lambda theta: theta * torch.nan),
    "got yarn, factors": lambda m: iv.rescaled(m, yarn=2, factors=[1.0]),
    "was wanted; got none": lambda m: iv.rescaled(m, 0),
    "factor of an extension is -1": lambda m: iv.rescaled(m, linear=-1.0),
    "head 9 was asked for": lambda m: iv.rescaled(m, 0, 9, linear=2.0),
    "not both": lambda m: iv.rescaled(m, 0, heads=[(0, 0)], linear=2.0),
    "heads=[(layer, head), ...]": lambda m: iv.rescaled(m, [0, 1], 1, linear=2.0),
    "pairs of layer 0 are 0 to": lambda m: iv.ablate(m, (0, 0), pairs=[99]),
    "leave sets out": lambda m: iv.ablate(m, sets=[[(0, 0)]], pairs=[0]),
    "are no finite": lambda m: iv.ablate(m, [(0, head) for head in range(4)], {}, pairs=[0]),
    "name all of them": lambda m: iv.ablate(m, (0, 0), {}, pairs=[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_and_leaves_nothing(rope, message):
    before = hooks_of(rope)
    with pytest.raises(InputError) as refused:
        logits(rope, REFUSED[message](rope))
    assert message in str(refused.value) and hooks_of(rope) == before


@pytest.mark.parametrize("scheme", ["nope", "alibi", "learned"])
def test_a_model_that_does_not_rotate_is_refused_by_name(scheme):
    model = repositioned(scheme)
    for change in (
        iv.rescaled(model, linear=2.0),
        iv.rescaled(model, 0, linear=2.0),
        iv.ablate(model, (0, 0), pairs=[0]),
    ):
        with pytest.raises(InputError, match=rf"\({scheme}.*\).*rotate"):
            logits(model, change)


@pytest.mark.parametrize("scheme", ["repo", "hope", "cope_rope"])
def test_learned_positions_and_other_schemes_take_them(scheme):
    model = repositioned(scheme)
    changed = logits(model, iv.rescaled(model, function=lambda theta: theta / 3))
    assert_close(changed, logits(model, iv.rescaled(model, linear=3.0)))
