"""The measure `components` against float64 analyses of the original code's own queries, keys and positions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import OFFICIAL, official_inputs
from numpy.testing import assert_allclose

from repo_interp.inputs import select_prompts
from repo_interp.measures.components import Components
from repo_interp.measures.kernels.rotary_components import pair_components
from repo_interp.measures.statistics import merge

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")
ARRAYS = {
    "repo_mha": ("repo_mha", "expected"),
    "repo_scaled": ("repo_scaled", "expected"),
    "repo_scaled_yarn4": ("repo_scaled", "expected_yarn4"),
    "multihead_continuous": ("multihead_continuous", "expected"),
    "rope_none": ("rope_none", "expected"),
    "nope": ("nope", "expected"),
}
VAFS = {
    "vaf": "vaf_pairs_var",
    "vaf_printed": "vaf_pairs_literal",
    "vaf_curve": "vaf_curve_var",
    "vaf_curve_printed": "vaf_curve_literal",
}
both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def layers(name, dtype):
    directory, variant = ARRAYS[name]
    modes = json.loads((OFFICIAL / "metas.json").read_text())[f"{directory}/{variant}"]["layer_modes"]
    for layer, mode in enumerate(modes):
        inputs = official_inputs(directory, layer, variant, dtype)
        yield replace(inputs, scheme="nope", positions=None, frequencies=None) if mode == "nope" else inputs


@both_precisions
@pytest.mark.parametrize("name", ARRAYS)
def test_all_four_vafs(name, dtype):
    measure = Components(training_length=64)
    group = measure.conclude(merge([measure.observe(inputs, {}) for inputs in layers(name, dtype)]))
    for ours, theirs in VAFS.items():
        expected = ANALYSIS[f"{name}/{theirs}"]
        found = group[ours].transpose("layer", "prompt", "head", "component").values
        assert found.shape == expected.shape
        error = np.abs(found - expected) / (1 + np.abs(expected))
        assert np.median(error) < 1e-4, ours
        assert np.quantile(error, 0.99) < 1e-2, ours


@both_precisions
def test_curves_of_every_component_and_of_the_logits(dtype):
    expected = ANALYSIS["repo_mha/component_curves_seq0"]
    measure = Components(training_length=64, curves="head")
    observed = [measure.observe(select_prompts(inputs, slice(0, 1)), {}) for inputs in layers("repo_mha", dtype)]
    group = measure.conclude(merge(observed))
    curves = group["head_component_by_distance"].transpose("layer", "head", "component", "distance")
    assert_allclose(curves, expected[:, :, :-1], atol=1e-4)
    assert_allclose(group["logit_by_distance"], expected[:, :, -1], atol=1e-4)


def test_components_of_single_pairs():
    expected = ANALYSIS["repo_mha/components_layer2_seq0_head0_first24"]
    inputs = official_inputs("repo_mha", 2)
    for query, key in ((0, 0), (7, 3), (23, 0), (23, 23)):
        assert_allclose(pair_components(inputs, query, key)[0, 0], expected[:, query, key], atol=1e-9)
