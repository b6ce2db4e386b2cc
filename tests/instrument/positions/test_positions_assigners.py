"""How a token gets a position, in closed form; and the edges that other tests of positions leave
out, found by mutants that lived.
"""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.layouts import SCHEMES, meaning
from repo_interp.positions.learned_assigners import (
    AttendedPositions,
    ConvolvedPositions,
    LearnedPositions,
    LinearPositions,
)
from repo_interp.positions.rotary import rotation_tables

HIDDEN = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(5)[None] + 3


def test_the_index_is_its_own_position():
    positions = TokenIndex()(HIDDEN, INDEX)
    assert positions.dtype == torch.float32
    assert positions.tolist() == [[[3, 4, 5, 6, 7]]] * 2
    far = torch.tensor([[0, 2**24 - 1]])
    assert torch.equal(TokenIndex()(HIDDEN[:1, :2].bfloat16(), far), far[None].float())


@pytest.mark.parametrize(("representation", "width"), [(None, 2), (7, 7)])
def test_learned_positions_written_out(representation, width):
    learned = LearnedPositions(16, 3, representation)
    weights = dict(learned.named_parameters())
    assert [*weights] == ["gate_map.weight", "content_map.weight", "final_map.weight"]
    gate, content, final = (weight.detach().double().numpy() for weight in weights.values())
    assert gate.shape == (width, 16)
    h = HIDDEN.double().numpy()
    gated = h @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (h @ content.T)) @ final.T
    assert_allclose(learned(HIDDEN, INDEX).detach(), expected.transpose(0, 2, 1), atol=1e-6)


SEEN = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
"""The second prompt is padded on the left, and its window is of three tokens."""
SEEN[1, :, :, 0], SEEN[1, :, 0, 0] = False, True
SEEN[1, 0] &= ~torch.ones(5, 5, dtype=torch.bool).tril(-3)


@pytest.mark.parametrize("kind", [AttendedPositions, ConvolvedPositions])
@torch.no_grad()
def test_positions_that_see_earlier_tokens_written_out_and_token_by_token(kind):
    assigner = kind(16, 3)
    for parameter in assigner.parameters():
        torch.nn.init.normal_(parameter)
    whole, memory = assigner(HIDDEN, INDEX, None, SEEN)
    weights = {name: part.double().numpy() for name, part in assigner.state_dict().items()}
    for prompt, r in enumerate(memory.double().numpy()):
        for i in range(5):
            seen = np.flatnonzero(SEEN[prompt, 0, i].numpy())
            if kind is AttendedPositions:
                query = weights["query_map.weight"] @ r[i]
                keys = r[seen] @ weights["key_map.weight"].T
                a = np.exp(keys @ query / np.sqrt(2))
                mixed = r[i] + a @ (r[seen] @ weights["value_map.weight"].T) / a.sum()
            else:
                mixed = sum(weights["taps"][i - j] * r[j] for j in seen if i - j < 4)
            expected = weights["final_map.weight"] @ mixed
            assert_allclose(whole[prompt, :, i], expected, atol=1e-5)
    # one token at a time, with the memory of those before
    for i in range(5):
        past = memory[:, :i] if i else None
        one, new = assigner(HIDDEN[:, [i]], INDEX[:, [i]], past, SEEN[:, :, [i], : i + 1])
        assert_allclose(one, whole[:, :, [i]], atol=1e-5)
        assert_allclose(new, memory[:, [i]], atol=1e-6)


@torch.no_grad()
def test_a_fresh_convolution_is_repo():
    fresh, plain = ConvolvedPositions(16, 3), LearnedPositions(16, 3)
    plain.load_state_dict(fresh.state_dict(), strict=False)
    assert_allclose(fresh(HIDDEN, INDEX, None, SEEN)[0], plain(HIDDEN, INDEX), atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@torch.no_grad()
def test_linear_positions_written_out_and_mixed_with_the_index_by_its_share(share):
    linear = LinearPositions(16, 4)
    ((name, weight),) = linear.named_parameters()
    assert name == "dynamic_map.weight"
    linear.index_share = share
    expected = (1 - share) * (HIDDEN @ weight.T).mT + share * INDEX[:, None]
    assert_allclose(linear(HIDDEN, INDEX), expected, atol=1e-6)
    rounded = linear.bfloat16()(HIDDEN.bfloat16(), INDEX)
    assert rounded.dtype == torch.bfloat16
    assert_allclose(rounded.float(), expected, atol=0.05)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.bfloat16, 0.01), (torch.float32, 1e-4), (torch.float64, 1e-4)]
)
def test_tables_are_of_the_dtype_asked_for_and_exact_before_that(dtype, atol):
    tables = rotation_tables(torch.tensor([1000.25]), torch.tensor([0.75]), 2.0, dtype)
    angle = 1000.25 * 0.75
    for table, expected in zip(tables, (np.cos(angle), np.sin(angle)), strict=True):
        assert table.dtype == dtype
        assert_allclose(table.double(), [[2 * expected]], atol=atol)


def test_every_scheme_has_a_meaning():
    assert all(meaning(scheme) == SCHEMES[scheme] for scheme in SCHEMES)
    assert meaning("t5") == "a scheme of another package or of a file"
