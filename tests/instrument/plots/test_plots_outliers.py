"""The focused range against the numbers of the original demo: every row of the official checkpoint, and its synthetic rows."""

import json

import numpy as np
import pytest
from numpy.testing import assert_allclose
from run_fixture import OFFICIAL

from repo_interp.plots.marks.arrays import focused_range, global_range

DEMO = json.loads((OFFICIAL / "repo_mha" / "demo_expected.json").read_text())


def official_positions(layer: int, head: int) -> np.ndarray:
    expected = np.load(OFFICIAL / "repo_mha" / "expected.npz")
    learned = expected["repo_layers"].tolist()
    return expected["pred_indices"][learned.index(layer), 0, head] if layer in learned else np.arange(96)


def test_an_even_row_keeps_everything_and_gets_five_per_cent():
    assert focused_range(np.arange(101)) == (-5.0, 105.0)


def test_a_far_value_leaves_the_range_as_it_was():
    values = np.linspace(0, 1, 50)
    assert_allclose(focused_range([*values, 1000.0]), focused_range(values), atol=1e-12)


def test_range_moves_and_scales_with_the_values():
    values = np.random.default_rng(0).normal(size=40) ** 3
    assert_allclose(focused_range(10 + 3 * values), 10 + 3 * np.array(focused_range(values)))


def test_equal_values_get_one_position_of_room():
    assert focused_range([2.5] * 6) == global_range([2.5]) == (1.5, 3.5)


@pytest.mark.parametrize("values", [[], [1.0] * 5, [np.nan] * 20, [1.0] * 5 + [np.nan, np.inf]])
def test_too_few_values_have_no_focused_range(values):
    assert focused_range(values) is None


def test_nan_does_not_count():
    assert focused_range([np.nan, *range(10), np.nan]) == focused_range(range(10))
    assert global_range([np.nan]) is None


@pytest.mark.parametrize("row", DEMO["ranges"], ids=lambda row: f"layer{row['layer']}-head{row['head']}")
def test_official_rows(row):
    positions = official_positions(row["layer"], row["head"])
    assert_allclose(positions[:3], row["y_first3"], rtol=1e-6)
    assert_allclose(focused_range(positions), row["suggested_range"], rtol=1e-12)


@pytest.mark.parametrize("row", DEMO["synthetic"], ids=range(len(DEMO["synthetic"])))
def test_synthetic_rows(row):
    expected = row["suggested_range"]
    found = focused_range(row["y"])
    assert (found is None) if expected is None else (found == pytest.approx(expected, rel=1e-12))
