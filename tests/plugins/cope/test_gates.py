"""gates: what CoPE counts and where position alone attends - closed forms, a slow reference, every
variant captured, the official code.
"""

import math
from dataclasses import replace

import numpy as np
import places
import pytest
import torch
from attention_inputs import cope_inputs, random_inputs
from families import TOKENS, tiny
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.measures.kernels.gate_sums import (
    attention_from_position,
    gates_of_rows,
)
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.cope.gates import Gates
from repo_interp.runtime.memory import working_memory

OFFICIAL = places.OFFICIAL / "cope"
ROWS = torch.arange(24)


def marked(inputs, kind="lines", starts=(), separators=()):
    """Spans as analyze hands them, the same in every prompt."""
    mask = torch.zeros_like(inputs.valid)
    spans = {
        "separator": mask.clone(),
        f"segments.{kind}": inputs.valid,
        f"segments.{kind}.starts": mask.clone(),
    }
    spans["separator"][:, list(separators)] = True
    spans[f"segments.{kind}.starts"][:, [0, *starts]] = True
    return spans


def concluded(inputs, spans, **options):
    asked = Gates(**options)
    return asked.conclude(asked.observe(inputs, spans)).sel(layer=inputs.layer)


def counting(where, tokens=24, heads=4):
    """Inputs whose gates are open at `where` and shut elsewhere, and whose position logits prefer
    position 0 by far.
    """
    features = torch.full((2, 2, tokens, 8), -40.0, dtype=torch.float64)
    features[:, :, list(where)] = 40.0
    given = {"queries": torch.ones(2, heads, tokens, 8, dtype=torch.float64)}
    weight = torch.zeros(9, 8, dtype=torch.float64)
    weight[0] = 10.0
    return cope_inputs(gate_features=features, weight=weight, heads=heads, tokens=tokens, **given)


# closed forms
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "share", "chance"), [((5, 11, 17), 1, 1 / 31), ((2, 8, 14), 0, 1)]
)
def test_a_head_that_counts_separators_is_told_from_one_that_counts_something_else(
    where, share, chance
):
    inputs = counting(where)
    group = concluded(inputs, marked(inputs, separators=(5, 11, 17)), draws=30)
    assert_allclose(group["gate_by_token"] - np.isin(np.arange(24), where), 0, atol=1e-12)
    assert_allclose(group["separator_share"], share, atol=1e-12)
    assert_allclose(group["separator_share_chance"], chance)
    assert (group["separator_share_shuffled"] < 0.5).all()
    assert_array_equal(group["separator"].sum("key"), 3)


def test_attention_to_position_zero_stays_in_the_last_segment():
    """Tokens behind an open gate are at position 0; the separator itself, which ends the segment
    before, is at 1.
    """
    inputs = counting((5, 11, 17, 23))
    spans = marked(inputs, starts=(6, 12, 18))
    group = concluded(inputs, spans, kinds=("lines", "blocks"), draws=30)
    lines = group.sel(kind="lines")
    # a query that is itself a separator has its whole line at position 1, and nothing at 0
    share = np.array([(i % 6 + 1) / (i + 1) for i in range(6, 24)])
    even, expected = share.mean(), np.where(np.arange(18) % 6 == 5, share, 1).mean()
    assert_allclose(lines["last_segment_mass"], expected, atol=1e-9)
    assert_allclose(lines["last_segment_even"], even)
    shuffled = lines["last_segment_shuffled"]
    assert (shuffled < 0.85 * expected).all() and (shuffled > 1.2 * even).all()
    assert (lines["last_segment_queries"] == 18).all()
    assert np.isnan(group["last_segment_mass"].sel(kind="blocks")).all()


def test_preferring_what_is_near_is_no_better_than_shuffled_segments():
    """ALiBi stays in the last line more than even attention does, and as much in lines of the same
    lengths put elsewhere.
    """
    inputs = random_inputs(scheme="nope", tokens=60)
    distance = (torch.arange(60)[:, None] - torch.arange(60)).double()
    inputs = replace(
        inputs,
        scheme="alibi",
        position_logits=lambda rows: -0.3 * distance[rows].expand(1, 4, -1, -1),
    )
    group = concluded(inputs, marked(inputs, starts=range(6, 60, 6)), kinds=("lines",), draws=100)
    assert (group["last_segment_mass"] > 3 * group["last_segment_even"]).all()
    assert_allclose(group["last_segment_mass"], group["last_segment_shuffled"], rtol=0.03)
    assert np.isnan(group["gate_by_token"]).all() and np.isnan(group["separator_share"]).all()


def test_a_layer_without_gates_or_position_logits_is_nan():
    inputs = random_inputs(scheme="repo")
    group = concluded(inputs, marked(inputs, starts=(4,), separators=(3,)), maps=2)
    of_gates = ("gate_by_token", "counted", "separator_share", "largest_position")
    for name in (*of_gates, "last_segment_mass", "position_attention"):
        assert np.isnan(group[name]).all(), name
    with pytest.raises(ValueError, match="no gates"):
        gates_of_rows(random_inputs(), ROWS)
    with pytest.raises(ValueError, match="no position logits"):
        attention_from_position(random_inputs(), ROWS)


# slow references
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
def test_everything_equals_the_pair_by_pair_sums(window):
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[1, :3] = False  # padding on the left
    inputs = cope_inputs(p_max=4, valid=valid, window=window)
    spans = marked(inputs, starts=(9, 14, 20), separators=(8, 13))
    with working_memory(1 if window else 2**24):
        found = concluded(inputs, spans, maps=1)
    for prompt, head in ((0, 1), (1, 3)):
        scores = inputs.queries[prompt, head] @ inputs.keys[prompt, head // 2].T
        distance = np.subtract.outer(np.arange(24), np.arange(24))
        known = valid[prompt].numpy()
        seen = (distance >= 0) & (distance < (window or 24)) & known & known[:, None]
        gate = np.where(seen, 1 / (1 + np.exp(-scores.numpy() * inputs.logit_scale)), 0)
        here = found.sel(prompt=prompt, head=head)
        marks = np.isin(np.arange(24), (8, 13))
        sums = {
            "gate_by_token": gate.sum(0) / np.maximum(seen.sum(0), 1),
            "gate_sum": gate.sum(1),
            "counted": np.minimum(gate.sum(1), 3),
        }
        for name, expected in sums.items():
            assert_allclose(here[name][known], expected[known], rtol=1e-5)
        assert np.isnan(here["gate_sum"][~known]).all() and (here["separator"][~known] == -1).all()
        assert_allclose(here["separator_share"], gate[:, marks].sum() / gate.sum())
        assert_allclose(here["separator_share_even"], seen[:, marks].sum() / seen.sum())
        assert_allclose(here["separator_gate"], gate[seen & marks].mean())
        assert_allclose(here["other_gate"], gate[seen & ~marks].mean())
        logit = np.where(seen, inputs.position_logits(ROWS)[prompt, head], -np.inf)[9:]
        weights, seen = np.exp(logit - logit.max(1, keepdims=True)), seen[9:]
        own = np.arange(24) >= np.repeat([9, 14, 20], [5, 6, 4])[:, None]  # in the query's line
        of_line = here.sel(kind="lines")
        for name, values in (("mass", weights), ("even", seen)):
            expected = ((values * own).sum(1) / values.sum(1)).mean()
            assert_allclose(of_line[f"last_segment_{name}"], expected, rtol=1e-6)
        if prompt == 0:
            rows = here["position_attention"][9:]
            assert_allclose(rows, np.where(seen, weights, np.nan), rtol=1e-5)
    assert np.isnan(found["position_attention"].sel(prompt=1)).all()
    assert found["largest_position"] == 3


def test_official_positions_are_the_sums_of_the_gates():
    arrays = np.load(OFFICIAL / "cope.npz")
    tensors = {name: torch.as_tensor(arrays[name]) for name in ("q", "k", "pos", "bias")}
    inputs = replace(
        random_inputs(
            prompts=2, heads=3, kv_heads=3, tokens=48, scheme="nope", dtype=torch.float32
        ),
        queries=tensors["q"],
        keys=tensors["k"],
        gate_features=tensors["k"],
        largest_position=float(arrays["max_cope_length"]) - 1,
        position_logits=lambda rows: tensors["bias"][:, :, rows],
    )
    group = concluded(inputs, {}, maps=2)
    assert_allclose(group["counted"], tensors["pos"][..., 0], atol=1e-5)
    masked = tensors["bias"].masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
    expected = (masked - masked.amax(-1, keepdim=True)).exp()
    assert_allclose(np.nan_to_num(group["position_attention"]), expected, atol=1e-5)


# capture, every variant
# --------------------------------------------------------------------------------------------------

VARIANTS = [
    ("cope", {}),
    ("cope", {"gates": "separate_keys", "p_max": 5}),
    ("cope_mlp", {"gates": "separate_keys"}),
    ("cope_alibi", {"gates": "values", "map": "model"}),
    ("cope_rope", {"gates": "separate_keys"}),
]


@pytest.mark.parametrize(("layout", "options"), VARIANTS)
@torch.no_grad()
def test_capture_hands_over_what_the_gates_of_each_variant_look_at(layout, options):
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), layout, **options)
    layers = as_decoder(model).layers
    for layer in layers:  # maps that are not zero
        for parameter in layer.position_logits.parameters():
            parameter.data = torch.randn(parameter.shape) * 0.4
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, :4] = False
    hidden, seen, called, handles = {}, [], [], []

    def note(module, args, kwargs):
        hidden[module.layer_idx] = kwargs.get("hidden_states", *args[:1])

    def keep(module, args, result):
        called.append(result)

    for layer in layers:
        handles.append(layer.module.register_forward_pre_hook(note, with_kwargs=True))
        handles.append(layer.position_logits.register_forward_hook(keep))
    capture(as_decoder(model), TOKENS, valid, torch.arange(2), seen.append)
    for handle in handles:
        handle.remove()
    in_pass = [result for result in called if result.shape[2]]  # without those asked for no row
    for inputs, attention, added in zip(seen, layers, in_pass, strict=True):
        h = hidden[inputs.layer]
        projections = {
            "keys": attention.module.k_proj,
            "values": attention.module.v_proj,
            "separate_keys": getattr(attention.position_logits, "gate_projection", None),
        }
        expected = projections[options.get("gates", "keys")](h)
        assert_close(inputs.gate_features, expected.view(2, 20, 2, 8).transpose(1, 2))
        rows = torch.arange(20)
        gates = gates_of_rows(inputs, rows)
        positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=inputs.largest_position)
        assert inputs.largest_position == (
            math.inf if layout in ("cope_mlp", "cope_alibi") else options.get("p_max", 128) - 1
        )
        by_map = attention.position_logits.position_map(inputs.queries, positions)
        visible = inputs.visible(rows)[:, None].expand_as(gates)
        assert_close(by_map[visible], added[visible], atol=1e-5, rtol=1e-5)
        assert_close(inputs.position_logits(rows)[visible], added[visible], atol=1e-5, rtol=1e-5)
        assert not attention.position_logits._forward_pre_hooks


# through analyze
# --------------------------------------------------------------------------------------------------


def test_a_prompt_too_long_for_its_map_is_named():
    with refused("prompt 0 has 24 tokens"):
        concluded(cope_inputs(), {}, maps=1, map_tokens=20)
