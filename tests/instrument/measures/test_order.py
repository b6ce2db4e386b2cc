"""Order by distance against counting pairs, resolutions in closed form, and walks, which have none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs
from numpy.testing import assert_allclose, assert_array_equal

import repo_interp as ri
from repo_interp.inputs import select_prompts
from repo_interp.measures.kernels import order
from repo_interp.measures.kernels.order import (
    DISTANCES,
    DOUBLING,
    OrderSums,
    order_by_distance,
    told_by,
)
from repo_interp.measures.kernels.rounding import equal_within
from repo_interp.measures.patterns import Patterns
from repo_interp.measures.statistics import merge


def sums(*texts):
    """Sums over texts [row, token]."""
    parts = []
    for rows in texts:
        values = torch.as_tensor(np.atleast_2d(rows), dtype=torch.float64)
        present = torch.ones(1, 1, values.shape[-1], dtype=torch.bool)
        lengths = np.array([values.shape[-1]])
        parts.append(told_by(values[None], present, lengths, equal_within(values)[None])[1])
    return OrderSums(*sum(parts).numpy())


def resolutions(*texts):
    return sums(*texts).resolution.tolist()


def test_orders_are_those_of_counted_pairs_and_equal_numbers_count_half(monkeypatch):
    random = np.random.default_rng(0)
    rows = np.stack([random.normal(size=60), np.arange(60), random.integers(0, 3, 60), np.ones(60)])
    values, valid = torch.as_tensor(rows), torch.arange(60) < 50
    distances = np.array([1, 2, 3, 49, 50, 80])
    equal = equal_within(values[:, :50])

    def found():
        return order_by_distance(values, valid, distances, equal).numpy()

    whole = found()
    for row, of_row in zip(rows, whole, strict=True):
        for place, apart in enumerate(distances[:4]):
            pairs = [np.sign(row[i + apart] - row[i]) for i in range(50 - apart)]
            assert of_row[place] == pytest.approx(np.mean(pairs))
    assert np.isnan(whole[:, 4:]).all()
    assert_array_equal(whole[1, :4], 1)
    assert_array_equal(whole[3, :4], 0)
    monkeypatch.setattr(order, "AT_ONCE", 100)
    assert_array_equal(found(), whole), "in many small steps"
    nearly = rows[2] + 1e-8 * random.normal(size=60)
    again = order_by_distance(torch.as_tensor(nearly), valid, distances, equal[2]).numpy()
    assert_array_equal(again, whole[2])


def test_a_clock_of_steps_tells_the_order_from_nine_tenths_of_a_step():
    """Of pairs d apart in steps of s tokens, d / s are told apart: .8 from .8 s on."""
    index = np.arange(800)
    assert resolutions(index)[0] == 1 and resolutions(-index)[0] == 1
    # 16 (1 - ...) with the last step cut off: a token more
    assert resolutions(index // 16)[0] == pytest.approx(12.8, abs=1)
    assert resolutions(index // 50)[0] == pytest.approx(40, rel=0.05)


def test_what_texts_tell_in_two_directions_or_only_up_to_a_distance_is_no_resolution():
    index = np.arange(600)
    assert np.isnan(resolutions(index, -index)[0])
    assert np.isnan(resolutions(index % 50)[0])
    assert np.isnan(resolutions(np.abs(index - 300))[0])
    for step in (np.where(index < 300, 0, 1), np.sin(2 * np.pi * index / 600)):
        assert np.isnan(resolutions(step, step, step)[0])
    assert np.isnan(resolutions(np.ones(600))[0])
    assert np.isnan(resolutions(np.arange(20))[0]) == (20 // 3 < 1)


def test_few_spans_judge_nothing():
    """Of 100 tokens 8 spans of 12 stand side by side; told at 13 needs two texts."""
    index = np.arange(100) // 16
    assert np.isnan(resolutions(index)[0]) and resolutions(index, index)[0] >= 12
    assert np.isnan(sums(np.arange(7)).told[0]), "no distance is judged"


def test_random_walks_have_no_resolution():
    random = np.random.default_rng(3)
    walks = [random.normal(size=(150, 400)).cumsum(1) for _ in range(3)]
    assert np.isfinite(resolutions(walks[0])).mean() < 0.02
    assert np.isfinite(resolutions(*walks)).mean() < 0.02


def test_the_measure_has_orders_by_prompt_and_merges_exactly():
    random, valid = np.random.default_rng(0), torch.arange(200) < torch.tensor([[200], [150], [90]])
    index = np.arange(200.0)
    rows = [index, -(index // 9), random.normal(size=200), np.ones(200)]
    inputs = random_inputs(prompts=3, heads=4, kv_heads=4, tokens=200, valid=valid)
    positions = torch.as_tensor(np.tile(np.array(rows), (3, 1, 1)))
    inputs = replace(inputs, positions=positions)
    measure = Patterns()
    whole = measure.conclude(measure.observe(inputs, {}))
    single = [measure.observe(select_prompts(inputs, np.array([row])), {}) for row in (2, 0, 1)]
    again = measure.conclude(merge(single))
    for name in ("order", "resolution", "order_told", "order_prompts", "counts_tokens"):
        assert_allclose(again[name], whole[name], err_msg=name)
    assert whole["order"]["distance"].values.tolist() == [2**k for k in range(8)]
    assert_array_equal(whole["order"].sel(head=0).isnull().sum("distance").values[:, 0], [0, 0, 1])
    found = whole["resolution"].values[0]
    assert found[0] == 1 and found[1] == pytest.approx(8, abs=1) and np.isnan(found[2:]).all()
    assert whole["counts_tokens"].values[0].tolist() == [1, 0, 0, 0]
    assert set(DOUBLING) <= set(DISTANCES)


def test_layers_without_positions_tell_no_order():
    run = ri.analyze(ri.load("niah/nope"), [[5, 6, 7] * 20], ("patterns",), experiments=())
    group = run["patterns"]
    assert group["order"].isnull().all() and group["resolution"].isnull().all()
    assert (group["counts_tokens"] == -1).all()
