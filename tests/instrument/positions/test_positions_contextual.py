"""CoPE: what gates count, how counts become logits, and the official code's numbers."""

import json
import math

import numpy as np
import places
import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.checkpoint_files.inspected import inspect_checkpoint
from repo_interp.checkpoint_files.stated import light_config
from repo_interp.errors import InputError
from repo_interp.positions.contextual import (
    ContextualPositions,
    FixedSlopes,
    InterpolatedEmbedding,
    PositionMLP,
    SeparatelyGatedPositions,
    contextual_positions,
    gates,
)

OFFICIAL = places.OFFICIAL / "cope"


def official(name):
    with np.load(OFFICIAL / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


def table(weight):
    module = InterpolatedEmbedding(*weight.shape)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def logits_of_five(cope):
    """What is added to the logits of five random tokens."""
    queries, keys = torch.randn(2, 1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    index = torch.arange(5)[None]
    return cope(queries, keys, index, index, causal(5), 1.0)


def test_vectors_that_no_row_can_reach_cost_nothing_and_change_nothing():
    weight = torch.randn(4096, 3)
    long, short = (
        logits_of_five(ContextualPositions(table(rows))) for rows in (weight, weight[:7])
    )
    assert torch.equal(long, short)


def test_it_starts_without_any_position_as_in_the_listing():
    for start in (InterpolatedEmbedding(8, 3), PositionMLP(3)):
        logits = logits_of_five(ContextualPositions(start))
        assert (logits == 0).all()
        (logits * torch.randn_like(logits)).sum().backward()
        assert any(parameter.grad.abs().max() > 0 for parameter in start.parameters())


def test_slopes_can_have_the_printed_sign():
    positions = torch.tensor([3.0, 2.0, 1.0]).expand(1, 4, 1, 3)
    printed = FixedSlopes(4, first=1.0, ratio=0.25)(None, positions)
    assert printed[0, :, 0, 0].tolist() == [3.0, 3 / 4, 3 / 16, 3 / 64]


def test_separate_keys_add_one_projection_and_are_made_token_by_token():
    cope = SeparatelyGatedPositions(InterpolatedEmbedding(8, 3), d_model=12, kv_heads=2, d_head=3)
    assert cope.gate_projection.bias is None
    assert 0.01 < cope.gate_projection.weight.std() < 0.03
    hidden = torch.randn(1, 5, 12)
    by_head = cope.gate_projection.weight.unflatten(0, (2, 3))
    assert_close(cope.gate_keys(hidden), torch.einsum("btm,hdm->bhtd", hidden, by_head))
    assert ContextualPositions(InterpolatedEmbedding(8, 3)).gate_keys(hidden) is None


def test_what_the_gates_need_and_did_not_get_is_named():
    for source in ("values", "separate_keys"):
        cope = ContextualPositions(InterpolatedEmbedding(8, 3), source)
        with pytest.raises(ValueError, match=f"gates from {source} were wanted"):
            logits_of_five(cope)
    with pytest.raises(ValueError, match="unknown gate source 'key'"):
        ContextualPositions(InterpolatedEmbedding(8, 3), "key")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="p_max = 1"):
        InterpolatedEmbedding(1, 3)


@pytest.mark.parametrize("prefix", ["", "window_"])
def test_equals_the_official_functions(prefix):
    arrays = official("cope.npz")
    queries, keys, values = arrays["q"], arrays["k"], arrays["v"]
    tokens, scale = queries.shape[2], queries.shape[-1] ** -0.5
    index, visible = torch.arange(tokens)[None], causal(tokens)
    if prefix:
        visible = arrays["window_mask"][None, None]
        assert not torch.equal(visible, causal(tokens))
    cope = ContextualPositions(table(arrays["dynamic_map"]))
    counted = gates(queries, keys, visible, scale)
    added = cope(queries, keys, index, index, visible, scale)
    logits = queries @ keys.transpose(-1, -2) * scale + added
    pattern = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    found = {
        "pos": contextual_positions(counted, cope.position_map.maximum),
        "output": pattern @ values,
        "bias": added,
        "weights": pattern,
    }
    for name, value in found.items():
        if f"{prefix}{name}" in arrays:
            expected = arrays[f"{prefix}{name}"]
            expected = expected.tril() if name == "bias" else expected
            assert_close(value, expected, atol=1e-5, rtol=0)


PARTS = {
    "att_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.o_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "attn_norm": ("post_attention_layernorm",),
    "ff_proj": ("mlp.up_proj", "mlp.gate_proj"),
    "ff_out": ("mlp.down_proj",),
    "ff_norm": ("post_feedforward_layernorm",),
    "dynamic_map": ("self_attn.dynamic_map",),
}
"""Modules of a layer in the training code, and in released files."""


@pytest.fixture
def released(tmp_path):
    """The official CoPE model as a released file would hold it: OLMo-2, RoPE in layer 0."""
    config = json.loads((OFFICIAL / "cope_model_config.json").read_text())
    arrays = official("cope_model.npz")
    stated = {
        "model_type": "olmo2",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": config["mlp_hidden_size"] // 2,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "max_position_embeddings": config["max_sequence_length"],
        "rope_theta": config["rope_theta"],
        "rms_norm_eps": config["layer_norm_eps"],
        "pe_config": {
            "dynamic_pe_mode": config["dynamic_pe_mode"],
            "dynmaic_pe_start_layer": config["dynamic_pe_start_layer"],
        },
    }
    weights = {
        theirs: arrays[f"w/transformer.{ours}.weight"]
        for theirs, ours in (
            ("model.embed_tokens.weight", "wte"),
            ("model.norm.weight", "ln_f"),
            ("lm_head.weight", "ff_out"),
        )
    }
    for name, value in arrays.items():
        if ".blocks." in name:
            *_, layer, part, _ = name.split(".")
            modules = PARTS[part]
            for module, weight in zip(modules, value.chunk(len(modules)), strict=True):
                weights[f"model.layers.{layer}.{module}.weight"] = weight.contiguous()

    def write(*without):
        kept = {name: value for name, value in weights.items() if name not in without}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(stated))
        return tmp_path

    return write


@torch.no_grad()
def test_a_released_mode_cope_gives_the_official_logits(released, tmp_path):
    directory = released()
    model, arrays = ri.open_model(directory), official("cope_model.npz")
    assert ri.layout(model) == ("rope", "cope", "cope", "cope")
    logits = model(arrays["input_ids"]).logits
    assert_close(logits, arrays["logits"], atol=1e-4, rtol=0)
    ri.save(model, tmp_path / "ours")
    assert torch.equal(ri.open_model(tmp_path / "ours")(arrays["input_ids"]).logits, logits)


def test_a_released_mode_cope_is_inspected_with_its_tables(released):
    inspected = inspect_checkpoint(str(released()), light_config)
    assert [inspected.parameters_of(layer) for layer in range(4)] == [0, 160, 160, 160]
    assert inspected.rows(1) == "counted by gates"


def test_a_released_mode_cope_without_a_table_is_no_rope(released):
    directory = released("model.layers.2.self_attn.dynamic_map.weight")
    with pytest.raises(
        InputError, match=r"1 missing \(first: model.layers.2.self_attn.position_map"
    ):
        ri.open_model(directory)


def test_a_map_of_any_positions_has_no_maximum():
    for position_map in (PositionMLP(3), FixedSlopes(2)):
        assert position_map.maximum == math.inf
    network = PositionMLP(3)
    assert (network.hidden.out_features, network.unit) == (64, 64.0), "as in the paper"
