"""The three-axis fit by learned positions, and its controls, against dense fits of whole maps."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs, with_holes
from numpy.testing import assert_allclose
from three_axis_reference import correlation, dense_fit, design, ridge_solve

from repo_interp.measures.kernels.axis_fit import additive_pairs, fit_axes, fit_correlation
from repo_interp.measures.kernels.logit_sums import logit_sums
from repo_interp.measures.kernels.position_cells import (
    binned_pairs,
    position_correlation,
    product_sums,
)
from repo_interp.measures.three_axis import (
    ThreeAxis,
    draw_rows,
    held_out_r2,
    shuffle_distances,
    without_trend,
)
from repo_interp.memory import working_memory

RIDGE = 1e-6


def by_position(inputs, width=1.0, most_cells=4096):
    return position_correlation(inputs, logit_sums(inputs), width, most_cells, RIDGE).numpy()


def maps(inputs):
    rows = torch.arange(inputs.valid.shape[1])
    return inputs.logits(rows).double().numpy(), inputs.visible(rows).numpy()


def dense_by_position(inputs, width=1.0):
    weights, pairs = maps(inputs)
    cell = np.floor(inputs.head_positions.double().nan_to_num().numpy() / width).astype(int)
    bins = cell[..., :, None] - cell[..., None, :]
    return np.array(
        [
            [dense_fit(weights[p, h], pairs[p], bins[p, h])[2] for h in range(inputs.heads)]
            for p in range(len(weights))
        ]
    )


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("width", [0.3, 1.0, 7.0])
def test_distances_by_position_are_the_dense_fit(width, window):
    inputs = with_holes(random_inputs(tokens=45, window=window))
    assert_allclose(by_position(inputs, width), dense_by_position(inputs, width), atol=1e-9)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("kind", ["softcap", "bias"])
def test_distances_by_position_where_logits_are_no_dot_product(kind, window):
    inputs = with_holes(random_inputs(tokens=40, window=window))
    added = torch.randn(2, 4, 40, 40, dtype=torch.float64)
    by_kind = {
        "softcap": {"softcap": 1.0},
        "bias": {"position_logits": lambda rows: added[:, :, rows]},
    }
    inputs = replace(inputs, **by_kind[kind])
    assert_allclose(by_position(inputs), dense_by_position(inputs), atol=1e-9)


def test_logits_that_are_a_function_of_learned_distances_are_found_by_them_only():
    inputs = random_inputs(tokens=80, prompts=1)
    first = inputs.queries[:, :, :1].expand_as(inputs.queries)
    whole_numbers = replace(inputs, queries=first, keys=first, positions=inputs.positions.round())
    assert by_position(whole_numbers).min() > 1 - 1e-9
    measure = ThreeAxis()
    assert measure.conclude(measure.observe(whole_numbers, {}))["r"].max() < 0.9


def test_float32_positions_and_features():
    inputs = random_inputs(tokens=200, dtype=torch.float32)
    exact = {
        name: getattr(inputs, name).double()
        for name in ("queries", "keys", "positions", "frequencies")
    }
    assert_allclose(by_position(inputs), by_position(replace(inputs, **exact)), atol=1e-6)


def test_too_many_cells_and_layers_that_learn_no_positions_have_no_number():
    inputs = random_inputs()
    reach = (inputs.positions.amax(-1) - inputs.positions.amin(-1)).sort(-1).values
    some = by_position(inputs, most_cells=int(reach[0, 1]) + 2)
    assert np.isnan(some).any() and not np.isnan(some).all()
    kept = ~np.isnan(some)
    assert_allclose(some[kept], by_position(inputs)[kept], atol=1e-12)
    assert np.isnan(by_position(inputs, most_cells=1)).all()
    for scheme in ("rope", "nope"):
        measure = ThreeAxis()
        other = random_inputs(scheme=scheme)
        assert measure.conclude(measure.observe(other, {}))["r_position"].isnull().all()
    with pytest.raises(ValueError, match=r"layer 0 \(nope\) has no positions"):
        by_position(random_inputs(scheme="nope"))


@pytest.mark.parametrize(
    "memory", [None, 2**14, 2**31], ids=["processor", "rows of a map", "a map"]
)
@pytest.mark.parametrize("window", [None, 40, 100])
def test_sums_over_bins_are_the_normal_matrix(window, memory):
    generator = torch.Generator().manual_seed(0)
    cell = torch.randint(0, 9, (2, 75), generator=generator)
    takes_part = torch.rand(2, 75, generator=generator) < 0.8
    pairs = binned_pairs(cell, takes_part, window, int(cell.max()) + 1)
    queries, keys = (
        torch.randn(2, 2, 75, 6, generator=generator, dtype=torch.float64) * takes_part[..., None]
    )
    with nullcontext() if memory is None else working_memory(memory):
        sums = product_sums(queries, keys, pairs, window)
    distance = np.arange(75)[:, None] - np.arange(75)
    for item in range(2):
        part = takes_part[item].numpy()
        seen = (distance >= 0) & part[:, None] & part & (distance < (window or 75))
        query, key = np.nonzero(seen)
        matrix = np.zeros((len(query), 17 + 150))
        place = np.arange(len(query))
        bins = cell[item].numpy()[query] - cell[item].numpy()[key] + pairs.cells - 1
        matrix[place, bins] = matrix[place, 17 + query] = matrix[place, 92 + key] = 1
        axes = torch.randn(2, 17 + 150, generator=generator, dtype=torch.float64)
        found = torch.cat(pairs.sums(*axes.split([17, 75, 75], -1)), -1)[item].numpy()
        assert_allclose(found, matrix.T @ matrix @ axes[item].numpy(), atol=1e-11)
        assert_allclose(torch.cat(pairs.counts, -1)[item], np.diag(matrix.T @ matrix), atol=1e-11)
        assert_allclose(matrix @ pairs.gauges()[item].numpy(), 0, atol=1e-12)
        products = (queries[item] @ keys[item].T).numpy()[query, key]
        assert_allclose(sums[item], matrix[:, :17].T @ products, atol=1e-11)


def fitted(inputs):
    sums = logit_sums(inputs)
    pairs = additive_pairs(inputs.valid[:, None], inputs.valid[:, None], inputs.window)
    return sums, pairs, fit_axes(sums.lines, inputs.valid, inputs.window, RIDGE)


@pytest.mark.parametrize("window", [None, 15])
def test_taking_the_trend_out_of_the_distance_axis_leaves_the_map(window):
    inputs = with_holes(random_inputs(tokens=40, window=window))
    _, pairs, axes = fitted(inputs)
    steady = without_trend(axes, pairs)
    for ours, theirs in zip(pairs.sums(steady), pairs.sums(axes), strict=True):
        assert_allclose(ours, theirs, atol=1e-9)
    counts = pairs.counts.distance
    assert_allclose((counts * steady.distance).sum(-1), 0, atol=1e-9)
    assert_allclose((counts * torch.arange(40) * steady.distance).sum(-1), 0, atol=1e-8)


def test_shuffled_distances_are_those_of_the_map_and_its_permuted_axis():
    inputs = random_inputs(tokens=40, prompts=1)
    sums, pairs, axes = fitted(inputs)
    shuffled = shuffle_distances(axes, pairs, seed=3)
    steady = without_trend(axes, pairs)
    assert_allclose(shuffled.distance.sort(-1).values, steady.distance.sort(-1).values)
    assert not torch.allclose(shuffled.distance, steady.distance)
    weights, seen = maps(inputs)
    found = fit_correlation(shuffled, sums.lines, sums.square, pairs)[0]
    i, j = np.nonzero(seen[0])
    a, b, c = (part[0].numpy() for part in shuffled)
    for head in range(4):
        expected = correlation(weights[0, head][seen[0]], a[head, i - j] + b[head, i] + c[head, j])
        assert_allclose(found[head], expected, atol=1e-10)


def test_shuffling_costs_a_head_of_pure_distance_everything_and_one_of_pure_trend_nothing():
    inputs = random_inputs(tokens=60, prompts=1, scheme="rope")
    first = inputs.queries[:, :, :1].expand_as(inputs.queries)
    index = torch.arange(60, dtype=torch.float64).expand(1, 1, -1)
    inputs = replace(inputs, queries=first, keys=first, positions=index)
    measure = ThreeAxis(extras=("shuffled",))
    group = measure.conclude(measure.observe(inputs, {}))
    assert group["r"].min() > 1 - 1e-9
    assert group["r_shuffled"].max() < 0.7
    trend = torch.zeros(1, 4, 60, 8, dtype=torch.float64)
    queries, keys = trend.clone(), trend.clone()
    queries[..., 0], queries[..., 1], keys[..., 0], keys[..., 1] = index, 1, 1, -index
    slope = replace(
        inputs, scheme="nope", positions=None, frequencies=None, queries=queries, keys=keys
    )
    assert measure.conclude(measure.observe(slope, {}))["r_shuffled"].min() > 1 - 1e-6


def dense_held_out(weights, seen, rows):
    """R^2 of one map: fit on the other rows, judge within the held-out ones."""
    n = len(seen)
    training = seen & ~rows[:, None]
    unknowns = ridge_solve(design(training), weights[training])
    distance, key = unknowns[:n], unknowns[2 * n :]
    left = whole = 0.0
    for row in np.flatnonzero(rows):
        keys = np.flatnonzero(seen[row])
        values, guess = weights[row, keys], distance[row - keys] + key[keys]
        left += np.square(values - values.mean() - guess + guess.mean()).sum()
        whole += np.square(values - values.mean()).sum()
    return 1 - left / whole


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("kind", ["plain", "holes", "bias"])
def test_held_out_r2_is_that_of_the_dense_fit(kind, window):
    inputs = random_inputs(tokens=36, window=window)
    inputs = with_holes(inputs) if kind == "holes" else inputs
    added = torch.randn(2, 4, 36, 36, dtype=torch.float64)
    inputs = (
        replace(inputs, position_logits=lambda rows: added[:, :, rows])
        if kind == "bias"
        else inputs
    )
    rows = draw_rows(inputs.valid, 0.4, seed=1)
    found = held_out_r2(
        logit_sums(inputs), logit_sums(inputs, rows), rows, inputs.valid, window, RIDGE
    )
    weights, seen = maps(inputs)
    for prompt in range(2):
        for head in range(4):
            expected = dense_held_out(weights[prompt, head], seen[prompt], rows[prompt].numpy())
            assert_allclose(found[prompt, head], expected, atol=1e-8)


def test_held_out_rows_of_three_axes_are_predicted_and_those_of_noise_are_not():
    inputs = random_inputs(tokens=120, prompts=1, scheme="rope")
    first = inputs.queries[:, :, :1].expand_as(inputs.queries)
    index = torch.arange(120, dtype=torch.float64).expand(1, 1, -1)
    measure = ThreeAxis(extras=("held_out",))
    by_distance = replace(inputs, queries=first, keys=first, positions=index)
    assert measure.conclude(measure.observe(by_distance, {}))["r2_held_out"].min() > 1 - 1e-8
    noise = random_inputs(tokens=120, prompts=1, scheme="nope", d_head=64)
    assert measure.conclude(measure.observe(noise, {}))["r2_held_out"].max() < 0.1


def test_rows_are_drawn_from_the_valid_ones_but_the_last():
    valid = torch.ones(3, 50, dtype=torch.bool)
    valid[1, 40:] = valid[2, :10] = False
    rows = draw_rows(valid, 0.25, seed=5)
    assert (rows & ~valid).sum() == 0
    assert rows.sum(-1).tolist() == [12, 10, 10]
    assert not rows[0, 49] and not rows[1, 39] and not rows[2, 49]
    assert torch.equal(rows[1, :40], rows[2, 10:])
    assert not torch.equal(rows, draw_rows(valid, 0.25, seed=6))
