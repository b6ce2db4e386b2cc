"""What reuse of a chunk's cache costs, beside plain transformers and rotation by hand."""

import numpy as np
import pytest
import torch
from families import TINY
from refusals import refused
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.plugins.reuse.reuse_by_head import rank_correlation

FIRST, STOP, END = 10, 18, 30
PROMPTS = torch.randint(3, 60, (3, END), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, "initializer_range": 0.3})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def cost(model, **options):
    return ri.reuse_cost(
        model, PROMPTS.tolist(), (FIRST, STOP), progress=lambda *_: None, **options
    )


def by_hand(model, keys, by):
    """Keys [.., token, d_head] turned by positions, as Llama's own function turns them."""
    half = keys.shape[-1] // 2
    angles = torch.cat(2 * [by[:, None] * model.model.rotary_emb.inv_freq], -1)
    swapped = torch.cat([-keys[..., half:], keys[..., :half]], -1)
    return keys * angles.cos() + swapped * angles.sin()


@torch.no_grad()
def slow(model, tokens, kind, shift, scale):
    """The loss of the tokens after the chunk, with plain transformers."""
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(tokens[None, :STOP], past_key_values=cache)
    ids = torch.arange(FIRST - shift, STOP - shift)
    model(tokens[None, FIRST:STOP], position_ids=ids[None], past_key_values=alone)
    places = torch.arange(FIRST, STOP)
    for layer, other in zip(cache.layers, alone.layers, strict=True):
        if "isolated" in kind:
            layer.keys[:, :, FIRST:STOP] = other.keys
            layer.values[:, :, FIRST:STOP] = other.values
        by = torch.zeros(STOP - FIRST)
        if "isolated" in kind:
            by += 0 if "not turned" in kind else shift
        elif kind == "not turned":
            by -= shift
        elif kind == "scaled":
            by = (scale - 1) * (places - (STOP - 1)).float()
        layer.keys[:, :, FIRST:STOP] = by_hand(model, layer.keys[:, :, FIRST:STOP], by)
        gone = {"sink dropped": 1, "chunk dropped": STOP - FIRST}.get(kind.split(", ")[-1], 0)
        kept = [place for place in range(STOP) if not FIRST <= place < FIRST + gone]
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    index = torch.arange(STOP, END)[None]
    logits = model(tokens[None, STOP:], position_ids=index, past_key_values=cache).logits
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[STOP + 1 :]))


@pytest.mark.parametrize("shift", [FIRST, 4, -7])
def test_losses_are_those_of_plain_transformers(llama, shift):
    found = cost(llama, shift=shift, scale=3.0)
    for name in found["reuse"].values:
        kind = "scaled" if "scaled" in name else name
        wanted = [slow(llama, tokens, kind, shift, 3.0) for tokens in PROMPTS]
        np.testing.assert_allclose(found["loss"].sel(reuse=name), wanted, atol=1e-5)


def test_the_dense_pass_is_one_without_a_cache_and_turning_costs_nothing(llama):
    found = cost(llama)
    with torch.no_grad():
        logits = llama(PROMPTS, use_cache=False).logits
    wanted = [
        float(torch.nn.functional.cross_entropy(row[STOP : END - 1], tokens[STOP + 1 :]))
        for row, tokens in zip(logits, PROMPTS, strict=True)
    ]
    np.testing.assert_allclose(found["loss"].sel(reuse="dense"), wanted, atol=1e-5)
    assert abs(float(found["change"].sel(reuse="turned"))) < 1e-5
    assert abs(float(found["change"].sel(reuse="not turned"))) > 1e-3
    change = found["loss"] - found["loss"].sel(reuse="dense")
    np.testing.assert_allclose(found["change"], change.mean("prompt"), atol=1e-12)
    assert bool((found["change_low"] <= found["change"]).all())
    same = cost(llama, shift=0, scale=1.0)["change"].sel(reuse=["not turned", "scaled by 1"])
    np.testing.assert_allclose(same, 0, atol=1e-6)


@pytest.mark.parametrize("family", ["gptj", "gemma3_text", "cohere2", "gpt_neox"])
def test_families_with_other_pairs_and_layers_turn_rightly(family):
    """Adjacent pairs, windows, layers that do not rotate, and heads that rotate in part."""
    model = small_model(family)
    tokens = PROMPTS[:, :8].tolist()  # the window
    found = ri.reuse_cost(model, tokens, (3, 5), progress=lambda *_: None)["change"]
    assert abs(float(found.sel(reuse="turned"))) < 2e-5
    assert abs(float(found.sel(reuse="not turned"))) > 1e-4


def test_positions_that_are_learned_need_no_turning():
    model = ri.reposition(small_model("llama"), ["rope", "repo", "nope", "repo"])
    found = cost(model)["change"]
    assert abs(float(found.sel(reuse="turned"))) < 1e-5
    learned = ri.reposition(small_model("llama"), ["repo", "nope", "repo", "repo"])
    found = cost(learned)["change"]
    assert abs(float(found.sel(reuse="not turned"))) < 1e-5
    assert abs(float(found.sel(reuse="isolated"))) > 1e-4


def test_bad_input_is_refused_in_a_line(llama):
    with refused(r"the chunk is \(0, 5\); wanted \(first, stop\) with 1 <= first < stop <= 28"):
        ri.reuse_cost(llama, PROMPTS.tolist(), (0, 5))
    with refused("the shift is 11; wanted a whole number of tokens, at most 10"):
        cost(llama, shift=11)
    with refused("the sink has 8 tokens, and the chunk 8"):
        cost(llama, sink=8)
    for family, said in (
        ("bloom", "cached keys cannot be moved alone"),
        ("jamba", "has layers without attention"),
        ("gpt2", "cached keys cannot be moved alone"),
        ("deepseek_v3", "cannot be turned"),
    ):
        with refused(said):
            cost(small_model(family))


def test_heads_that_are_not_turned_cost_what_plain_transformers_says(llama):
    found = ri.reuse_cost_by_head(llama, PROMPTS.tolist(), (FIRST, STOP), layers=(0, 1, 2))
    heads = llama.config.num_key_value_heads
    assert list(found["head"].values) == [
        "dense",
        *(f"{layer}.{head}" for layer in (0, 1, 2) for head in range(heads)),
    ]
    by = torch.full((STOP - FIRST,), -float(FIRST))
    for label, layer, head in (("0.1", 0, 1), ("2.0", 2, 0)):
        wanted = []
        for tokens in PROMPTS:
            cache = DynamicCache(config=llama.config)
            with torch.no_grad():
                llama(tokens[None, :STOP], past_key_values=cache)
                keys = cache.layers[layer].keys
                keys[:, head, FIRST:STOP] = by_hand(llama, keys[:, head, FIRST:STOP], by)
                logits = llama(tokens[None, STOP:], past_key_values=cache).logits
            losses = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[STOP + 1 :])
            wanted.append(float(losses))
        np.testing.assert_allclose(found["loss"].sel(head=label), wanted, atol=1e-5)
    upper = found["semantic_stability"][1:]
    upper = upper["head"].values[(upper > upper.median()).values]
    wanted = []
    for tokens in PROMPTS:
        cache = DynamicCache(config=llama.config)
        with torch.no_grad():
            llama(tokens[None, :STOP], past_key_values=cache)
            for label in upper:
                layer, head = map(int, label.split("."))
                keys = cache.layers[layer].keys
                keys[:, head, FIRST:STOP] = by_hand(llama, keys[:, head, FIRST:STOP], by)
            logits = llama(tokens[None, STOP:], past_key_values=cache).logits
        wanted.append(float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[STOP + 1 :])))
    half = found["half_change"].sel(prediction="semantic_stability", half="upper")
    change = np.mean(wanted) - float(found["mean_loss"].sel(head="dense"))
    np.testing.assert_allclose(half, change, atol=1e-5)
    run = ri.analyze(
        llama,
        [
            ri.prompt(tokens, llama, generated=-11, chunk=(FIRST, STOP))
            for tokens in PROMPTS.tolist()
        ],
        ["fake_distance", "stability", "attention_mass"],
        experiments=(),
    )
    group = llama.config.num_attention_heads // heads
    readers = {"layer": 2, "head": slice(group, 2 * group - 1)}
    for place, name in (
        ("fake_distance/semantic_share", "semantic_share"),
        ("stability/semantic_stability", "semantic_stability"),
        ("attention_mass/mass", "mass"),
    ):
        array = run[place].sel(readers)
        array = array.sel(span="chunk") if name == "mass" else array
        np.testing.assert_allclose(found[name].sel(head="2.1"), array.mean(), rtol=1e-5)
    figure = ri.plots.reuse_by_head(found)
    assert [ax.get_xlabel() for ax in figure.axes] == [
        "semantic share",
        "semantic stability",
        "mass",
    ]
    with refused(r"layers are \[9\]; wanted some of those that turn: \[0, 1, 2\]"):
        ri.reuse_cost_by_head(llama, PROMPTS.tolist(), (FIRST, STOP), layers=[9])
    with refused("costs by head are what ri.reuse_cost_by_head returns"):
        ri.plots.reuse_by_head(found.drop_vars("correlation"))


def test_a_rank_correlation_is_that_of_scipy_and_its_interval_draws_whole_groups():
    random = np.random.default_rng(1)
    groups = np.repeat(np.arange(20), 3)
    one = random.integers(0, 9, 60).astype(float)  # with ties
    other = one + 4 * random.standard_normal(60)
    value, low, high = rank_correlation(one, other, groups)
    assert value == pytest.approx(spearmanr(one, other)[0], abs=1e-12)
    assert low < value < high
    # Groups of copies say no more than one of each
    copied = rank_correlation(np.repeat(one, 5), np.repeat(other, 5), np.repeat(np.arange(60), 5))
    alone = rank_correlation(one, other, np.arange(60))
    np.testing.assert_allclose(copied[1:], alone[1:], atol=0.02)
    assert np.isnan(rank_correlation(one, other, 0 * groups)).all()
    assert np.isnan(rank_correlation(0 * one, other, groups)[0])
