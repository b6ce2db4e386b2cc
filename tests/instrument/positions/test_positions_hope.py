"""HoPE and its ablations: which components turn, and what that does to the dot product."""

import math

import pytest
import torch
from torch.testing import assert_close

from repo_interp.positions.hope import (
    activated_components,
    high_components,
    hope_frequencies,
    low_components,
    only_high,
    without_activated,
    without_low,
)
from repo_interp.positions.rotary import keep_components

LENGTH = 512
FREQUENCIES = 10_000.0 ** -(torch.arange(32) / 32)
"""RoPE of a head of 64 dimensions: with L = 512 components 0-15 are high, 16-17 activated, 18-31
low.
"""


def kinds_of(frequencies, length):
    """Which components are high, activated and low."""
    kinds = (high_components, activated_components, low_components)
    return torch.stack([kind(frequencies, length) for kind in kinds])


@pytest.mark.parametrize("length", [16, LENGTH, 10**6])
def test_every_component_is_high_activated_or_low(length):
    high, activated, low = kinds_of(FREQUENCIES, length)
    turns = FREQUENCIES * length / (2 * math.pi)
    assert torch.equal(high, turns >= 1) and torch.equal(low, turns <= 0.5)
    assert torch.equal(activated, (turns > 0.5) & (turns < 1))
    if length == LENGTH:  # the paper's small model
        assert (high.sum(), activated.sum()) == (16, 2)


def test_bounds_belong_to_the_neighbours_of_the_open_interval():
    edges = torch.tensor([2 * math.pi / 64, math.pi / 64], dtype=torch.float64)
    assert kinds_of(edges, 64).tolist() == [[True, False], [False, False], [False, True]]


def test_the_schemes_change_exactly_the_components_that_the_paper_names():
    high, activated, low = kinds_of(FREQUENCIES, LENGTH)
    stopped = {hope_frequencies: ~high, without_activated: activated, without_low: low}
    for scheme, components in stopped.items():
        assert torch.equal(scheme(FREQUENCIES, LENGTH), FREQUENCIES.masked_fill(components, 0))
    # sixteen kept, sixteen replaced
    assert torch.equal(only_high(FREQUENCIES, LENGTH), FREQUENCIES[high].repeat(2))


def test_replaced_components_go_round_the_kept_ones_when_there_are_fewer_of_them():
    frequencies = torch.tensor([1.0, 0.5, 0.01, 0.001, 0.0001])
    assert only_high(frequencies, 20).tolist() == [1.0, 0.5, 1.0, 0.5, 1.0]


def test_removed_components_leave_the_dot_product_of_the_others():
    queries, keys = torch.randn(2, 4, 5, 64)
    high = high_components(FREQUENCIES, LENGTH)
    pairs = torch.cat((high, high))
    expected = queries[..., pairs] @ keys[..., pairs].mT
    assert_close(keep_components(queries, high) @ keys.mT, expected)
    assert keep_components(queries.bfloat16(), high).dtype == torch.bfloat16


def test_what_cannot_be_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="no frequency reaches 2 pi / 6, the largest is 1"):
        hope_frequencies(FREQUENCIES, 6)
    with pytest.raises(ValueError, match="got 0"):
        without_low(FREQUENCIES, 0)
    with pytest.raises(ValueError, match="32 components need features of width 64; got 32"):
        keep_components(torch.zeros(2, 32), high_components(FREQUENCIES, LENGTH))
