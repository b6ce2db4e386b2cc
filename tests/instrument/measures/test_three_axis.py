"""The measure `three_axis`: closed forms and invariants, the dense solve as reference, the authors'
arrays.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import devices, on, random_inputs
from causal_reference import seen
from numpy.testing import assert_allclose
from three_axis_reference import dense_fit, design, ridge_solve

from repo_interp.measures.statistics import merge
from repo_interp.measures.three_axis import ThreeAxis

AXES = ("distance_axis", "query_axis", "key_axis")


def measured(inputs, **parameters):
    measure = ThreeAxis(**{"extras": ()} | parameters)
    return measure.conclude(merge([measure.observe(inputs, {})]))


def r_of(inputs, name="r", **parameters):
    return measured(inputs, **parameters)[name].values[:, 0]


def maps(inputs):
    """Every logit [prompt, head, query, key], float64, and which are seen [prompt, query, key]."""
    rows = torch.arange(inputs.valid.shape[1])
    return inputs.logits(rows).double().numpy(), inputs.visible(rows).numpy()


def dense_r(weights, pairs):
    return np.array(
        [
            [dense_fit(head, mask)[2] for head in prompt]
            for prompt, mask in zip(weights, pairs, strict=True)
        ]
    )


def additive_layer(n=60, seed=0):
    """A layer whose logits are a function of the distance, plus one of the query, plus one of the
    key.
    """
    inputs = random_inputs(prompts=1, heads=3, kv_heads=3, tokens=n, d_head=8, seed=seed)
    queries, keys = inputs.queries.clone(), inputs.keys.clone()
    for constant in (0, 4, 1, 5):
        queries[..., constant] = queries[:, :, :1, constant]
        keys[..., constant] = keys[:, :, :1, constant]
    queries[..., 2], keys[..., 3] = 1, 1
    queries[..., [6, 7]], keys[..., [6, 7]] = 0, 0
    frequencies = torch.tensor([0.3, 0.05, 0.0, 0.0], dtype=torch.float64)
    positions = torch.arange(n, dtype=torch.float64).expand(1, 1, n)
    return replace(
        inputs,
        scheme="rope",
        queries=queries,
        keys=keys,
        positions=positions,
        frequencies=frequencies,
    )


def test_logits_that_are_three_axes_correlate_perfectly_and_give_them_back():
    inputs = additive_layer()
    group = measured(inputs, axes="first_prompt")
    assert_allclose(group["r"], 1, atol=1e-9)
    distance, query, key = (group[name].values[0] for name in AXES)
    n = distance.shape[-1]
    i, j = np.tril_indices(n)
    fitted = distance[:, i - j] + query[:, i] + key[:, j]
    assert_allclose(fitted, maps(inputs)[0][0][:, i, j], atol=1e-4)
    true_key = (inputs.keys[0, :, :, 2] * inputs.logit_scale).numpy()
    difference = key - true_key
    assert_allclose(np.diff(difference, 2), 0, atol=1e-4)


@pytest.mark.parametrize("n", [2, 3, 16, 128])
@devices
def test_coefficients_fitted_values_and_r_of_the_dense_solve(n, device):
    inputs = random_inputs(prompts=1, heads=2, kv_heads=2, tokens=n, d_head=4)
    weights, pairs = maps(inputs)
    group = measured(on(inputs, device), axes="first_prompt")
    found = np.concatenate([group[name].values[0] for name in AXES], -1)
    matrix = design(pairs[0])
    values = weights[0][:, pairs[0]].T
    expected = ridge_solve(matrix, values)
    assert_allclose(found.T, expected, atol=1e-10)
    assert_allclose(matrix @ found.T, matrix @ expected, atol=1e-10)
    assert_allclose(group["r"].values[:, 0], dense_r(weights, pairs), atol=1e-10)


@pytest.mark.parametrize("mean", [0, 5, 70])
def test_float32_keeps_its_digits_when_the_mean_dwarfs_the_spread(mean):
    inputs = random_inputs(prompts=1, tokens=300, d_head=16, kv_heads=2, scheme="nope")
    level = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    inputs = replace(inputs, queries=inputs.queries + level, keys=inputs.keys + mean * level)
    rounded = replace(inputs, queries=inputs.queries.float(), keys=inputs.keys.float())
    exact = replace(rounded, queries=rounded.queries.double(), keys=rounded.keys.double())
    group, reference = measured(rounded, axes="first_prompt"), measured(exact, axes="first_prompt")
    assert_allclose(group["r"], reference["r"], atol=1e-6)
    for name in AXES:
        assert np.abs(group[name] - reference[name]).max() < 1e-5 * float(reference[name].std()), (
            name
        )


def softened(inputs, softcap=None, bias=False):
    added = torch.randn(2, 4, 24, 24, dtype=torch.float64)
    return replace(
        inputs, softcap=softcap, position_logits=(lambda rows: added[:, :, rows]) if bias else None
    )


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("kind", ["plain", "holes", "softcap", "bias"])
def test_any_layer_is_what_the_dense_solve_says(kind, window):
    inputs = random_inputs(window=window, kv_heads=2, position_rows=4)
    if kind == "holes":
        inputs = replace(inputs, valid=torch.rand(2, 24) < 0.8)
    inputs = softened(inputs, softcap=1.5 if kind == "softcap" else None, bias=kind == "bias")
    weights, pairs = maps(inputs)
    assert_allclose(pairs, seen(inputs.valid, window))
    assert_allclose(r_of(inputs), dense_r(weights, pairs), atol=1e-9)
    attention = torch.softmax(torch.as_tensor(weights), -1).nan_to_num().numpy()
    found = r_of(inputs, "r_attention", extras=("attention",))
    assert_allclose(found, dense_r(attention, pairs), atol=1e-9)


def test_logits_that_do_not_vary_have_no_correlation():
    inputs = random_inputs()
    assert np.isnan(r_of(replace(inputs, queries=0 * inputs.queries))).all()
    one_token = replace(inputs, valid=torch.arange(24).expand(2, -1) == 3)
    assert np.isnan(r_of(one_token)).all()
