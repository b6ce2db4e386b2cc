"""Repositioned decoders: equal to stock where the scheme is stock's, and whole decoders in every other respect."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from families import CONFIGS, tiny
from numpy.testing import assert_allclose
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.checkpoint_files.architectures import native_layout
from repo_interp.models.reposition import attentions, blocks, mix_with_index

TOKENS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
LAYOUTS = ["repo", "repo@1/3", "nope", "continuous", "multihead_continuous", "r2n1"]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS), "eos_token_id": None}
PAIRS = [*((family, "repo") for family in CONFIGS), *(("llama", layout) for layout in ("rope", *LAYOUTS[1:])), ("gemma3", "r2n1")]
"""Families with learned positions, and one family with every layout: layouts and families know nothing of each other."""


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_stock_schemes_give_stock_logits(family, implementation):
    model = tiny(family)
    native = ",".join(native_layout(model.config))
    model.set_attn_implementation("eager" if family == "gemma2" else implementation)
    with torch.no_grad():
        stock = model(TOKENS).logits
        ours = ri.reposition(model, native)(TOKENS).logits
    assert_close(ours, stock, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", CONFIGS)
def test_learned_positions_mixed_wholly_with_the_index_are_rope(family):
    model = tiny(family)
    model.set_attn_implementation("eager")
    rotated = [layer for layer, scheme in enumerate(native_layout(model.config)) if scheme == "rope"]
    with torch.no_grad():
        stock = model(TOKENS).logits
        ri.reposition(model, ",".join("repo" if layer in rotated else "nope" for layer in range(3)))
        learned = model(TOKENS).logits
        mix_with_index(model, 1.0)
        assert_close(model(TOKENS).logits, stock, atol=1e-5, rtol=0)
    assert (learned - stock).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_fused_and_open_attention_agree(family, layout):
    model = ri.reposition(tiny(family), layout)
    with torch.no_grad():
        fused = model(TOKENS).logits
        model.set_attn_implementation("eager")
        assert_close(model(TOKENS).logits, fused, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_generation_with_cache_is_generation_without(family, layout):
    model = ri.reposition(tiny(family), layout)
    cached, whole = (model.generate(TOKENS, use_cache=use_cache, **GREEDY) for use_cache in (True, False))
    assert cached.shape[1] == 28
    assert torch.equal(cached, whole)


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_left_padding_changes_nothing(family, layout):
    model = ri.reposition(tiny(family), layout)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), TOKENS], dim=1)
    mask = (torch.arange(25) >= 5).long().expand(2, -1)
    with torch.no_grad():
        plain = model(TOKENS).logits
        shifted = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits[:, 5:]
    assert_close(shifted, plain, atol=1e-4, rtol=1e-4)
    alone = model.generate(TOKENS, **GREEDY)
    assert torch.equal(model.generate(padded, **GREEDY | {"attention_mask": mask})[:, 25:], alone[:, 20:])


def test_positions_per_head_differ_where_heads_share_a_key():
    model = ri.reposition(tiny("llama"), "repo", assignment="head")
    seen = {}
    for attention in attentions(model):
        attention.observers.append(lambda layer, q, k, z, added: seen.setdefault(layer.layer_idx, z))
    with torch.no_grad():
        fused = model(TOKENS).logits
        model.set_attn_implementation("eager")
        assert_close(model(TOKENS).logits, fused, atol=1e-5, rtol=1e-5)
    assert seen[0].shape == (2, 4, 20)
    assert (seen[0][:, 0] - seen[0][:, 1]).abs().max() > 1e-3
    assert torch.equal(*(model.generate(TOKENS, use_cache=use_cache, **GREEDY) for use_cache in (True, False)))


@pytest.mark.parametrize("checkpointing", ["plain", "checkpointed"])
@pytest.mark.parametrize("layout", ["repo", "continuous", "multihead_continuous"])
def test_gradients_reach_what_assigns_positions(layout, checkpointing):
    model = ri.reposition(tiny("olmo2"), layout).train()
    if checkpointing == "checkpointed":
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for attention in attentions(model):
        for name, parameter in attention.assigner.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, f"layer {attention.layer_idx} {name}"


def test_checkpointed_gradients_are_plain_ones():
    model = ri.reposition(tiny("llama"), "repo@1").train()
    twin = copy.deepcopy(model)
    twin.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for one in (model, twin):
        one(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for (name, plain), (_, again) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert_close(plain.grad, again.grad, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_stays_near_float32(layout):
    model = ri.reposition(tiny("llama"), layout)
    with torch.no_grad():
        exact = model(TOKENS).logits
        rounded = model.to(torch.bfloat16)(TOKENS).logits
    assert rounded.dtype == torch.bfloat16
    assert torch.isfinite(rounded).all()
    assert (rounded.float() - exact).abs().mean() < 0.1 * exact.abs().mean()
    assert all(a.frequencies is None or a.frequencies.dtype == torch.float32 for a in attentions(model))


def test_added_parameters_are_f_phis_and_under_one_percent_at_the_papers_size():
    d, rows, layers = 32, 2, 2
    model = ri.reposition(tiny("llama"), "repo@1/3")
    assert ri.layout(model) == ("rope", "repo", "repo")
    assert ri.added_parameters(model) == layers * (2 * d * (d // 8) + (d // 8) * rows)
    # OLMo-2 1B: width 2048, 16 layers, 16 heads, 1.48e9 parameters; RePo from layer 5.
    added = 11 * (2 * 2048 * 256 + 256 * 16)
    assert 0.7e-2 < added / 1.485e9 < 0.9e-2


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_saving_and_loading_gives_the_same_bits(family, layout, tmp_path):
    model = ri.reposition(tiny(family), layout)
    ri.save(model, tmp_path / "one")
    from repo_interp.models.checkpoints import load_model

    again = load_model(tmp_path / "one")
    assert ri.layout(again) == ri.layout(model)
    for (name, before), (_, after) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(before, after), name
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, again(TOKENS).logits)
    ri.save(again, tmp_path / "two")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_checkpoint_with_the_layout_of_the_stock_decoder_is_a_stock_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    model = ri.reposition(tiny("llama"), "rope")
    ri.save(model, tmp_path / "rope")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "rope").eval()
    with torch.no_grad():
        assert_allclose(stock(TOKENS).logits, model(TOKENS).logits, atol=1e-6)


def test_repositioning_again_starts_the_new_scheme_afresh():
    model = ri.reposition(tiny("llama"), "rope")
    with torch.no_grad():
        before = model(TOKENS).logits
        ri.reposition(model, "repo")
        mix_with_index(model, 1.0)
        assert_close(model(TOKENS).logits, before)
        assert_close(ri.reposition(model, "rope")(TOKENS).logits, before)
    assert ri.added_parameters(model) == 0


def test_attention_modules_are_those_of_the_model_as_it_is_now():
    model = ri.reposition(tiny("llama"), "rope,repo,nope")
    before = list(attentions(model))
    assert [each.scheme for each in before] == ["rope", "repo", "nope"]
    copied = copy.deepcopy(model)
    assert not {id(each) for each in attentions(copied)} & {id(each) for each in before}
    model.model.layers[1].self_attn = copy.deepcopy(model.model.layers[2].self_attn)
    assert [each.layer_idx for each in attentions(model)] == [0, 2]
    del model.model.layers[2]
    model.model.layers[1].self_attn.repositioned.layer_idx = 1
    assert [each.scheme for each in attentions(model)] == ["rope", "nope"]
    assert blocks(model) is model.model.layers
    ri.reposition(copied, "nope")
    bridge = ri.bridge(copied)
    assert [each.scheme for each in attentions(bridge)] == ["nope"] * 3
    assert list(attentions(bridge)) == list(attentions(copied))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("swiglu", "unknown position scheme 'swiglu'"),
        ("repo@9", "layers are 0 to 2"),
        ("repo@half", "not 'half'"),
        ("rope,repo", "names 2 layers; the model has 3"),
        ("rope,repo,", "unknown position scheme ''"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, message):
    with pytest.raises(ri.InputError, match=message):
        ri.reposition(tiny("llama"), layout)


def test_decoders_that_cannot_be_repositioned_are_refused():
    from transformers import AutoModelForCausalLM, GPT2Config

    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=16))
    with pytest.raises(ri.InputError, match="'gpt2' cannot be repositioned: its positions are learned vectors at its input"):
        ri.reposition(gpt2, "repo")
    model = tiny("llama")
    model.config.rope_parameters = {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ri.InputError, match="there is no rope_type 'spiral'"):
        ri.reposition(model, "repo")


def test_index_positions_are_exact_far_out():
    from repo_interp.positions.assigners import TokenIndex

    index = torch.tensor([[0, 2**24 - 1]])
    assert TokenIndex()(torch.zeros(1, 2, 4, dtype=torch.bfloat16), index).tolist() == [[[0.0, 2**24 - 1]]]


def test_f_phi_is_the_formula_of_the_paper():
    from repo_interp.positions.assigners import LearnedPositions

    phi = LearnedPositions(16, 3)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    phi.double()
    positions = phi(hidden, torch.arange(5)[None]).detach().numpy()
    gate, content, final = (p.detach().numpy() for p in phi.parameters())
    for b in range(2):
        for i in range(5):
            g = gate @ hidden[b, i].numpy()
            representation = g / (1 + np.exp(-g)) * (content @ hidden[b, i].numpy())
            assert_allclose(positions[b, :, i], final @ representation, rtol=1e-12)
