"""The measure `rotation`: pair statistics, slow dominating components, the closed form of theorem
2.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import devices, on, random_inputs, with_holes
from numpy.testing import assert_allclose
from refusals import refused
from three_axis_reference import maps, of_kind, rounded

from repo_interp.measures.kernels.heads import reduced
from repo_interp.measures.statistics import merge
from repo_interp.plugins.rotation.closed_form import ClosedForm
from repo_interp.plugins.rotation.rotation import Rotation, pair_statistics

LOOSE = {"prominence": 0.0, "stability": 100.0, "slow": 1e9, "still": 1e9}


def measured(inputs, **parameters):
    measure = Rotation(**{"training_length": 24} | parameters)
    return measure.conclude(merge([measure.observe(inputs, {})]))


def pairs_of(features, heads):
    """Complex pairs [prompt, head, token, component]."""
    first, second = features.double().chunk(2, -1)
    return torch.complex(first, second).repeat_interleave(heads // features.shape[1], 1)


def planted(angle=0.7, deviation=0.1, size=20.0, frequency=0.005):
    """A layer of RoPE whose component 3 is large and almost the same for every key."""
    inputs = random_inputs(scheme="rope")
    queries, keys = inputs.queries.clone(), inputs.keys.clone()
    for features, direction in ((queries, angle), (keys, 0.0)):
        level = torch.tensor([math.cos(direction), math.sin(direction)])
        features[..., [3, 7]] = size * (level + deviation * features[..., [3, 7]])
    frequencies = inputs.frequencies.clone()
    frequencies[3] = frequency
    return replace(inputs, queries=queries, keys=keys, frequencies=frequencies)


def dominates(inputs, **parameters):
    """Whether component 3 is slow dominating, the same for all heads."""
    (found,) = np.unique(measured(inputs, **parameters)["slow_dominating"].isel(component=3))
    return bool(found)


@pytest.mark.parametrize("kv_heads", [6, 2])
@devices
def test_pair_statistics_written_out(kv_heads, device):
    inputs = with_holes(random_inputs(heads=6, kv_heads=kv_heads))
    group = measured(on(inputs, device)).isel(layer=0)
    for side, features in (("query", inputs.queries), ("key", inputs.keys)):
        numbers = features.repeat_interleave(6 // features.shape[1], 1)
        # by prompt: [head, token, component]
        pairs = pairs_of(features, 6).numpy()
        by_prompt = [pairs[prompt][:, inputs.valid[prompt]] for prompt in range(2)]
        deviations = [np.abs(each - each.mean(1, keepdims=True)) for each in by_prompt]
        mean = np.concatenate(by_prompt, 1).mean(1)
        expected = {
            "norm": np.abs(np.concatenate(by_prompt, 1)).mean(1),
            "mean_re": mean.real,
            "mean_im": mean.imag,
            "deviation": np.concatenate(deviations, 1).mean(1),
            "dimension_norm": numbers.abs().transpose(1, 2)[inputs.valid].mean(0),
        }
        for name, values in expected.items():
            assert_allclose(group[f"{side}_{name}"], values, atol=1e-12, err_msg=name)
    query = group["query_mean_re"] + 1j * group["query_mean_im"]
    key = group["key_mean_re"] + 1j * group["key_mean_im"]
    assert_allclose(group["start_angle"], np.angle((query / key).values), atol=1e-12)


def test_rotation_is_by_the_training_length_or_the_window_or_the_positions_that_are_there():
    inputs = with_holes(random_inputs(scheme="rope"))
    for window, length in ((None, 24), (9, 9), (30, 24)):
        group = measured(replace(inputs, window=window))
        assert_allclose(group["max_rotation"][0, 0], length * inputs.frequencies, rtol=1e-6)
    repo = measured(replace(inputs, scheme="repo", learned=True), training_length=1000)
    reach = [np.ptp(inputs.positions[p][:, inputs.valid[p]].numpy(), axis=1) for p in range(2)]
    expected = np.max(reach, 0)[:, None] * inputs.frequencies.numpy()
    assert_allclose(repo["max_rotation"][0], expected, atol=1e-12)


def test_a_large_stable_slow_component_is_found_and_alone():
    group = measured(planted())
    expected = np.zeros((1, 4, 4))
    expected[..., 3] = 1
    assert_allclose(group["slow_dominating"], expected)
    assert_allclose(group["start_angle"][..., 3], 0.7, atol=0.2)
    assert group["closed_form_r"].min() > 0.9


@pytest.mark.parametrize(
    ("change", "threshold", "generous"),
    [
        ({"size": 1.5, "deviation": 0.05}, "prominence", 0.1),
        ({"deviation": 1.0}, "stability", 10.0),
        ({"frequency": 0.5}, "slow", 100.0),
        ({"frequency": 0.1, "angle": 3.0}, "still", 10.0),
    ],
)
def test_each_condition_can_fail_and_each_threshold_lets_it_pass(change, threshold, generous):
    inputs = planted(**change)
    assert not dominates(inputs) and dominates(inputs, **{threshold: generous})


def test_turning_far_matters_near_pi_only():
    near_pi, elsewhere = (planted(angle=angle, frequency=0.1) for angle in (3.0, 1.5))
    assert not dominates(near_pi)
    assert dominates(elsewhere) and dominates(near_pi, near_pi=0.0)


def test_what_rotation_lengthens_is_more_prominent_and_what_does_not_turn_is_not_lengthened():
    for scaling, found in ((20.0, True), (torch.tensor([20.0, 20.0, 20.0, 1.0]), False)):
        assert dominates(replace(planted(), attention_scaling=scaling)) == found


def closed_form(inputs, chosen, semantic):
    """Correlation with f + g, every pair written out."""
    query, key = (pairs_of(part, inputs.heads) for part in (inputs.queries, inputs.keys))
    logits, seen = maps(inputs)
    correlation = np.full(chosen.shape[:2], np.nan)
    for prompt, head in np.ndindex(*correlation.shape):
        some, mask = chosen[prompt, head], seen[prompt]
        if not some.any():
            continue
        mean = key[prompt, head][inputs.valid[prompt]].mean(0)[some]
        rest = key[prompt, head][:, some] - mean
        if semantic == "printed":
            rest = rest.abs() * mean / mean.abs()
        positions = inputs.head_positions[prompt, head].double()
        angle = (positions[:, None] - positions)[..., None] * inputs.frequencies.double()[some]
        lengthened = torch.as_tensor(inputs.attention_scaling).double().expand(len(some))[some] ** 2
        turned = torch.polar(torch.ones_like(angle), angle)
        q = query[prompt, head][:, None, some] * lengthened
        approximate = (q * (mean.conj() * turned + rest.conj())).sum(-1).real
        correlation[prompt, head] = np.corrcoef(logits[prompt, head][mask], approximate[mask])[0, 1]
    return correlation


@pytest.mark.parametrize("window", [None, 150, 9])
@pytest.mark.parametrize("kind", ["plain", "holes", "softcap", "bias", "many chunks"])
def test_closed_form_written_out(kind, window):
    shape = {"plain": {"kv_heads": 4}, "many chunks": {"tokens": 300, "heads": 2}}.get(kind, {})
    inputs = random_inputs(window=window, **{"kv_heads": 2} | shape)
    scaling = torch.linspace(1.3, 1.0, 4, dtype=torch.float64)
    inputs = replace(of_kind(inputs, kind), attention_scaling=1.3 if kind == "plain" else scaling)
    chosen = torch.rand(2, inputs.heads, 4) < 0.5
    chosen[0, 0], chosen[1, 0] = False, True
    mean = pair_statistics(inputs).keys[1:3]
    for semantic in ("signed", "printed"):
        (found,) = reduced(inputs, [ClosedForm(chosen, mean, semantic)])
        assert_allclose(found, closed_form(inputs, chosen, semantic), atol=1e-10)
        assert torch.isnan(found[0, 0])


@pytest.mark.parametrize("mean", [1, 70])
def test_float32_keeps_its_digits(mean):
    inputs = random_inputs(prompts=1, tokens=300, d_head=16)
    level = mean * torch.randn(1, 1, 1, 16, dtype=torch.float64)
    inputs = replace(inputs, keys=inputs.keys + level)
    found = [measured(some, **LOOSE)["closed_form_r"] for some in rounded(inputs)]
    assert_allclose(*found, atol=2e-6)


def test_a_layer_that_rotates_nothing_has_no_pairs():
    inputs = random_inputs(scheme="nope")
    group = measured(inputs, training_length=None)
    assert (group["slow_dominating"] == -1).all()
    assert group.drop_vars("slow_dominating").isnull().all().to_array().all()
    chosen = torch.ones(2, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="rotates nothing"):
        reduced(inputs, [ClosedForm(chosen, pair_statistics(inputs).keys[1:3], "signed")])


def test_without_a_training_length_nothing_is_measured():
    with refused("give training_length in tokens"):
        measured(random_inputs(scheme="rope"), training_length=None)


def test_where_no_head_has_components_and_logits_are_no_dot_product_there_is_no_correlation():
    """Rows are written out there, of no head at all."""
    group = measured(replace(random_inputs(), softcap=1.0), prominence=1e9)
    assert np.isnan(group["closed_form_r"]).all()
