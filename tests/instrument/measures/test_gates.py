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
from repo_interp.measures.gates import Gates
from repo_interp.measures.kernels.gate_sums import (
    attention_from_position,
    gates_of_rows,
)
from repo_interp.memory import working_memory
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder

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


def test_gates_are_half_where_queries_say_nothing():
    group = concluded(cope_inputs(queries=torch.zeros(2, 4, 24, 8, dtype=torch.float64)), {})
    assert_allclose(group["gate_by_token"], 0.5)
    assert_allclose(group["gate_sum"].sel(prompt=1, head=3), (np.arange(24) + 1) / 2)
    assert_allclose(group["counted"].sel(prompt=1, head=3), np.minimum((np.arange(24) + 1) / 2, 8))
    assert group["largest_position"] == 8


def test_a_head_that_counts_separators_is_seen_to():
    inputs = counting((5, 11, 17))
    group = concluded(inputs, marked(inputs, separators=(5, 11, 17)), draws=30)
    assert_allclose(group["separator_share"], 1)
    assert_allclose(group["gate_by_token"].sel(key=[5, 11, 17]), 1)
    assert_allclose(group["gate_by_token"].sel(key=[0, 6, 23]), 0, atol=1e-12)
    assert_allclose(
        group["counted"].sel(query=[4, 5, 16, 17, 23])[0, 0], [0, 1, 2, 3, 3], atol=1e-9
    )
    assert_allclose(group["separator_share_chance"], 1 / 31)
    assert (group["separator_share_shuffled"] < 0.5).all()
    assert_array_equal(group["separator"].sum("key"), 3)


def test_a_head_that_counts_something_else_is_not():
    inputs = counting((2, 8, 14))
    group = concluded(inputs, marked(inputs, separators=(5, 11, 17)))
    assert_allclose(group["separator_share"], 0, atol=1e-12)
    assert_allclose(group["separator_share_chance"], 1)


def test_attention_to_position_zero_stays_in_the_last_segment():
    """Tokens behind an open gate are at position 0; the separator itself, which ends the segment
    before, is at 1.
    """
    inputs = counting((5, 11, 17, 23))
    spans = marked(inputs, starts=(6, 12, 18))
    group = concluded(inputs, spans, kinds=("lines", "blocks"), draws=30)
    lines = group.sel(kind="lines")
    # a query that is itself a separator has its whole line at position 1, and nothing at 0
    even = np.mean([(i % 6 + 1) / (i + 1) for i in range(6, 24)])
    expected = np.mean([(i % 6 + 1) / (i + 1) if i % 6 == 5 else 1 for i in range(6, 24)])
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
    for name in ("gate_by_token", "counted", "separator_share", "largest_position"):
        assert np.isnan(group[name]).all(), name
    assert (
        np.isnan(group["last_segment_mass"]).all() and np.isnan(group["position_attention"]).all()
    )
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
        gate, logit = np.zeros((24, 24)), np.full((24, 24), -np.inf)
        for i in range(24):
            for j in range(i + 1):
                if valid[prompt, i] and valid[prompt, j] and (window is None or i - j < window):
                    score = (
                        float(inputs.queries[prompt, head, i] @ inputs.keys[prompt, head // 2, j])
                        * inputs.logit_scale
                    )
                    gate[i, j] = 1 / (1 + math.exp(-score))
        added = inputs.position_logits(ROWS)[prompt, head].numpy()
        logit[gate > 0] = added[gate > 0]
        here = found.sel(prompt=prompt, head=head)
        kept = valid[prompt].numpy()
        assert_allclose(
            here["gate_by_token"][kept], gate.sum(0)[kept] / (gate > 0).sum(0)[kept], rtol=1e-5
        )
        assert_allclose(here["gate_sum"][kept], gate.sum(1)[kept], rtol=1e-5)
        assert_allclose(here["counted"][kept], np.minimum(gate.sum(1), 3)[kept], rtol=1e-5)
        assert np.isnan(here["gate_sum"][~kept]).all() and (here["separator"][~kept] == -1).all()
        assert_allclose(here["separator_share"], gate[:, [8, 13]].sum() / gate.sum())
        assert_allclose(
            here["separator_share_even"], (gate > 0)[:, [8, 13]].sum() / (gate > 0).sum()
        )
        assert_allclose(here["separator_gate"], gate[:, [8, 13]][gate[:, [8, 13]] > 0].mean())
        others = np.delete(gate, [8, 13], axis=1)
        assert_allclose(here["other_gate"], others[others > 0].mean())
        masses, evens = [], []
        for i in range(9, 24):
            weights = np.exp(logit[i] - logit[i].max())
            start = max(edge for edge in (9, 14, 20) if edge <= i)
            masses.append(weights[start:].sum() / weights.sum())
            evens.append((gate[i, start:] > 0).sum() / (gate[i] > 0).sum())
            if prompt == 0:
                row = here["position_attention"].sel(query=i).values
                assert_allclose(row[gate[i] > 0], (weights / weights.max())[gate[i] > 0], rtol=1e-5)
                assert np.isnan(row[gate[i] == 0]).all()
        assert_allclose(here["last_segment_mass"].sel(kind="lines"), np.mean(masses), rtol=1e-6)
        assert_allclose(here["last_segment_even"].sel(kind="lines"), np.mean(evens), rtol=1e-9)
    assert np.isnan(found["position_attention"].sel(prompt=1)).all()


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
    expected = torch.softmax(masked, -1) / torch.softmax(masked, -1).amax(-1, keepdim=True)
    assert_allclose(np.nan_to_num(group["position_attention"]), expected, atol=1e-5)


# capture, every variant
# --------------------------------------------------------------------------------------------------

VARIANTS = [
    ("cope", {}),
    ("cope", {"gates": "values"}),
    ("cope", {"gates": "separate_keys", "p_max": 5}),
    ("cope", {"gates": "separate_keys", "map": "model"}),
    ("cope_mlp", {"gates": "separate_keys"}),
    ("cope_alibi", {"gates": "values", "map": "model"}),
    ("cope_rope", {"gates": "separate_keys"}),
]


def awake(layout, options, family="llama"):
    """A random CoPE model whose maps are not zero."""
    torch.manual_seed(0)
    model = ri.reposition(tiny(family), layout, **options)
    generator = torch.Generator().manual_seed(3)
    for attention in as_decoder(model).layers:
        for name, parameter in attention.position_logits.named_parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * (
                0.5 if "map" in name else 0.2
            )
    return model


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(("layout", "options"), VARIANTS)
@torch.no_grad()
def test_capture_hands_over_what_the_gates_of_each_variant_look_at(layout, options, padding):
    model = awake(layout, options)
    hidden, seen, called = {}, [], []
    tokens, valid = TOKENS, torch.ones(2, 20, dtype=torch.bool)
    if padding == "left":
        valid[1, :4] = False
    handles = []
    for attention in as_decoder(model).layers:

        def note(module, args, kwargs):
            hidden[module.layer_idx] = kwargs.get("hidden_states", *args[:1])

        def keep(module, args, result):
            called.append(result)

        handles.append(attention.module.register_forward_pre_hook(note, with_kwargs=True))
        handles.append(attention.position_logits.register_forward_hook(keep))
    capture(model, tokens, valid, torch.arange(2), seen.append)
    for handle in handles:
        handle.remove()
    in_pass = [result for result in called if result.shape[2]]  # without those asked for no row
    for inputs, attention, added in zip(seen, as_decoder(model).layers, in_pass, strict=True):
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
