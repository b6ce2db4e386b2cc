"""The measure `fake_distance`: closed forms, the fake logits written out, the authors' arrays."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import OFFICIAL, devices, official_inputs, on, random_inputs, with_holes
from numpy.testing import assert_allclose, assert_array_equal

from repo_interp.measures.statistics import merge
from repo_interp.plugins.fake_distance.fake_distance import FakeDistance, _reach
from repo_interp.positions.rotary import rotate

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")


def measured(inputs, **parameters):
    measure = FakeDistance(**parameters)
    return measure.conclude(merge([measure.observe(inputs, {})]))


def r_of(inputs, **parameters):
    return measured(inputs, **parameters)["r"].values[:, 0]


def fake_logits(inputs, prompt, head, query, distances):
    """W' [distance, key] of one query, written out with the model's own rotation."""
    valid = inputs.valid[prompt]
    keys = inputs.keys[prompt, head // (inputs.heads // inputs.kv_heads), valid].double()
    queries = inputs.queries[prompt, head, query].double().expand(len(distances), -1)
    if inputs.frequencies is not None:
        frequencies, scaling = inputs.frequencies.double(), inputs.attention_scaling
        queries = rotate(queries, distances, frequencies, scaling)
        keys = rotate(keys, torch.zeros(len(keys), dtype=torch.float64), frequencies, scaling)
    return (queries @ keys.T * inputs.logit_scale).numpy()


def two_axes(logits):
    """(a, b, r) of the least-squares fit of the paper's eq. 13."""
    position = logits.mean(1) - logits.mean() / 2
    semantic = logits.mean(0) - logits.mean() / 2
    fitted = position[:, None] + semantic
    return position, semantic, np.corrcoef(logits.ravel(), fitted.ravel())[0, 1]


def assert_fits(inputs, group, distances_of=None, added=0.0, atol=1e-10):
    """What was measured is the fit of the logits of every last query at these distances."""
    for prompt, head in product(range(len(inputs.valid)), range(inputs.heads)):
        tokens = inputs.valid[prompt].nonzero()[:, 0]
        distances = torch.arange(len(tokens), dtype=torch.float64)
        if distances_of:
            distances = distances_of(prompt, head, tokens)
        logits = fake_logits(inputs, prompt, head, tokens[-1], distances)
        if inputs.position_logits:
            logits = (
                logits
                + inputs.position_logits(tokens[-1:])[0, head, 0, tokens].flip(0)[:, None].numpy()
            )
        position, semantic, r = two_axes(logits)
        share = semantic.var() / (semantic.var() + position.var())
        found = group.isel(prompt=prompt, layer=0, head=head)
        assert_allclose([found["r"], found["semantic_share"]], [r, share], atol=atol)
        if prompt == 0:
            assert_allclose(found["position_axis"], position, atol=atol)
            assert_allclose(found["semantic_axis"], semantic, atol=atol)


@pytest.mark.parametrize("scheme", ["rope", "repo", "nope"])
@pytest.mark.parametrize("shape", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@devices
def test_r_and_axes_are_those_of_the_logits_written_out(scheme, shape, device):
    inputs = with_holes(random_inputs(heads=shape[0], kv_heads=shape[1], scheme=scheme))
    # by pair
    scaling = 1.2 if shape[0] == 4 else torch.linspace(1.2, 1.0, inputs.queries.shape[-1] // 2)
    inputs = replace(inputs, attention_scaling=scaling, logit_scale=0.4)
    assert_fits(inputs, measured(on(inputs, device)))


def test_a_layer_without_rotation_can_be_asked_to_rotate():
    rope = random_inputs(scheme="rope")
    inputs = replace(rope, scheme="nope", positions=None, frequencies=None)
    frequencies = 500.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = r_of(replace(rope, frequencies=frequencies))
    assert_allclose(r_of(inputs, nope_base=500.0), expected, atol=1e-12)
    assert expected.max() < 0.99
    assert_allclose(r_of(rope, nope_base=500.0), r_of(rope))


def test_distances_that_the_last_query_really_sees():
    inputs = with_holes(random_inputs())
    positions = inputs.positions

    def seen(prompt, head, tokens):
        back = positions[prompt, head, tokens[-1]] - positions[prompt, head, tokens]
        return torch.linspace(*map(float, back.aminmax()), len(tokens), dtype=torch.float64)

    assert_fits(inputs, measured(inputs, distances="positions"), seen, atol=1e-9)
    index = torch.arange(24, dtype=torch.float64).expand(2, 1, -1)
    rope = replace(random_inputs(scheme="rope"), positions=index)
    assert_allclose(r_of(rope, distances="positions"), r_of(rope), atol=1e-12)


def test_several_queries_are_averaged_and_missing_ones_left_out():
    inputs = random_inputs(scheme="rope")
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, 3:] = False
    inputs = replace(inputs, valid=valid)
    found = r_of(inputs, queries=5)
    distances = torch.arange(24, dtype=torch.float64)
    for prompt, queries in ((0, (0, 1, 2)), (1, (19, 20, 21, 22, 23))):
        count = int(valid[prompt].sum())
        for head in range(4):
            every = [
                two_axes(fake_logits(inputs, prompt, head, query, distances[:count]))[2]
                for query in queries
            ]
            assert_allclose(found[prompt, head], np.mean(every), atol=1e-10)
    assert_allclose(r_of(inputs, queries=500)[0], found[0], atol=1e-12)


def test_a_bias_by_distance_is_added_to_the_distances_it_belongs_to():
    inputs = with_holes(random_inputs(scheme="rope"))
    distance = torch.arange(24)[:, None] - torch.arange(24.0, dtype=torch.float64)
    slope = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64)[:, None, None]
    inputs = replace(
        inputs, position_logits=lambda rows: (-slope * distance[rows].abs().sqrt())[None]
    )
    assert_fits(inputs, measured(inputs))
    alibi = replace(inputs, positions=None, frequencies=None, scheme="alibi")
    assert_allclose(r_of(alibi), 1, atol=1e-10)


def test_logits_that_do_not_vary_have_no_correlation():
    inputs = random_inputs(scheme="rope")
    assert np.isnan(r_of(replace(inputs, queries=0 * inputs.queries))).all()
    alike = replace(random_inputs(scheme="nope"), keys=torch.ones_like(inputs.keys))
    assert np.isnan(r_of(alike)).all()


@pytest.mark.parametrize("mean", [5, 70])
def test_float32_keeps_its_digits_when_the_mean_dwarfs_the_spread(mean):
    inputs = random_inputs(prompts=1, tokens=300, d_head=16, scheme="rope")
    level = mean * torch.randn(1, 1, 1, 16, dtype=torch.float64)
    rounded = replace(inputs, queries=inputs.queries.float(), keys=(inputs.keys + level).float())
    exact = replace(rounded, queries=rounded.queries.double(), keys=rounded.keys.double())
    assert_allclose(r_of(rounded), r_of(exact), atol=1e-6)


def test_many_tokens_go_through_in_blocks():
    inputs = random_inputs(prompts=1, heads=2, kv_heads=1, tokens=1300, d_head=4, scheme="rope")
    assert_fits(inputs, measured(inputs), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_paper_s_own_sign_and_axes(dtype):
    """Those arrays are without 1/sqrt(d_head)."""
    measure = FakeDistance(sign="printed")
    layers = [official_inputs("repo_mha", layer, dtype=dtype) for layer in range(6)]
    group = measure.conclude(merge([measure.observe(inputs, {}) for inputs in layers]))
    expected = ANALYSIS["repo_mha/fake_r_literal"]
    assert_allclose(group["r"].transpose("layer", "prompt", "head"), expected, atol=1e-6)
    for name, axis in zip(
        ("position_axis", "semantic_axis"), ANALYSIS["repo_mha/fake_ab_literal_seq0"], strict=True
    ):
        assert np.abs(4 * group[name].values - axis).max() < 1e-4 * axis.std()


def test_the_reach_of_contents_in_closed_form():
    """A slope of one tenth per token against a margin of two: lost from the 21st token on."""
    distance, slopes = np.arange(40.0), np.array([-0.1, -0.04, 0.0])
    position = xr.Variable(("layer", "head", "distance"), slopes[None, :, None] * distance)
    contents = np.broadcast_to([0.0, 1.0, 1.0, 1.0, 3.0], (1, 3, 5))
    semantic = xr.Variable(("layer", "head", "token"), contents)
    assert_array_equal(_reach(position, semantic, distance).values, [[21, np.nan, np.nan]])
    # distance counts against the nearest token that it favors most
    bumped = position.copy()
    bumped[{"distance": 5}] = 3.0
    assert_array_equal(_reach(bumped, semantic, distance).values, [[6, 6, 6]])
