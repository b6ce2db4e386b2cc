"""What an analysis will cost: the estimate grows as it must, and reads well."""

from __future__ import annotations

import pytest
from families import tiny

import repo_interp as ri
from repo_interp.analysis.cost import Cost, estimate


def test_memory_counts_weights_activations_and_what_is_kept():
    model = ri.reposition(tiny("llama"), "repo")
    few, many = estimate(model, [64] * 2, 1, 3), estimate(model, [64] * 2000, 1, 3)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert few.bytes > weights
    assert many.bytes - few.bytes == pytest.approx(6.0 * 1998 * 64 * 3 * 4)
    assert estimate(model, [64] * 2, 2, 3).bytes > few.bytes
    assert 0 < few.seconds < estimate(model, [64] * 2, 1, 300).seconds


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "about 1 s"), (45, "about 45 s"), (600, "about 10 min"), (7200, "about 2.0 h")]
)
def test_durations_read_well(seconds, said):
    assert str(Cost(seconds, 3 * 2**30)) == f"{said} and 3.0 GiB of memory"
