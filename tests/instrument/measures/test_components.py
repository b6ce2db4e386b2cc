"""The measure `components`: what must hold of it, and the slow way on whole layers."""

import cmath
from dataclasses import replace

import pytest
import torch
from attention_inputs import random_inputs
from causal_reference import component_maps, diagonal_sums, seen
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused

from repo_interp.inputs import select_prompts
from repo_interp.measures.components import Components
from repo_interp.measures.kernels.rotary_components import BANDS, frequency_bands
from repo_interp.measures.statistics import merge

MEASURE = Components(training_length=16)
BY_PROMPT = ("vaf", "vaf_printed", "vaf_curve", "vaf_curve_printed", "vaf_band", "position_reach")


def measured(*observed, measure=MEASURE):
    return measure.conclude(merge([measure.observe(inputs, {}) for inputs in observed]))


def padded():
    valid = torch.ones(3, 30, dtype=torch.bool)
    valid[0, 22:] = False
    valid[1, :5] = False
    return valid


def accounted(whole, parts):
    return 100 * (1 - (whole - parts).var(-1, correction=0) / whole.var(-1, correction=0))


@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (2, 20), (2, 9)])
def test_group_against_whole_maps(kv_heads, window):
    """With a term that the scheme adds: it is in the logits by distance and in no component."""

    def slopes(rows):
        distance = (rows[:, None] - torch.arange(30)).clamp(min=0)
        return -torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None, None] * distance.expand(3, 4, -1, -1)

    inputs = random_inputs(3, kv_heads=kv_heads, tokens=30, valid=padded(), window=window)
    inputs = replace(
        inputs,
        attention_scaling=1.2,
        softcap=1.0,
        position_logits=slopes,
        # some heads turn the third by less than .1 rad
        frequencies=torch.tensor([1.0, 0.3, 0.0025, 0.0], dtype=torch.float64),
    )
    group, length = measured(inputs), min(window or 16, 16)
    bands = frequency_bands(inputs.frequencies, length)
    assert group["band_length"].item() == length
    assert_array_equal(group["activated"][0], bands[0])
    assert_array_equal(group["low_frequency"][0], bands[1])
    mask = seen(inputs.valid, window)[:, None, None]
    maps = component_maps(inputs.rotated_queries, inputs.rotated_keys).masked_fill(~mask, 0)
    pairs = diagonal_sums(mask[:, 0, 0].double()).sum(0)
    assert_allclose(group["distance_pairs"], pairs)
    # 0 / 0 is NaN where no pair is seen
    curves = diagonal_sums(maps).sum(0) / pairs
    added = slopes(torch.arange(30))[0].double() / inputs.logit_scale
    added = diagonal_sums(added) / diagonal_sums(torch.ones(30, 30)) + 0 * curves[:, 0]
    assert_allclose(group["component_by_distance"][0], curves.mean(0), atol=1e-12)
    assert_allclose(group["position_logit_by_distance"][0], added, atol=1e-12)
    assert_allclose(group["logit_by_distance"][0], curves.sum(1) + added, atol=1e-12)
    turns = inputs.head_positions.nan_to_num()
    turns = (turns[..., None] - turns[..., None, :]).abs() * mask[:, 0]
    mean = turns.sum((0, 2, 3)) / pairs.sum()
    assert_allclose(group["turn_mean"][0], mean[:, None] * inputs.frequencies)
    reach = turns.amax((2, 3))
    still = (reach[..., None] * inputs.frequencies <= 0.1).double().mean(-1)
    assert_allclose(group["position_reach"][:, 0], reach, rtol=1e-6)
    assert_allclose(group["still_share"][:, 0], still)
    assert still.unique().tolist() == [0.25, 0.5]
    bands = bands.double()
    for prompt in range(3):
        values = maps[prompt].flatten(-2)[..., mask[prompt, 0, 0].flatten()]
        logits = values.sum(1, keepdim=True)
        explained = {"vaf": values, "vaf_band": bands @ values}
        for name, parts in explained.items():
            found = group[name][prompt, 0]
            assert_allclose(found, accounted(logits, parts), rtol=1e-5, atol=1e-4)
        printed = 100 * values.sum(-1) / logits.sum(-1)
        assert_allclose(group["vaf_printed"][prompt, 0], printed, rtol=1e-4, atol=1e-3)
        own = diagonal_sums(mask[prompt, 0, 0].double())
        curve = diagonal_sums(maps[prompt])[..., own > 0] / own[own > 0]
        whole = curve.sum(1, keepdim=True)
        assert_allclose(
            group["vaf_curve"][prompt, 0], accounted(whole, curve), rtol=1e-5, atol=1e-4
        )
        printed = 100 * curve.sum(-1) / whole.sum(-1)
        assert_allclose(group["vaf_curve_printed"][prompt, 0], printed, rtol=1e-4, atol=1e-3)


def test_leaving_out_the_first_tokens_is_as_if_they_were_not_there():
    inputs = random_inputs(3, tokens=30, valid=padded())
    measure = Components(training_length=16, first_token=2, last_token=15)
    group = measured(inputs, measure=measure)
    for prompt, first in enumerate((0, 5, 0)):
        kept = slice(first + 2, first + 15)
        alone = replace(
            select_prompts(inputs, slice(prompt, prompt + 1)),
            queries=inputs.queries[prompt : prompt + 1, :, kept],
            keys=inputs.keys[prompt : prompt + 1, :, kept],
            positions=inputs.positions[prompt : prompt + 1, :, kept],
            valid=torch.ones(1, 13, dtype=torch.bool),
        )
        expected = measured(alone)
        for name in BY_PROMPT:
            assert_allclose(group[name][prompt], expected[name][0], rtol=1e-4, atol=1e-4)


def test_mean_over_prompts_is_the_mean_of_each_in_any_order_and_needs_no_axis_prompt():
    inputs = random_inputs(5)
    each = measured(inputs)
    of_mean = Components(training_length=16, prompts="mean", curves="head")
    mean = measured(
        *(select_prompts(inputs, slice(n, n + 1)) for n in (2, 0, 4, 3, 1)), measure=of_mean
    )
    assert "head_component_by_distance" not in each
    assert "prompt" not in mean.dims
    for name in (*BY_PROMPT, "still_share"):
        assert_allclose(mean[f"{name}_mean"], each[name].mean("prompt"), rtol=1e-4, atol=1e-4)
        assert_allclose(mean[f"{name}_deviation"], each[name].std("prompt"), rtol=1e-3, atol=1e-3)


def test_layers_without_rotation_have_components_and_no_frequency_bands_or_turns():
    group = measured(random_inputs(scheme="nope"))
    for name in (
        "frequency",
        "vaf_band",
        "turn_share",
        "turn_mean",
        "position_reach",
        "decay_bound",
    ):
        assert group[name].isnull().all(), name
    assert not group["activated"].any() and not group["low_frequency"].any()
    assert group["vaf"].notnull().all() and group["logit_by_distance"].notnull().all()
    assert (group["position_logit_by_distance"] == 0).all()


def test_bands_part_the_components_at_pi_and_two_pi_over_the_training_length():
    frequencies = (
        torch.tensor([1.0, 2.1, 2.0, 1.5, 1.01, 0.3, 0.0], dtype=torch.float64) * torch.pi / 512
    )
    assert BANDS == ("activated", "low", "high")
    assert frequency_bands(frequencies, 512).long().tolist() == [
        [0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1],
        [0, 1, 1, 0, 0, 0, 0],
    ]


def test_without_a_training_length_nothing_is_measured():
    with refused("training_length"):
        Components().observe(random_inputs(), {})


def test_the_bound_of_long_term_decay_is_su_and_others_and_stays_up_without_rotation():
    inputs = random_inputs(1, 2, 2, tokens=12, d_head=6, position_rows=1, scheme="rope")
    still = torch.tensor([0.9, 0.0, 0.0], dtype=torch.float64)
    for frequencies in (inputs.frequencies, still, torch.zeros(3, dtype=torch.float64)):
        bound = measured(replace(inputs, frequencies=frequencies))["decay_bound"].isel(layer=0)
        theta = frequencies.tolist()
        slow = [
            sum(abs(sum(cmath.exp(1j * t * d) for t in theta[:i])) for i in (1, 2, 3)) / 3
            for d in range(12)
        ]
        assert_allclose(bound.values, slow)
    assert_allclose(bound.values, 2.0)  # (1 + 2 + 3) / 3 at every distance
