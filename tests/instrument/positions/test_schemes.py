"""Every scheme in a whole decoder: cached, padded, grouped, bridged, saved, trained - and, for some, equal to another one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import VARIANTS, repositioned, tiny
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import repo_interp as ri
from repo_interp.models.capture import capture
from repo_interp.models.checkpoints import load_model
from repo_interp.models.reposition import attentions, scheme_modules

TOKENS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_with_cache_is_generation_without(variant):
    model = repositioned(variant)
    asked = {
        "max_new_tokens": 8,
        "do_sample": False,
        "attention_mask": torch.ones_like(TOKENS),
        "eos_token_id": None,
    }
    assert torch.equal(model.generate(TOKENS, use_cache=True, **asked), model.generate(TOKENS, use_cache=False, **asked))


@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padding_changes_nothing(variant):
    model = repositioned(variant)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), TOKENS], dim=1)
    mask = (torch.arange(25) >= 5).long().expand(2, -1)
    index = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        shifted = model(padded, attention_mask=mask, position_ids=index).logits[:, 5:]
        assert_close(shifted, model(TOKENS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_and_open_attention_agree_and_the_bridge_with_both(variant):
    model = repositioned(variant, "olmo2")
    with torch.no_grad():
        fused = model(TOKENS).logits
        model.set_attn_implementation("eager")
        assert_close(model(TOKENS).logits, fused, atol=1e-5, rtol=1e-5)
        model.set_attn_implementation("sdpa")
        wrapped = ri.bridge(model)
        assert_close(wrapped(TOKENS), fused, atol=1e-6, rtol=0)
        logits, cache = wrapped.run_with_cache(TOKENS)
    assert_close(logits, fused, atol=1e-5, rtol=1e-5)
    adds = next(attentions(wrapped)).position_logits is not None
    assert ("blocks.0.attn.hook_position_logits" in cache) == adds


@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_logits_are_the_scores_of_attention(variant):
    wrapped = ri.bridge(repositioned(variant))
    with torch.no_grad():
        _, cache = wrapped.run_with_cache(TOKENS)
    rows, inputs = torch.tensor([0, 7, 19]), []
    capture(wrapped, TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), torch.arange(2), inputs.append)
    for one in inputs:
        logits = one.logits(rows)
        seen = torch.isfinite(logits)
        scores = cache[f"blocks.{one.layer}.attn.hook_attn_scores"][:, :, rows]
        assert_close(logits[seen], scores[seen], atol=1e-5, rtol=1e-5)
        if one.position_logits is not None:
            without = dataclasses.replace(one, position_logits=None).logits(rows)
            added = cache[f"blocks.{one.layer}.attn.hook_position_logits"].expand(2, 4, -1, -1)[:, :, rows]
            assert_close((logits - without)[seen], added[seen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saving_and_loading_gives_the_same_bits(variant, tmp_path):
    model = repositioned(variant)
    ri.save(model, tmp_path)
    again = load_model(tmp_path)
    assert ri.layout(again) == ri.layout(model)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert ri.added_parameters(again) == ri.added_parameters(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_reach_everything_a_scheme_learns(variant):
    model = repositioned(variant).train()
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for module in scheme_modules(model):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_near_float32(variant):
    model = repositioned(variant)
    with torch.no_grad():
        exact = model(TOKENS).logits
        rounded = model.to(torch.bfloat16)(TOKENS).logits.float()
    assert (rounded - exact).abs().mean() < 0.15 * exact.abs().mean()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("nope", "rope")])
def test_the_scheme_matters(variant):
    with torch.no_grad():
        torch.manual_seed(0)
        ours = repositioned(variant)(TOKENS).logits
        for other in ("rope", "nope"):
            torch.manual_seed(0)
            assert (ri.reposition(tiny("llama"), other)(TOKENS).logits - ours).abs().max() > 1e-3, other


def test_one_map_for_all_layers_is_one_module():
    shared, own = repositioned("cope one map"), repositioned("cope")
    assert ri.added_parameters(own) == 3 * ri.added_parameters(shared)
    assert len({id(a.position_logits.position_map) for a in attentions(shared)}) == 1


def test_hope_chooses_by_the_frequencies_of_training_then_scales():
    from repo_interp.checkpoint_files.options import scheme_options
    from repo_interp.models.rotation import Prober
    from repo_interp.models.schemes import SchemeBuilder

    model = tiny("llama")
    model.config.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(model.config)
    rotation = Prober(model.model).measured(model.model.layers[0].self_attn)
    builder = SchemeBuilder(model.config, scheme_options({}))
    high = rotation.unscaled >= 2 * torch.pi / 128
    assert 0 < high.sum() < len(high)
    parts = builder.build("hope", rotation, 8)
    assert torch.equal(parts.frequencies, rotation.frequencies.where(high, 0.0))
    assert torch.equal(builder.build("hope_ab3", rotation, 8).frequencies[high], rotation.frequencies[high])


def test_dropped_components_leave_the_dot_product():
    from repo_interp.positions.rotary import rotate

    model = ri.reposition(tiny("llama"), "rope_high")
    attention = next(attentions(model))
    kept = torch.cat([attention.components, attention.components])
    assert 0 < kept.sum() < len(kept)
    hidden, positions = torch.randn(1, 6, 32), torch.arange(6.0).view(1, 1, 6)
    seen = {}
    for name in ("queries", "keys", "rotated_queries", "rotated_keys"):
        site = getattr(attention.sites, name)
        site.register_forward_hook(lambda module, arguments, tensor, name=name: seen.update({name: tensor}))
    attention.module(hidden, position_embeddings=(torch.ones(1, 6, 8), torch.zeros(1, 6, 8)), attention_mask=None)
    plain, keys, got_queries, got_keys = (seen[name] for name in ("queries", "keys", "rotated_queries", "rotated_keys"))
    turned = rotate(keys, positions, attention.frequencies).repeat_interleave(2, 1).mT
    expected = (rotate(plain, positions, attention.frequencies) * kept) @ turned
    assert_close(got_queries @ got_keys.repeat_interleave(2, 1).mT, expected)


def test_a_prompt_beyond_a_learned_table_is_refused():
    model = ri.reposition(tiny("llama"), "learned", training_length=16)
    with pytest.raises(ri.InputError, match=r"reaches position 19, but the learned table has 16"):
        model(TOKENS)


def test_taking_learned_positions_away_again_leaves_nothing():
    model = tiny("llama")
    with torch.no_grad():
        before = model(TOKENS).logits
        ri.reposition(ri.reposition(model, "learned"), "rope")
        assert torch.equal(model(TOKENS).logits, before)
