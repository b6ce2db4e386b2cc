"""Order by distance of the rows of one prompt: closed forms, and pairs counted one by one."""

from __future__ import annotations

import numpy as np
import pytest

from repo_interp.explorer.orders import orders

COUNT = 96
INDEX = np.arange(COUNT, dtype=float)


def test_rows_with_a_known_order():
    walk = np.random.default_rng(0).normal(size=COUNT)
    missing = np.full(COUNT, np.nan)
    rows = np.array(
        [[INDEX, -INDEX, INDEX // 4], [walk, walk, missing], [2 * INDEX, 0 * INDEX, walk]]
    )
    distances, found = orders(rows)
    assert distances.tolist() == [1, 2, 4, 8, 16, 32]  # three of each in 96 tokens
    assert np.isnan(found[0, 0]).all() and np.isnan(found[1, 2]).all()
    assert (found[0, 1] == -1).all() and (found[2, 0] == 1).all() and (found[2, 1] == 0).all()
    # a step of four tokens tells 23 of 95 neighbors, and all that are four apart
    assert found[0, 2, 0] == pytest.approx(23 / 95) and (found[0, 2, 2:] == 1).all()
    for place, distance in enumerate(distances):
        later = walk[distance:] > walk[:-distance]
        assert found[1, 0, place] == pytest.approx(2 * later.mean() - 1)
    np.testing.assert_array_equal(found[1, 0], found[1, 1])
    np.testing.assert_array_equal(found[1, 0], found[2, 2])


def test_no_distance_where_all_heads_have_the_index_or_the_prompt_is_short():
    distances, found = orders(np.array([[INDEX, np.full(COUNT, np.nan)]]))
    assert not len(distances) and found.shape == (1, 2, 0)
    assert not len(orders(np.array([[[1.0, 5.0]]]))[0])
