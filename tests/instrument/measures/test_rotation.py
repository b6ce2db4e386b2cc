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

from repo_interp.measures.kernels.closed_form import ClosedForm
from repo_interp.measures.kernels.heads import reduced
from repo_interp.measures.rotation import Rotation, pair_statistics
from repo_interp.measures.statistics import merge

LOOSE = {"prominence": 0.0, "stability": 100.0, "slow": 1e9, "still": 1e9}


def measured(inputs, **parameters):
    measure = Rotation(**{"training_length": 24} | parameters)
    return measure.conclude(merge([measure.observe(inputs, {})]))


def pairs_of(features, heads):
    """Complex pairs [prompt, head, token, component]."""
    first, second = features.double().chunk(2, -1)
    return torch.complex(first, second).repeat_interleave(heads // features.shape[1], 1)


def planted(
    scheme="rope", angle=0.7, deviation=0.1, size=20.0, component=3, frequency=0.005, tokens=24
):
    """A layer one of whose components is large and almost the same for every key."""
    inputs = random_inputs(scheme=scheme, tokens=tokens)
    half = inputs.queries.shape[-1] // 2
    queries, keys = inputs.queries.clone(), inputs.keys.clone()
    for features, direction in ((queries, angle), (keys, 0.0)):
        features[..., component] = size * (
            math.cos(direction) + deviation * features[..., component]
        )
        features[..., component + half] = size * (
            math.sin(direction) + deviation * features[..., component + half]
        )
    frequencies = inputs.frequencies.clone()
    frequencies[component] = frequency
    positions = (
        torch.arange(tokens, dtype=torch.float64).expand(2, 1, -1)
        if scheme == "rope"
        else inputs.positions
    )
    return replace(inputs, queries=queries, keys=keys, positions=positions, frequencies=frequencies)


@pytest.mark.parametrize("shape", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@devices
def test_pair_statistics_written_out(shape, device):
    inputs = with_holes(random_inputs(heads=shape[0], kv_heads=shape[1]))
    group = measured(on(inputs, device))
    for head in range(shape[0]):
        for side, features in (("query", inputs.queries), ("key", inputs.keys)):
            by_prompt = [
                pairs_of(features, shape[0])[p, head][inputs.valid[p]].numpy() for p in range(2)
            ]
            every = np.concatenate(by_prompt)
            deviations = np.concatenate([np.abs(pairs - pairs.mean(0)) for pairs in by_prompt])
            assert_allclose(group[f"{side}_norm"][0, head], np.abs(every).mean(0), atol=1e-12)
            assert_allclose(group[f"{side}_mean_re"][0, head], every.mean(0).real, atol=1e-12)
            assert_allclose(group[f"{side}_mean_im"][0, head], every.mean(0).imag, atol=1e-12)
            assert_allclose(group[f"{side}_deviation"][0, head], deviations.mean(0), atol=1e-12)
            numbers = features.repeat_interleave(shape[0] // features.shape[1], 1)[:, head]
            sizes = np.abs(numbers.numpy()[inputs.valid.numpy()]).mean(0)
            assert_allclose(group[f"{side}_dimension_norm"][0, head], sizes, atol=1e-12)
    query = group["query_mean_re"] + 1j * group["query_mean_im"]
    key = group["key_mean_re"] + 1j * group["key_mean_im"]
    assert_allclose(group["start_angle"], np.angle((query / key).values), atol=1e-12)


def test_rotation_is_by_the_training_length_or_by_the_positions_that_are_there():
    inputs = with_holes(random_inputs(scheme="rope"))
    rope = measured(inputs, training_length=1000)
    assert_allclose(rope["max_rotation"][0], np.tile(1000 * inputs.frequencies.numpy(), (4, 1)))
    repo = measured(replace(inputs, scheme="repo", learned=True), training_length=1000)
    reach = [
        [np.ptp(inputs.positions[p, head][inputs.valid[p]].numpy()) for head in range(4)]
        for p in range(2)
    ]
    assert_allclose(
        repo["max_rotation"][0], np.max(reach, 0)[:, None] * inputs.frequencies.numpy(), atol=1e-12
    )


def test_a_layer_with_a_window_turns_as_far_as_its_window_reaches():
    inputs = planted(frequency=0.3)
    for window, length in ((None, 24), (9, 9), (30, 24)):
        group = measured(replace(inputs, window=window))
        assert_allclose(group["max_rotation"][0, 0], length * inputs.frequencies, rtol=1e-6)
    assert not measured(inputs)["slow_dominating"][..., 3].any(), "7.2 rad"
    assert (measured(replace(inputs, window=9))["slow_dominating"][..., 3] == 1).all(), "2.7 rad"


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
    strict = measured(inputs)["slow_dominating"].isel(component=3)
    assert (strict == 0).all()
    assert (
        measured(inputs, **{threshold: generous})["slow_dominating"].isel(component=3) == 1
    ).all()


def test_turning_far_matters_near_pi_only():
    far = {"frequency": 0.1}
    near_pi, elsewhere = planted(angle=3.0, **far), planted(angle=1.5, **far)
    assert measured(near_pi)["slow_dominating"].sum() == 0
    assert measured(elsewhere)["slow_dominating"].isel(component=3).min() == 1
    assert measured(near_pi, near_pi=0.0)["slow_dominating"].isel(component=3).min() == 1


def test_what_rotation_lengthens_is_more_prominent_and_what_does_not_turn_is_not_lengthened():
    inputs = planted()
    for scaling, found in ((20.0, 1), (torch.tensor([20.0, 20.0, 20.0, 1.0]), 0)):
        group = measured(replace(inputs, attention_scaling=scaling))
        assert (group["slow_dominating"].isel(component=3) == found).all()


def test_learned_positions_that_barely_move_make_a_fast_component_slow():
    moving = planted(scheme="repo", frequency=1.0)
    still = replace(moving, positions=0.01 * moving.positions)
    assert measured(moving)["slow_dominating"].isel(component=3).max() == 0
    assert measured(still)["slow_dominating"].isel(component=3).min() == 1


def closed_form(inputs, chosen, semantic):
    """Correlation with f + g, every pair written out."""
    query, key = pairs_of(inputs.queries, inputs.heads), pairs_of(inputs.keys, inputs.heads)
    rows = torch.arange(inputs.valid.shape[1])
    logits, seen = inputs.logits(rows).double(), inputs.visible(rows)
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


@pytest.mark.parametrize("semantic", ["signed", "printed"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", ["plain", "gqa", "padding", "softcap", "bias", "many chunks"])
def test_closed_form_written_out(kind, window, semantic):
    inputs = random_inputs(window=window, kv_heads=2 if kind == "gqa" else 4)
    if kind == "many chunks":
        inputs = random_inputs(
            window=None if window is None else 150, tokens=300, heads=2, kv_heads=2
        )
    inputs = with_holes(inputs) if kind == "padding" else inputs
    added = torch.randn(1, 4, 24, 24, dtype=torch.float64)
    inputs = replace(
        inputs,
        attention_scaling=1.3
        if kind == "plain"
        else torch.linspace(1.3, 1.0, 4, dtype=torch.float64),
        softcap=1.5 if kind == "softcap" else None,
        position_logits=(lambda rows: added[:, :, rows]) if kind == "bias" else None,
    )
    chosen = torch.rand(2, inputs.heads, 4) < 0.5
    chosen[0, 0] = False
    mean = pair_statistics(inputs).keys[1:3]
    (found,) = reduced(inputs, [ClosedForm(chosen, mean, semantic)])
    assert_allclose(found, closed_form(inputs, chosen, semantic), atol=1e-10)
    assert torch.isnan(found[0, 0]) and not torch.isnan(found[1]).all()


@pytest.mark.parametrize("mean", [1, 70])
def test_float32_keeps_its_digits(mean):
    inputs = random_inputs(prompts=1, tokens=300, d_head=16)
    level = mean * torch.randn(1, 1, 1, 16, dtype=torch.float64)
    rounded = replace(inputs, queries=inputs.queries.float(), keys=(inputs.keys + level).float())
    rounded = replace(
        rounded, positions=inputs.positions.float(), frequencies=inputs.frequencies.float()
    )
    exact = {
        name: getattr(rounded, name).double()
        for name in ("queries", "keys", "positions", "frequencies")
    }
    found, expected = (
        measured(some, **LOOSE)["closed_form_r"] for some in (rounded, replace(rounded, **exact))
    )
    assert_allclose(found, expected, atol=2e-6)


def test_a_layer_that_rotates_nothing_has_no_pairs():
    group = measured(random_inputs(scheme="nope"), training_length=None)
    assert (group["slow_dominating"] == -1).all()
    for name, values in group.data_vars.items():
        assert name == "slow_dominating" or values.isnull().all()
    inputs = random_inputs(scheme="nope")
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
