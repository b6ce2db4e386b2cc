"""How stock attention modules turn queries and keys, measured: pairs, columns and frequencies of families that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate import init_empty_weights
from families import TINY, tiny
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Glm4Config, GPTNeoXConfig, HunYuanDenseV1Config, LlamaConfig

import repo_interp as ri
from repo_interp.models.reposition import attentions, blocks, with_layout
from repo_interp.models.rotation import Prober

TOKENS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def measured(config, dtype=torch.float32):
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layer = blocks(model)[0]
    attention = next(module for module in layer.modules() if hasattr(module, "layer_idx") and hasattr(module, "config"))
    return Prober(model.base_model).measured(attention)


def test_a_head_that_turns_whole_in_halves_is_left_in_its_order():
    rotation = measured(LlamaConfig(**TINY))
    assert rotation.order is None and rotation.rotates
    assert_close(rotation.frequencies, 10_000.0 ** (-torch.arange(4) / 4))
    assert (rotation.heads, rotation.kv_heads, rotation.scaling, rotation.window) == (4, 2, 8**-0.5, None)


def test_entries_that_do_not_turn_are_pairs_of_frequency_zero():
    config = GPTNeoXConfig(
        **{**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    )
    rotation = measured(config)
    assert rotation.frequencies.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert rotation.order is not None
    assert rotation.order[[0, 4]].tolist() == [0, 1]  # of two entries that turn, one pair
    assert sorted(rotation.order.tolist()) == list(range(8))


def test_interleaved_pairs_are_put_into_halves():
    config = Glm4Config(
        **TINY, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    )
    rotation = measured(config)
    assert rotation.order is not None
    assert rotation.order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert_close(rotation.frequencies, 10_000.0 ** (-torch.arange(4) / 4))


def test_weights_and_their_precision_do_not_matter():
    config = LlamaConfig(**TINY)
    with init_empty_weights(include_buffers=False):
        empty = AutoModelForCausalLM.from_config(config)
    of_empty = Prober(empty.model).measured(empty.model.layers[0].self_attn)
    rounded = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    of_rounded = Prober(rounded.model).measured(rounded.model.layers[0].self_attn)
    assert torch.equal(of_empty.frequencies, of_rounded.frequencies)


def test_a_norm_with_gains_after_the_rotation_is_refused():
    model = AutoModelForCausalLM.from_config(HunYuanDenseV1Config(**TINY, head_dim=8))
    with pytest.raises(ri.InputError, match="HunYuanDenseV1Attention does something after rotating queries that is no rotation"):
        with_layout(model, None)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_those_of_the_pass(kind):
    scaled = {"dynamic": {"factor": 4.0}, "longrope": {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}}[kind]
    config = LlamaConfig(**{**TINY, "max_position_embeddings": 16, "initializer_range": 0.2})
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16, **scaled}
    model = AutoModelForCausalLM.from_config(config).eval()
    short, long = (torch.randint(3, 60, (1, count)) for count in (12, 40))
    with torch.no_grad():
        expected = [model(tokens, use_cache=False).logits for tokens in (short, long, short)]
        with_layout(model, None)
        for tokens, logits in zip((short, long, short), expected, strict=True):
            assert_close(model(tokens, use_cache=False).logits, logits, rtol=1e-5, atol=1e-5)


def test_what_the_tables_turn_has_the_attention_factor_whatever_its_frequency_and_nothing_else():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.5, "partial_rotary_factor": 0.5}
    rotation = measured(GPTNeoXConfig(**{**TINY, "rope_parameters": yarn}))
    for each in (rotation, replace(rotation, frequencies=0 * rotation.frequencies)):
        assert_close(each.attention_scaling, torch.tensor([1.5, 1.5, 1.0, 1.0]))
    whole = replace(rotation, frequencies=rotation.frequencies[:2])
    assert whole.attention_scaling == 1.5


def test_heads_can_rotate_by_frequencies_of_their_own():
    model = ri.reposition(tiny("llama"), "rope")
    config = LlamaConfig(**{**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    rescaled = ri.interventions.rescaled
    with torch.no_grad():
        plain = model(TOKENS).logits
        with rescaled(model, 0, theta=500.0), rescaled(model, 1, theta=500.0), rescaled(model, 2, theta=500.0):
            assert_close(model(TOKENS).logits, other(TOKENS).logits, rtol=1e-5, atol=1e-5)
        with rescaled(model, 1, 2, linear=4.0):
            of_one = model(TOKENS).logits
            with rescaled(model, 1, 0, yarn=4.0), rescaled(model, 1, 1, yarn=4.0), rescaled(model, 1, 3, yarn=4.0):
                assert (model(TOKENS).logits - of_one).abs().max() > 1e-3
        with rescaled(model, 1, linear=4.0), ri.interventions.scaled(model, 4.0, layer=1):
            assert_close(model(TOKENS).logits, plain, rtol=1e-4, atol=1e-5)
        assert (of_one - plain).abs().max() > 1e-3
        assert torch.equal(model(TOKENS).logits, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of yarn, theta and linear was wanted; got none"),
        ({"yarn": 2.0, "theta": 1e4}, "got yarn, theta"),
        ({"linear": -1.0}, "factor of an extension is -1"),
        ({"linear": 2.0, "head": 9}, "head 9 was named; the heads of layer 0 are 0 to 3"),
    ],
)
def test_other_frequencies_are_refused_in_one_line(options, message):
    model = ri.reposition(tiny("llama"), "rope")
    with pytest.raises(ri.InputError, match=message), ri.interventions.rescaled(model, 0, **options):
        pass


def test_measures_refuse_a_layer_whose_heads_rotate_differently():
    bridge = ri.bridge(ri.reposition(tiny("llama"), "rope"))
    with (
        ri.interventions.rescaled(bridge, 1, 2, linear=2.0),
        pytest.raises(ri.InputError, match="single heads of layer 1 are rescaled"),
    ):
        ri.analyze(bridge, [tuple(TOKENS[0].tolist())], measures=("components",))


def test_an_attention_that_ignores_its_scheme_is_an_error():
    model = ri.reposition(tiny("llama"), "repo")
    attention = next(attentions(model))
    attention.module.config = attention.config  # the stock function attends again
    with pytest.raises(ri.InputError, match=r"layer 0 attended without the attention function of its scheme 'repo'"):
        model(TOKENS)
