"""The authors' checkpoints, analyzed: frequency components and disentanglement fits, read back from
run.nc.

Goldens: official/expected_analysis.npz, float64 NumPy from the arrays of the original code
(official/README.md).
"""

import json

import numpy as np
import pytest
from attention_inputs import OFFICIAL
from numpy.testing import assert_allclose

import repo_interp as ri
from repo_interp.tasks import Prompt

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")
CHECKPOINTS = [
    "repo_mha",
    "repo_scaled",
    "repo_scaled_yarn4",
    "multihead_continuous",
    "rope_none",
    "nope",
]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def analyzed(request, tmp_path_factory):
    """Name and run of a checkpoint, analyzed on the authors' prompts and read back from its
    file.
    """
    name, file = request.param, tmp_path_factory.mktemp(request.param) / "run.nc"
    directory, *_ = name.partition("_yarn4")
    overrides = json.loads((OFFICIAL / "repo_scaled" / "rope_overrides.json").read_text())
    given = {} if directory == name else {"rope_scaling": overrides["yarn4"]["rope_scaling"]}
    file_of_goldens = "expected_yarn4.npz" if given else "expected.npz"
    rows = np.load(OFFICIAL / directory / file_of_goldens)["input_ids"]
    # The goldens rotate NoPE layers as if they were RoPE with the checkpoint's base; by definition
    # their r is 1.
    measures = [
        ri.measures.Positions(),
        ri.measures.Components(),
        ri.measures.ThreeAxis(axes="first_prompt", extras=("attention",)),
        ri.measures.FakeDistance(nope_base=500_000),
    ]
    bridge = ri.load(OFFICIAL / directory, **given)
    ri.write_run(ri.analyze(bridge, [Prompt(row.tolist()) for row in rows], measures), file)
    return name, ri.read_run(file)


VAFS = {
    "vaf": "pairs_var",
    "vaf_printed": "pairs_literal",
    "vaf_curve": "curve_var",
    "vaf_curve_printed": "curve_literal",
}


@pytest.mark.parametrize("variable", VAFS)
def test_variance_accounted_for(analyzed, variable):
    name, run = analyzed
    expected = ANALYSIS[f"{name}/vaf_{VAFS[variable]}"]
    rotated = [
        layer for layer, scheme in enumerate(run["components"]["scheme"].values) if scheme != "nope"
    ]
    got = (
        run["components"][variable]
        .transpose("layer", "prompt", "head", "component")
        .sel(layer=rotated)
    )
    error = np.abs(got - expected[rotated]) / (1 + np.abs(expected[rotated]))
    assert float(np.median(error)) < 1e-4
    assert float(np.quantile(error, 0.99)) < 1e-2


def assert_where_known(got, expected):
    """The goldens have the first prompt of every checkpoint, and all prompts of some; NaN
    elsewhere.
    """
    known = np.isfinite(expected)
    assert known[:, 0].all()
    assert_allclose(
        got.transpose("layer", "prompt", "head").values[known], expected[known], atol=1e-5
    )


def test_three_axis_fit(analyzed):
    name, run = analyzed
    for variable, golden in (("r", "ridge_r_logits"), ("r_attention", "ridge_r_attention")):
        assert_where_known(run["three_axis"][variable], ANALYSIS[f"{name}/{golden}"])


def test_fake_distance_fit(analyzed):
    name, run = analyzed
    assert_where_known(run["fake_distance"]["r"], ANALYSIS[f"{name}/fake_r_causal"])


@pytest.mark.parametrize("analyzed", ["repo_mha"], indirect=True)
def test_three_axis_coefficients(analyzed):
    """Coefficients are in the goldens of repo_mha alone."""
    _, run = analyzed
    expected = ANALYSIS["repo_mha/ridge_abc_seq0"]
    for row, (variable, axis) in enumerate(
        (("distance_axis", "distance"), ("query_axis", "token"), ("key_axis", "token"))
    ):
        got = run["three_axis"][variable].transpose("layer", "head", axis)
        assert np.abs(got - expected[row]).max() < 1e-3 * expected[row].std()


def test_component_curves_of_the_first_prompt():
    bridge = ri.load(OFFICIAL / "repo_mha")
    tokens = np.load(OFFICIAL / "repo_mha" / "expected.npz")["input_ids"][0]
    group = ri.analyze(bridge, tokens, [ri.measures.Components(curves="head")])["components"]
    expected = ANALYSIS["repo_mha/component_curves_seq0"]  # in float32
    order = ("layer", "head", ..., "distance")
    by_head = group["head_component_by_distance"].transpose(*order)
    whole = group["logit_by_distance"].transpose(*order)
    assert_allclose(by_head, expected[:, :, :8], atol=1e-3)
    assert_allclose(whole, expected[:, :, 8], atol=1e-3)
    assert_allclose(by_head.sum("component"), whole, atol=1e-8)
