"""How a token gets a position, in closed form; and the edges that other tests of positions leave
out, found by mutants that lived.
"""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from repo_interp.positions.assigners import LearnedPositions, LinearPositions, TokenIndex
from repo_interp.positions.layouts import SCHEMES, format_layout, meaning
from repo_interp.positions.rotary import rotation_tables

HIDDEN = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(5)[None] + 3


def test_the_index_is_its_own_position():
    positions = TokenIndex()(HIDDEN, INDEX)
    assert positions.shape == (2, 1, 5) and positions.dtype == torch.float32
    assert_allclose(positions[1, 0], [3, 4, 5, 6, 7])
    far = torch.tensor([[0, 2**24 - 1]])
    assert torch.equal(TokenIndex()(HIDDEN[:1, :2].bfloat16(), far), far[None].float())


@pytest.mark.parametrize(("representation", "width"), [(None, 2), (7, 7)])
def test_learned_positions_written_out(representation, width):
    learned = LearnedPositions(16, 3, representation)
    shapes = {name: tuple(weight.shape) for name, weight in learned.named_parameters()}
    assert shapes == {
        "gate_map.weight": (width, 16),
        "content_map.weight": (width, 16),
        "final_map.weight": (3, width),
    }
    gate, content, final = (
        weight.detach().numpy().astype(float) for weight in learned.parameters()
    )
    h = HIDDEN.numpy().astype(float)
    gated = h @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (h @ content.T)) @ final.T
    assert_allclose(learned(HIDDEN, INDEX).detach(), expected.transpose(0, 2, 1), atol=1e-6)


def test_linear_positions_written_out():
    linear = LinearPositions(16, 4)
    ((name, weight),) = linear.named_parameters()
    assert name == "dynamic_map.weight" and weight.shape == (4, 16)
    assert_allclose(
        linear(HIDDEN, INDEX).detach(), (HIDDEN @ weight.detach().T).transpose(1, 2), atol=1e-6
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_positions_are_mixed_with_the_index_by_its_share(share):
    linear = LinearPositions(16, 4).bfloat16()
    alone = linear(HIDDEN.bfloat16(), INDEX)
    linear.index_share = share
    mixed = linear(HIDDEN.bfloat16(), INDEX)
    assert mixed.dtype == torch.bfloat16
    assert_allclose(
        mixed.detach().float(),
        (1 - share) * alone.detach().float() + share * INDEX[:, None].float(),
        atol=0.05,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tables_are_of_the_dtype_asked_for_and_exact_before_that(dtype):
    positions, frequencies = torch.tensor([1000.25]), torch.tensor([0.75])
    for table, expected in zip(
        rotation_tables(positions, frequencies, 2.0, dtype), (np.cos, np.sin), strict=True
    ):
        assert table.dtype == dtype
        assert_allclose(
            table.double(),
            2 * expected([[1000.25 * 0.75]]),
            atol=0.01 if dtype == torch.bfloat16 else 1e-4,
        )


def test_every_scheme_has_a_meaning_and_one_layer_has_a_name():
    assert all(meaning(scheme) == SCHEMES[scheme] for scheme in SCHEMES)
    assert meaning("t5") == "a scheme of another package"
    assert format_layout(("t5",)) == "t5" and format_layout(("rope", "t5")) == "t5@1"
