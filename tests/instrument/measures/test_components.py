"""The measure `components`: what must hold of it, and the slow way on whole layers."""

import cmath
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import random_inputs
from causal_reference import component_maps, diagonal_sums, seen
from numpy.testing import assert_allclose
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


@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (2, None), (2, 9)])
def test_group_against_whole_maps(kv_heads, window):
    inputs = random_inputs(3, kv_heads=kv_heads, tokens=30, valid=padded(), window=window)
    inputs = replace(inputs, attention_scaling=1.2)
    group, bands = measured(inputs), frequency_bands(inputs.frequencies, window or 16).double()
    mask = seen(inputs.valid, window)[:, None, None]
    maps = component_maps(inputs.rotated_queries, inputs.rotated_keys).masked_fill(~mask, 0)
    pairs = diagonal_sums(mask[:, 0, 0].double()).sum(0)
    assert_allclose(group["distance_pairs"], pairs)
    there = (pairs > 0).numpy()
    curves = (diagonal_sums(maps).sum(0) / pairs).numpy()[..., there]
    assert_allclose(group["component_by_distance"][0, :, there], curves.mean(0), atol=1e-12)
    assert_allclose(group["logit_by_distance"][0, :, there], curves.sum(1), atol=1e-12)
    assert group["logit_by_distance"][0, :, ~there].isnull().all()
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


def test_one_angle_and_no_logit_scale_in_closed_form():
    ones = torch.zeros(1, 1, 12, 4, dtype=torch.float64)
    ones[..., 0] = 2.0
    inputs = replace(
        random_inputs(1, 1, 1, tokens=12, d_head=4),
        queries=ones,
        keys=ones,
        frequencies=torch.tensor([0.3, 0.0], dtype=torch.float64),
        positions=torch.arange(12.0, dtype=torch.float64).expand(1, 1, -1),
        softcap=1.0,
    )
    group = measured(inputs)
    assert_allclose(
        group["component_by_distance"][0, 0], 4 * np.cos(0.3 * np.arange(12)), atol=1e-12
    )
    assert_allclose(group["vaf"][0, 0, 0], [100, 0], atol=1e-5)
    assert_allclose(group["turn_mean"][0, 0], [0.3 * (12 * 11 * 13 / 6) / 78, 0])
    assert_allclose(group["still_share"], 0.5)


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


@pytest.mark.parametrize("window", [None, 6])
def test_what_a_scheme_adds_is_in_the_logits_by_distance_and_in_no_component(window):
    def slopes(rows):
        distance = (rows[:, None] - torch.arange(30)).clamp(min=0)
        return -torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None, None] * distance.expand(3, 4, -1, -1)

    plain = random_inputs(3, scheme="nope", tokens=30, valid=padded(), window=window)
    biased = replace(plain, scheme="alibi", position_logits=slopes)
    group, without = measured(biased), measured(plain)
    mask = seen(biased.valid, window)[:, None]
    pairs = diagonal_sums(mask.double()).sum(0)
    logits = biased.logits(torch.arange(30)).masked_fill(~mask, 0) / biased.logit_scale
    expected = (diagonal_sums(logits).sum(0) / pairs).where(pairs > 0, torch.nan)
    assert_allclose(group["logit_by_distance"][0], expected, atol=1e-12)
    for name in ("vaf", "component_by_distance"):
        xr.testing.assert_identical(group[name], without[name])
    added = group["position_logit_by_distance"][0, 0, : 6 if window else 25]
    assert_allclose(added, -np.arange(len(added)) / plain.logit_scale, atol=1e-12)
    assert (without["position_logit_by_distance"].fillna(0) == 0).all()


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


def test_a_layer_with_a_window_has_the_bands_of_that_window():
    frequencies = torch.tensor([1.5, 0.7, 3.0, 5.0], dtype=torch.float64) * torch.pi / 16
    whole, windowed = (
        replace(random_inputs(window=window, layer=layer), frequencies=frequencies)
        for layer, window in ((0, None), (1, 8))
    )
    group = measured(whole, windowed)
    assert group["band_length"].values.tolist() == [16, 8]
    assert group["activated"].values.astype(int).tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert group["low_frequency"].values.astype(int).tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
    shorter = measured(windowed, measure=Components(training_length=6))
    assert shorter["band_length"].item() == 6, "a window may be the longer one"


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
