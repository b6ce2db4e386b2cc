"""How far positions turn components: closed forms and every pair, one by one."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from causal_reference import seen
from torch.nn.functional import pad
from torch.testing import assert_close

from repo_interp.measures.kernels.rotation_angles import (
    EDGES,
    counts_below,
    largest_difference,
    rotation_angles,
)
from repo_interp.runtime.memory import working_memory

FREQUENCIES = torch.tensor([1.0, 0.1, 0.003, 0.0], dtype=torch.float64)


def drawn(tokens, prompts=3):
    positions = 8 * torch.randn(prompts, 2, tokens, dtype=torch.float64).cumsum(-1) / tokens**0.5
    valid = torch.ones(prompts, tokens, dtype=torch.bool)
    valid[0, tokens * 3 // 4 :] = valid[-1, : tokens // 4] = valid[1, tokens // 2] = False
    return positions, valid


def by_pair(positions, valid, window):
    """|z_i - z_j| [row, pair] of every seen pair, prompt by prompt."""
    differences = (positions[..., :, None] - positions[..., None, :]).abs()
    return [of[:, mask] for of, mask in zip(differences, seen(valid, window), strict=True)]


@pytest.mark.parametrize("window", [None, 1, 7, 50])
def test_short_prompts_are_counted_pair_by_pair(window):
    positions, valid = drawn(40)
    found = rotation_angles(positions, FREQUENCIES, valid, window)
    differences = by_pair(positions, valid, window)
    every = torch.cat(differences, -1)
    assert_close(found.difference, every.sum(-1))
    angles = every[:, None] * FREQUENCIES[:, None]
    expected = [((angles >= a) & (angles < b)).sum(-1) for a, b in pairwise([*EDGES, math.inf])]
    assert_close(found.pairs, torch.stack(expected, -1).double())
    largest = torch.stack([of.amax(-1) for of in differences])
    assert_close(largest_difference(positions, valid, window), largest)


def test_padding_changes_nothing_even_where_pairs_are_sampled():
    positions, _ = drawn(90, prompts=2)
    valid = torch.ones(2, 90, dtype=torch.bool)
    plain = rotation_angles(positions, FREQUENCIES, valid, 30, per_side=16)
    for side in ((0, 25), (25, 0)):
        wide = pad(positions, side, value=1e6)
        found = rotation_angles(wide, FREQUENCIES, pad(valid, side), 30, per_side=16)
        assert_close((found.pairs, found.difference), (plain.pairs, plain.difference))


@pytest.mark.parametrize("window", [None, 360])
def test_a_sample_of_a_long_prompt_stands_for_all_its_pairs(window):
    positions, valid = drawn(600)
    found, exact = (
        rotation_angles(positions, FREQUENCIES, valid, window, per_side=side) for side in (128, 600)
    )
    assert_close(found.pairs.sum(-1), exact.pairs.sum(-1))
    assert_close(found.difference, exact.difference, rtol=0.02, atol=0)
    shares = [of.pairs / of.pairs.sum(-1, keepdim=True) for of in (found, exact)]
    assert_close(*shares, rtol=0, atol=0.02)


def test_no_pair_no_difference():
    positions, _ = drawn(5)
    none = torch.zeros(3, 5, dtype=torch.bool)
    assert rotation_angles(positions, FREQUENCIES, none).pairs.sum() == 0
    assert (largest_difference(positions, none) == -math.inf).all()


@pytest.mark.parametrize("per_side", [16, 256])
def test_pairs_in_order_and_pairs_in_cells_are_counted_alike(per_side):
    positions, valid = drawn(90)
    sampled = FREQUENCIES, valid, 30, per_side
    in_order = rotation_angles(positions, *sampled)
    with working_memory(2**31):  # as on an accelerator
        in_cells = rotation_angles(positions, *sampled)
    assert_close((in_order.pairs, in_order.difference), (in_cells.pairs, in_cells.difference))


def test_an_angle_on_an_edge_lies_in_the_bin_that_begins_there():
    positions = torch.tensor([[[0.0, EDGES[1], EDGES[1] + EDGES[4]]]], dtype=torch.float64)
    given = positions, torch.ones(1), torch.ones(1, 3, dtype=torch.bool)
    # Three of no angle, those of two neighbors on edges, and that of the first and the last
    expected = [3, 1, 0, 0, 2, 0, 0, 0, 0, 0]
    assert rotation_angles(*given).pairs[0, 0].tolist() == expected
    with working_memory(2**31):
        assert rotation_angles(*given).pairs[0, 0].tolist() == expected


def test_numbers_below_edges_are_those_of_a_sort():
    """With numbers at edges, none, infinite ones, and edges that no angle reaches."""
    drawn = np.random.default_rng(0)
    for rates in ([1.0, 0.01], [0.3, 0.0], [0.0], 10 ** drawn.uniform(-6, 0.5, 32)):
        with np.errstate(divide="ignore"):
            edges = np.sort(np.divide.outer(EDGES[1:], rates).ravel())
        rows = np.abs(drawn.normal(size=(3, 400)) * 10 ** drawn.uniform(-5, 6, (3, 400)))
        rows[0, :50], rows[1, :9], rows[2, :2] = drawn.choice(edges, 50), 0, (np.inf, np.nan)
        for some in (rows, rows[:, :0]):
            expected = np.stack([np.searchsorted(np.sort(row), edges) for row in some])
            np.testing.assert_array_equal(counts_below(some, edges), expected)
