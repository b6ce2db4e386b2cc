"""The measure `three_axis` against the dense solve."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import devices, on, random_inputs
from causal_reference import seen
from numpy.testing import assert_allclose
from three_axis_reference import dense_r, design, maps, of_kind, ridge_solve, rounded

from repo_interp.measures.statistics import merge
from repo_interp.plugins.three_axis.three_axis import ThreeAxis

AXES = ("distance_axis", "query_axis", "key_axis")


def measured(inputs, *extras):
    measure = ThreeAxis(axes="first_prompt", extras=extras)
    return measure.conclude(merge([measure.observe(inputs, {})])).isel(layer=0)


@pytest.mark.parametrize("n", [2, 3, 128])
@devices
def test_coefficients_and_r_of_the_dense_solve(n, device):
    inputs = random_inputs(prompts=1, heads=2, kv_heads=2, tokens=n, d_head=4)
    weights, pairs = maps(inputs)
    group = measured(on(inputs, device))
    found = np.concatenate([group[name] for name in AXES], -1)
    assert_allclose(found.T, ridge_solve(design(pairs[0]), weights[0][:, pairs[0]].T), atol=1e-10)
    assert_allclose(group["r"], dense_r(weights, pairs), atol=1e-10)


@pytest.mark.parametrize("mean", [0, 5, 70])
def test_float32_keeps_its_digits_when_the_mean_dwarfs_the_spread(mean):
    inputs = random_inputs(prompts=1, tokens=300, d_head=16, kv_heads=2, scheme="nope")
    level = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    inputs = replace(inputs, queries=inputs.queries + level, keys=inputs.keys + mean * level)
    group, reference = map(measured, rounded(inputs))
    assert_allclose(group["r"], reference["r"], atol=1e-6)
    for name in AXES:
        spread = float(reference[name].std())
        assert_allclose(group[name], reference[name], rtol=0, atol=1e-5 * spread, err_msg=name)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("kind", ["plain", "holes", "softcap", "bias"])
def test_any_layer_is_what_the_dense_solve_says(kind, window):
    inputs = of_kind(random_inputs(window=window, kv_heads=2, position_rows=4), kind)
    weights, pairs = maps(inputs)
    assert_allclose(pairs, seen(inputs.valid, window))
    group = measured(inputs, "attention")
    assert_allclose(group["r"], dense_r(weights, pairs), atol=1e-9)
    attention = torch.softmax(torch.as_tensor(weights), -1).nan_to_num().numpy()
    assert_allclose(group["r_attention"], dense_r(attention, pairs), atol=1e-9)


def test_logits_that_do_not_vary_have_no_correlation():
    inputs = random_inputs()
    one_token = torch.arange(24).expand(2, -1) == 3
    for still in (replace(inputs, queries=0 * inputs.queries), replace(inputs, valid=one_token)):
        assert measured(still)["r"].isnull().all()
