"""The measure `three_axis`: closed forms and invariants, the dense solve as reference, the authors' arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import OFFICIAL, official_inputs, random_inputs
from causal_reference import seen
from numpy.testing import assert_allclose
from three_axis_reference import dense_fit, design, ridge_solve

from repo_interp.errors import InputError
from repo_interp.inputs import select_prompts
from repo_interp.measures.kernels.logit_sums import attention_sums, logit_sums
from repo_interp.measures.statistics import merge
from repo_interp.measures.three_axis import ThreeAxis

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")
ARRAYS = {
    "repo_mha": ("repo_mha", "expected"),
    "repo_scaled": ("repo_scaled", "expected"),
    "repo_scaled_yarn4": ("repo_scaled", "expected_yarn4"),
    "multihead_continuous": ("multihead_continuous", "expected"),
    "rope_none": ("rope_none", "expected"),
    "nope": ("nope", "expected"),
}
AXES = ("distance_axis", "query_axis", "key_axis")
precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)


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
    return np.array([[dense_fit(head, mask)[2] for head in prompt] for prompt, mask in zip(weights, pairs, strict=True)])


def layers(name, dtype):
    directory, variant = ARRAYS[name]
    count = len(np.load(OFFICIAL / directory / f"{variant}.npz")["q_prerot"])
    for layer in range(count):
        inputs = official_inputs(directory, layer, variant, dtype)
        is_nope = name == "nope" and layer >= 2
        yield replace(inputs, scheme="nope", positions=None, frequencies=None) if is_nope else inputs


def additive_layer(n=60, seed=0):
    """A layer whose logits are a function of the distance, plus one of the query, plus one of the key."""
    inputs = random_inputs(prompts=1, heads=3, kv_heads=3, tokens=n, d_head=8, seed=seed)
    queries, keys = inputs.queries.clone(), inputs.keys.clone()
    for constant in (0, 4, 1, 5):
        queries[..., constant] = queries[:, :, :1, constant]
        keys[..., constant] = keys[:, :, :1, constant]
    queries[..., 2], keys[..., 3] = 1, 1
    queries[..., [6, 7]], keys[..., [6, 7]] = 0, 0
    frequencies = torch.tensor([0.3, 0.05, 0.0, 0.0], dtype=torch.float64)
    positions = torch.arange(n, dtype=torch.float64).expand(1, 1, n)
    return replace(inputs, scheme="rope", queries=queries, keys=keys, positions=positions, frequencies=frequencies)


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


def test_scale_of_the_logits_scales_the_axes_and_leaves_r():
    inputs = random_inputs()
    louder = replace(inputs, logit_scale=-3 * inputs.logit_scale)
    once, thrice = measured(inputs, axes="first_prompt"), measured(louder, axes="first_prompt")
    assert_allclose(thrice["r"], once["r"], atol=1e-12)
    for name in AXES:
        assert_allclose(thrice[name], -3 * once[name], atol=1e-11)


def test_random_logits_of_a_long_prompt_have_little_of_three_axes():
    assert r_of(random_inputs(prompts=1, tokens=600, scheme="nope", d_head=32)).max() < 0.2


@pytest.mark.parametrize("n", [2, 3, 16, 128])
@devices
def test_coefficients_fitted_values_and_r_of_the_dense_solve(n, device):
    inputs = random_inputs(prompts=1, heads=2, kv_heads=2, tokens=n, d_head=4)
    weights, pairs = maps(inputs)
    moved = {
        name: getattr(inputs, name).to(device) for name in ("queries", "keys", "positions", "frequencies", "valid", "prompts")
    }
    group = measured(replace(inputs, **moved), axes="first_prompt")
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
        assert np.abs(group[name] - reference[name]).max() < 1e-5 * float(reference[name].std()), name


def test_grouped_queries_are_expanded_keys():
    inputs = random_inputs(heads=6, kv_heads=2, position_rows=2)
    expanded = replace(inputs, keys=inputs.keys.repeat_interleave(3, 1), positions=inputs.positions.repeat_interleave(3, 1))
    own_positions = replace(inputs, positions=expanded.positions)
    extras = ("attention", "position", "shuffled", "held_out")
    wanted = measured(expanded, extras=extras, axes="first_prompt")
    for other in (inputs, own_positions):
        group = measured(other, extras=extras, axes="first_prompt")
        for name in wanted:
            assert_allclose(group[name], wanted[name], atol=1e-9, err_msg=name)


def softened(inputs, softcap=None, bias=False):
    added = torch.randn(2, 4, 24, 24, dtype=torch.float64)
    return replace(inputs, softcap=softcap, position_logits=(lambda rows: added[:, :, rows]) if bias else None)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("kind", ["plain", "holes", "softcap", "bias"])
def test_any_layer_is_what_the_dense_solve_says(kind, window):
    inputs = random_inputs(window=window)
    if kind == "holes":
        inputs = replace(inputs, valid=torch.rand(2, 24) < 0.8)
    inputs = softened(inputs, softcap=1.5 if kind == "softcap" else None, bias=kind == "bias")
    weights, pairs = maps(inputs)
    assert_allclose(pairs, seen(inputs.valid, window))
    assert_allclose(r_of(inputs), dense_r(weights, pairs), atol=1e-9)
    attention = torch.softmax(torch.as_tensor(weights), -1).nan_to_num().numpy()
    found = r_of(inputs, "r_attention", extras=("attention",))
    assert_allclose(found, dense_r(attention, pairs), atol=1e-9)


def test_both_ways_to_the_sums_agree():
    inputs = random_inputs(tokens=200, heads=4, kv_heads=2)
    nothing_added = replace(inputs, position_logits=lambda rows: torch.zeros(1, 1, len(rows), 200))
    rows = torch.rand(2, 200) < 0.5
    for some in (None, rows):
        implicit, written_out = logit_sums(inputs, some), logit_sums(nothing_added, some)
        assert_allclose(implicit.square, written_out.square)
        for ours, theirs in zip(implicit.lines, written_out.lines, strict=True):
            assert_allclose(ours, theirs, atol=1e-10)


def test_attention_sums_of_rows_are_one():
    lines = attention_sums(random_inputs(dtype=torch.float32)).lines
    assert_allclose(lines.query, 1, atol=1e-6)
    assert_allclose(lines.distance.sum(-1), 24, atol=1e-5)


def test_half_precision_inputs_are_accumulated_in_more():
    inputs = random_inputs(tokens=100)
    halves = replace(
        inputs, queries=inputs.queries.bfloat16(), keys=inputs.keys.bfloat16(), scheme="nope", positions=None, frequencies=None
    )
    exact = replace(halves, queries=halves.queries.double(), keys=halves.keys.double())
    for name in ("r", "r_attention"):
        assert_allclose(r_of(halves, name, extras=("attention",)), r_of(exact, name, extras=("attention",)), atol=1e-6)


def test_logits_that_do_not_vary_have_no_correlation():
    inputs = random_inputs()
    assert np.isnan(r_of(replace(inputs, queries=0 * inputs.queries))).all()
    one_token = replace(inputs, valid=torch.arange(24).expand(2, -1) == 3)
    assert np.isnan(r_of(one_token)).all()


def test_the_first_prompt_has_its_own_length_whatever_the_batch():
    inputs = random_inputs()
    valid = torch.arange(24) < torch.tensor([[10], [24]])
    group = measured(replace(inputs, valid=valid), axes="first_prompt")
    assert {axis: group.sizes[axis] for axis in ("distance", "token")} == {"distance": 10, "token": 10}
    alone = measured(select_prompts(replace(inputs, valid=valid), slice(0, 1)), axes="first_prompt")
    for name in AXES:
        assert_allclose(group[name], alone[name], atol=1e-11)


def test_names_dimensions_units_and_parameters():
    measure = ThreeAxis(axes="first_prompt", extras=("attention", "position", "shuffled", "held_out"))
    group = measure.conclude(measure.observe(random_inputs(layer=3), {}))
    per_prompt = ("prompt", "layer", "head")
    assert {name: array.dims for name, array in group.data_vars.items()} == {
        "r": per_prompt,
        "r_attention": per_prompt,
        "r_position": per_prompt,
        "r_shuffled": per_prompt,
        "r2_held_out": per_prompt,
        "distance_axis": ("layer", "head", "distance"),
        "query_axis": ("layer", "head", "token"),
        "key_axis": ("layer", "head", "token"),
    }
    assert all(array.attrs["long_name"] and array.attrs["units"] for array in group.data_vars.values())
    assert group["layer"].values.tolist() == [3]
    assert measure.name == "three_axis"
    assert measure.parameters["ridge"] == 1e-6
    assert set(measured(random_inputs()).data_vars) == {"r"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"axes": "all"}, "axes is 'all'; wanted one of none, first_prompt"),
        ({"extras": ("attentions",)}, "extras is .*'attentions'.*; wanted some of"),
        ({"ridge": 0.0}, "ridge is 0.0; wanted a number above 0"),
        ({"position_width": -1.0}, "position_width is -1.0; wanted a number above 0"),
        ({"held_out_share": 1.0}, "is 1.0; wanted a number above 0 and below 1"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(InputError, match=message):
        ThreeAxis(**parameters)


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the size of the largest tensor made while it is on."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out._base is None:
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_nothing_of_the_size_of_a_map_is_made():
    n = 2048
    inputs = random_inputs(prompts=1, heads=1, kv_heads=1, tokens=n, d_head=4, dtype=torch.float32)
    with _LargestTensor() as made:
        measured(inputs, extras=("attention", "position", "shuffled", "held_out"), axes="first_prompt")
    assert n < made.largest < n * n / 3


@precisions
@pytest.mark.parametrize("name", ARRAYS)
def test_the_authors_layers(name, dtype):
    measure = ThreeAxis(extras=("attention",), axes="first_prompt")
    group = measure.conclude(merge([measure.observe(inputs, {}) for inputs in layers(name, dtype)]))
    for ours, theirs in (("r", "ridge_r_logits"), ("r_attention", "ridge_r_attention")):
        expected = ANALYSIS[f"{name}/{theirs}"]
        found = group[ours].transpose("layer", "prompt", "head").values
        known = ~np.isnan(expected)
        assert known.sum() >= 16
        assert_allclose(found[known], expected[known], atol=1e-6, err_msg=ours)
    if name == "repo_mha":
        for ours, expected in zip(AXES, ANALYSIS["repo_mha/ridge_abc_seq0"], strict=True):
            assert np.abs(group[ours].values - expected).max() < 1e-4 * expected.std(), ours


@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize("window", [None, 9])
def test_tensors_are_made_where_the_inputs_are(window, softcap):
    """What is made without saying where lands on the default device: here one that holds no data."""
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, 7] = False
    inputs = replace(random_inputs(window=window, valid=valid), softcap=softcap)
    measure = ThreeAxis(axes="first_prompt", extras=("attention", "position", "shuffled", "held_out"))
    with torch.device("meta"):
        elsewhere = measure.observe(inputs, {})
    xr.testing.assert_allclose(measure.conclude(elsewhere), measure.conclude(measure.observe(inputs, {})))
