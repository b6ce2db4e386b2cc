"""How a token gets a position, in closed form; and the edges that other tests of positions leave
out, found by mutants that lived.
"""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from repo_interp.positions.assigners import (
    AttendedPositions,
    ConvolvedPositions,
    LearnedPositions,
    LinearPositions,
    TokenIndex,
)
from repo_interp.positions.layouts import SCHEMES, meaning
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


SEEN = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
"""The second prompt is padded on the left, and its window is of three tokens."""
SEEN[1, :, :, 0], SEEN[1, :, 0, 0] = False, True
SEEN[1, 0] &= ~torch.ones(5, 5, dtype=torch.bool).tril(-3)


@pytest.mark.parametrize("kind", [AttendedPositions, ConvolvedPositions])
def test_positions_that_see_earlier_tokens_written_out_and_token_by_token(kind):
    torch.manual_seed(0)
    assigner = kind(16, 3)
    for parameter in assigner.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        whole, memory = assigner(HIDDEN, INDEX, None, SEEN)
        plain = LearnedPositions(16, 3)
        plain.load_state_dict(assigner.state_dict(), strict=False)
        r, expected = memory.double().numpy(), np.empty((2, 3, 5))
        weights = {name: part.double().numpy() for name, part in assigner.state_dict().items()}
        for prompt in range(2):
            for i in range(5):
                seen = np.flatnonzero(SEEN[prompt, 0, i].numpy())
                if kind is AttendedPositions:
                    query = weights["query_map.weight"] @ r[prompt, i]
                    keys = r[prompt, seen] @ weights["key_map.weight"].T
                    a = np.exp(keys @ query / np.sqrt(2))
                    found = r[prompt, seen] @ weights["value_map.weight"].T
                    mixed = r[prompt, i] + a @ found / a.sum()
                else:
                    mixed = sum(weights["taps"][i - j] * r[prompt, j] for j in seen if i - j < 4)
                expected[prompt, :, i] = weights["final_map.weight"] @ mixed
        assert_allclose(whole, expected, atol=1e-5)
        assert not np.allclose(plain(HIDDEN, INDEX), whole, atol=0.1)
        # one token at a time, with the memory of those before
        for i in range(5):
            past = memory[:, :i] if i else None
            one, new = assigner(HIDDEN[:, [i]], INDEX[:, [i]], past, SEEN[:, :, [i], : i + 1])
            assert_allclose(one, whole[:, :, [i]], atol=1e-5)
            assert_allclose(new, memory[:, [i]], atol=1e-6)


def test_a_fresh_convolution_is_repo():
    torch.manual_seed(0)
    fresh, plain = ConvolvedPositions(16, 3), LearnedPositions(16, 3)
    plain.load_state_dict(fresh.state_dict(), strict=False)
    with torch.no_grad():
        assert_allclose(fresh(HIDDEN, INDEX, None, SEEN)[0], plain(HIDDEN, INDEX), atol=1e-6)


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


def test_every_scheme_has_a_meaning():
    assert all(meaning(scheme) == SCHEMES[scheme] for scheme in SCHEMES)
    assert meaning("t5") == "a scheme of another package"
