"""CoPE: what gates count, how counts become logits, and the official code's numbers."""

import json
import math

import numpy as np
import places
import pytest
import torch
from torch.nn.functional import linear, silu
from torch.testing import assert_close

from repo_interp.positions.biases import geometric_slopes
from repo_interp.positions.contextual import (
    ContextualPositions,
    FixedSlopes,
    InterpolatedEmbedding,
    PositionMap,
    PositionMLP,
    SeparatelyGatedPositions,
    contextual_positions,
    gates,
)
from repo_interp.positions.rotary import rotate

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


def attend(cope, queries, keys, values, visible):
    """Pattern and output of a layer with CoPE alone."""
    index = torch.arange(queries.shape[2])[None]
    scale = queries.shape[-1] ** -0.5
    logits = queries @ keys.transpose(-1, -2) * scale + cope(
        queries, keys, index, index, visible, scale, values
    )
    pattern = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    return pattern, pattern @ values


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


def test_fixed_slopes_are_those_of_alibi_and_prefer_what_is_near():
    positions = torch.tensor([[[[3.0, 2.0, 1.0]]]]).expand(1, 4, 1, 3)
    queries = torch.zeros(1, 4, 1, 2)
    assert_close(
        FixedSlopes(4)(queries, positions), -geometric_slopes(4)[:, None, None] * positions
    )
    printed = FixedSlopes(4, first=1.0, ratio=0.25)(queries, positions)
    assert printed[0, :, 0, 0].tolist() == [3.0, 3 / 4, 3 / 16, 3 / 64]


def test_separate_keys_add_one_projection_and_are_made_token_by_token():
    torch.manual_seed(0)
    cope = SeparatelyGatedPositions(InterpolatedEmbedding(8, 3), d_model=12, kv_heads=2, d_head=3)
    assert cope.gate_projection.weight.shape == (6, 12) and cope.gate_projection.bias is None
    assert 0.01 < cope.gate_projection.weight.std() < 0.03
    hidden = torch.randn(1, 5, 12)
    keys = cope.gate_keys(hidden)
    assert keys.shape == (1, 2, 5, 3)
    assert_close(torch.cat((keys[:, :, :3], cope.gate_keys(hidden[:, 3:])), dim=2), keys)
    assert_close(keys[0, 1, 4], cope.gate_projection.weight[3:] @ hidden[0, 4])
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
    with pytest.raises(TypeError, match="abstract class PositionMap"):
        PositionMap()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_equals_the_official_functions(mask):
    arrays = official("cope.npz")
    assert int(arrays["max_cope_length"]) == len(arrays["dynamic_map"])
    queries, keys, values = arrays["q"], arrays["k"], arrays["v"]
    tokens, scale = queries.shape[2], queries.shape[-1] ** -0.5
    visible = causal(tokens) if mask == "causal" else arrays["window_mask"][None, None]
    assert torch.equal(visible, causal(tokens)) == (mask == "causal"), (
        "the fixture's mask is a window"
    )
    theirs = "" if mask == "causal" else "window_"
    close = {"atol": 1e-5, "rtol": 0}
    cope = ContextualPositions(table(arrays["dynamic_map"]))
    positions = contextual_positions(
        gates(queries, keys, visible, scale), cope.position_map.maximum
    )
    assert_close(positions, arrays[f"{theirs}pos"], **close)
    pattern, output = attend(cope, queries, keys, values, visible)
    assert_close(output, arrays[f"{theirs}output"], **close)
    if mask == "causal":
        index = torch.arange(tokens)[None]
        assert_close(
            cope(queries, keys, index, index, visible, scale), arrays["bias"].tril(), **close
        )
        assert_close(pattern, arrays["weights"], **close)


def rms_norm(hidden, weight, epsilon):
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon)


@torch.no_grad()
def test_equals_the_official_model():
    """OLMo-2 by hand: norms after sub-layers, QK-norm over all heads jointly; RoPE in layer 0, CoPE
    above.
    """
    config = json.loads((OFFICIAL / "cope_model_config.json").read_text())
    arrays = official("cope_model.npz")
    weights = {
        name.removeprefix("w/transformer."): value
        for name, value in arrays.items()
        if name[0] == "w"
    }
    heads, epsilon = config["n_heads"], config["layer_norm_eps"]
    d_head = config["d_model"] // heads
    tokens = arrays["input_ids"].shape[1]
    p_max = min(config["max_sequence_length"], 4096)
    index = torch.arange(tokens)[None]
    frequencies = config["rope_theta"] ** -(torch.arange(0, d_head, 2) / d_head)

    def split(flat):
        return flat.unflatten(-1, (heads, d_head)).transpose(1, 2)

    hidden = weights["wte.weight"][arrays["input_ids"]]
    for layer in range(config["n_layers"]):
        own = {
            name.removeprefix(f"blocks.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        queries, keys, values = linear(hidden, own["att_proj.weight"]).chunk(3, dim=-1)
        queries = split(rms_norm(queries, own["q_norm.weight"], epsilon))
        keys = split(rms_norm(keys, own["k_norm.weight"], epsilon))
        values = split(values)
        if layer < config["dynamic_pe_start_layer"]:
            assert "dynamic_map.weight" not in own
            nothing = ContextualPositions(InterpolatedEmbedding(p_max, d_head))
            queries, keys = (
                rotate(features, index[:, None], frequencies) for features in (queries, keys)
            )
            attended = attend(nothing, queries, keys, values, causal(tokens))[1]
        else:
            assert len(own["dynamic_map.weight"]) == p_max
            cope = ContextualPositions(table(own["dynamic_map.weight"]))
            attended = attend(cope, queries, keys, values, causal(tokens))[1]
        attended = linear(attended.transpose(1, 2).flatten(2), own["attn_out.weight"])
        hidden = hidden + rms_norm(attended, own["attn_norm.weight"], epsilon)
        content, gate = linear(hidden, own["ff_proj.weight"]).chunk(2, dim=-1)
        fed = linear(silu(gate) * content, own["ff_out.weight"])
        hidden = hidden + rms_norm(fed, own["ff_norm.weight"], epsilon)
    logits = linear(rms_norm(hidden, weights["ln_f.weight"], epsilon), weights["ff_out.weight"])
    assert_close(logits, arrays["logits"], atol=1e-4, rtol=0)


def test_a_map_of_any_positions_has_no_maximum():
    for position_map in (PositionMLP(3), FixedSlopes(2)):
        assert position_map.maximum == math.inf
    network = PositionMLP(3)
    assert (network.hidden.out_features, network.unit) == (64, 64.0), "as in the paper"
