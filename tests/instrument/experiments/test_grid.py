"""A grid against loops by hand: product, padding, batches in the order of prompts, progress over
several grids, and points that are not computed again.
"""

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

from repo_interp.experiments import Grid
from repo_interp.experiments.grid import stack_padded
from repo_interp.storage.store import Store


def test_values_stand_at_their_labels():
    axes = {"a": ("x", "y"), "b": (1, 2, 3)}
    grid = Grid(axes, lambda a, b: {"ab": b, "code": ord(a)}).compute()
    expected = {"ab": [[1, 2, 3]] * 2, "code": [[120] * 3, [121] * 3]}
    values = {name: (("a", "b"), rows) for name, rows in expected.items()}
    assert grid.equals(xr.Dataset(values, {axis: [*labels] for axis, labels in axes.items()}))


def test_shorter_values_are_padded_along_inner_axes():
    grid = Grid({"n": (1, 3)}, lambda n: {"v": [list(range(n))] * 2}, {"v": ("row", "token")})
    found = grid.compute()["v"]
    assert found.dims == ("n", "row", "token")
    assert_array_equal(found, [[[0, np.nan, np.nan]] * 2, [[0, 1, 2]] * 2])
    assert stack_padded([(1,), (2, 3)], -1, np.int64).tolist() == [[1, -1], [2, 3]]


def test_prompts_of_batches_come_back_in_their_order():
    asked = []

    def point(numbers, factor):
        asked.append((numbers, factor))
        return {"v": [[factor * number for number in numbers]]}

    batches = ((2, 0), (3,), (1,))
    found = Grid({"factor": (1, 10)}, point, {"v": ("set", "prompt")}, batches).compute()["v"]
    assert_array_equal(found.isel(set=0), [[0, 1, 2, 3], [0, 10, 20, 30]])
    assert asked == [(batch, factor) for batch in batches for factor in (1, 10)]


def test_a_grid_without_axes_has_one_point_and_one_without_labels_none():
    assert_array_equal(Grid({}, lambda: {"v": [1, 2]}, {"v": ("token",)}).compute()["v"], [1, 2])
    empty = Grid({"seed": ()}, lambda seed: pytest.fail("computed")).compute()
    assert empty.sizes == {"seed": 0} and not empty.data_vars


def test_an_interrupted_grid_goes_on_and_progress_counts_all_grids(tmp_path):
    store, told = Store(tmp_path / "store"), []

    def point(n):
        if n == 2 and not told:
            raise KeyboardInterrupt
        assert n != 0 or not told, "finished before"
        return {"v": n / 3}

    grid = Grid({"n": range(3)}, point, name="mine")
    with pytest.raises(KeyboardInterrupt):
        grid.compute(store)
    told.append(None)
    found = grid.compute(store, lambda *of: told.append(of), 4, 9)
    assert told[1:] == [(5, 9), (6, 9), (7, 9)]
    assert found["v"].values.tolist() == [0.0, 1 / 3, 2 / 3]
    again = Grid({"n": range(3)}, lambda n: pytest.fail("computed again"), name="mine")
    assert again.compute(store).identical(found)
    other = Grid({"n": range(3)}, lambda n: {"v": -n}, name="other")
    assert other.compute(store)["v"].values.tolist() == [0, -1, -2], "keys begin with the name"
