"""The three-axis fit by learned positions, and its controls, against dense fits of whole maps."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs, with_holes
from numpy.testing import assert_allclose
from three_axis_reference import RIDGE, correlation, dense_r, design, maps, of_kind, ridge_solve

from repo_interp.measures.kernels.logit_sums import logit_sums
from repo_interp.plugins.three_axis.axis_fit import additive_pairs, fit_axes
from repo_interp.plugins.three_axis.position_cells import (
    binned_pairs,
    position_correlation,
    product_sums,
)
from repo_interp.plugins.three_axis.three_axis import (
    ThreeAxis,
    draw_rows,
    shuffle_distances,
    without_trend,
)
from repo_interp.runtime.memory import working_memory


def measured(inputs, name, extra, **options):
    measure = ThreeAxis(extras=(extra,), **options)
    return measure.conclude(measure.observe(inputs, {}))[name].values[:, 0]


def by_position(inputs, width=1.0, most_cells=4096):
    return measured(inputs, "r_position", "position", position_width=width, most_cells=most_cells)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(
    ("kind", "width"), [("plain", 0.3), ("plain", 7.0), ("softcap", 1.0), ("bias", 1.0)]
)
def test_distances_by_position_are_the_dense_fit(kind, width, window):
    inputs = of_kind(with_holes(random_inputs(tokens=40, window=window)), kind)
    weights, pairs = maps(inputs)
    cell = np.floor(inputs.head_positions.nan_to_num().numpy() / width).astype(int)
    expected = dense_r(weights, pairs, cell[..., :, None] - cell[..., None, :])
    assert_allclose(by_position(inputs, width), expected, atol=1e-9)


def test_too_many_cells_and_layers_that_learn_no_positions_have_no_number():
    inputs = random_inputs()
    reach = (inputs.positions.amax(-1) - inputs.positions.amin(-1)).sort(-1).values
    some = by_position(inputs, most_cells=int(reach[0, 1]) + 2)
    assert np.isnan(some).any() and not np.isnan(some).all()
    assert_allclose(some, np.where(np.isnan(some), np.nan, by_position(inputs)), atol=1e-12)
    for other in ("rope", "nope"):
        assert np.isnan(by_position(random_inputs(scheme=other))).all()
    nope = random_inputs(scheme="nope")
    with pytest.raises(ValueError, match=r"layer 0 \(nope\) has no positions"):
        position_correlation(nope, logit_sums(nope), 1.0, 4096, RIDGE)


@pytest.mark.parametrize(
    "memory", [None, 2**14, 2**31], ids=["processor", "rows of a map", "a map"]
)
@pytest.mark.parametrize("window", [None, 40, 100])
def test_sums_over_bins_are_the_normal_matrix(window, memory):
    cell, takes_part = torch.randint(0, 9, (2, 75)), torch.rand(2, 75) < 0.8
    pairs = binned_pairs(cell, takes_part, window, int(cell.max()) + 1)
    queries, keys = torch.randn(2, 2, 75, 6, dtype=torch.float64) * takes_part[..., None]
    axes = torch.randn(2, 17 + 150, dtype=torch.float64)
    axes[:, 17:] *= takes_part.repeat(1, 2)
    with nullcontext() if memory is None else working_memory(memory):
        sums = product_sums(queries, keys, pairs, window)
    both = pairs.sums(pairs.unknowns(*axes.split([17, 75, 75], -1)))
    lines = both[:, pairs.length :].unflatten(-1, (2, -1))[..., :75]
    found = torch.cat([both[:, :17], lines.flatten(1)], -1)
    distance = torch.arange(75)[:, None] - torch.arange(75)
    for item, part in enumerate(takes_part):
        seen = (distance >= 0) & part[:, None] & part & (distance < (window or 75))
        query, key = seen.nonzero(as_tuple=True)
        matrix = torch.zeros(len(query), 17 + 150, dtype=torch.float64)
        for column in (cell[item, query] - cell[item, key] + 8, 17 + query, 92 + key):
            matrix[torch.arange(len(query)), column] = 1
        assert_allclose(found[item], axes[item] @ matrix.T @ matrix, atol=1e-11)
        products = (queries[item] @ keys[item].T)[query, key]
        assert_allclose(sums[item], matrix[:, :17].T @ products, atol=1e-11)


def fitted(inputs):
    pairs = additive_pairs(inputs.valid[:, None], inputs.valid[:, None], inputs.window)
    return pairs, fit_axes(logit_sums(inputs).lines, inputs.valid, inputs.window, RIDGE)


@pytest.mark.parametrize("window", [None, 15])
def test_taking_the_trend_out_of_the_distance_axis_leaves_the_map(window):
    pairs, axes = fitted(with_holes(random_inputs(tokens=40, window=window)))
    steady = without_trend(axes, pairs)
    for ours, theirs in zip(pairs.sums(steady), pairs.sums(axes), strict=True):
        assert_allclose(ours, theirs, atol=1e-9)
    weighted = pairs.counts.distance * steady.distance
    assert_allclose(weighted.sum(-1), 0, atol=1e-9)
    assert_allclose((torch.arange(40) * weighted).sum(-1), 0, atol=1e-8)


def test_shuffled_distances_are_those_of_the_map_and_its_permuted_axis():
    inputs = random_inputs(tokens=40, prompts=1)
    pairs, axes = fitted(inputs)
    shuffled, steady = shuffle_distances(axes, pairs, seed=3), without_trend(axes, pairs)
    assert_allclose(shuffled.distance.sort(-1).values, steady.distance.sort(-1).values)
    assert not torch.allclose(shuffled.distance, steady.distance)
    weights, seen = maps(inputs)
    i, j = np.nonzero(seen[0])
    a, b, c = (part[0].numpy() for part in shuffled)
    expected = [
        correlation(weights[0, head][seen[0]], a[head, i - j] + b[head, i] + c[head, j])
        for head in range(4)
    ]
    assert_allclose(measured(inputs, "r_shuffled", "shuffled", seed=3)[0], expected, atol=1e-10)


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
    inputs = of_kind(random_inputs(tokens=36, window=window), kind)
    found = measured(inputs, "r2_held_out", "held_out", held_out_share=0.4, seed=1)
    rows = draw_rows(inputs.valid, 0.4, seed=1).numpy()
    weights, seen = maps(inputs)
    for prompt, head in np.ndindex(2, 4):
        expected = dense_held_out(weights[prompt, head], seen[prompt], rows[prompt])
        assert_allclose(found[prompt, head], expected, atol=1e-8)


def test_rows_are_drawn_from_the_valid_ones_but_the_last():
    valid = torch.ones(3, 50, dtype=torch.bool)
    valid[1, 40:] = valid[2, :10] = False
    rows = draw_rows(valid, 0.25, seed=5)
    assert (rows & ~valid).sum() == 0
    assert rows.sum(-1).tolist() == [12, 10, 10]
    assert not rows[[0, 1, 2], [49, 39, 49]].any()
    assert torch.equal(rows[1, :40], rows[2, 10:])
    assert not torch.equal(rows, draw_rows(valid, 0.25, seed=6))
