"""Edits that are added and entered again do what nested contexts do, and leave nothing behind."""

import pytest
import torch
from families import TOKENS, repositioned
from refusals import refused

from repo_interp import interventions as iv


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return repositioned("repo")


@torch.no_grad()
def logits(model, tokens=TOKENS):
    return model(tokens).logits


def test_a_sum_is_the_nested_contexts_and_may_be_entered_again(model):
    plain = logits(model)
    one, other = iv.frozen(model, (1, 0)), iv.ablate(model, [(0, 1), (2, 3)])
    with one, other:
        expected = logits(model)
    assert not torch.equal(expected, plain)
    both = one + other
    for _ in range(2):
        with both:
            assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model), plain)
    # a mean is that of the prompt that passes, not of the one before it
    with both:
        again = logits(model, TOKENS.flip(1))
    with iv.frozen(model, (1, 0)), iv.ablate(model, [(0, 1), (2, 3)]):
        assert torch.equal(logits(model, TOKENS.flip(1)), again)
    three = both + iv.rescaled(model, linear=2.0)
    with three, iv.scaled(model, 2.0):
        pass
    assert torch.equal(logits(model), plain)


def test_an_edit_within_itself_acts_twice(model):
    twice = iv.scaled(model, 2.0, layer=0)
    with twice, twice:
        found = logits(model)
    with iv.scaled(model, 4.0, layer=0):
        assert torch.equal(logits(model), found)


def test_what_fails_later_undoes_what_was_entered(model):
    plain = logits(model)
    with refused("head 9 was asked for"), iv.frozen(model) + iv.ablate(model, (0, 9)):
        pass
    assert torch.equal(logits(model), plain)
    with pytest.raises(TypeError, match="unsupported operand"):
        iv.frozen(model) + torch.no_grad()
    with pytest.raises(TypeError, match="missing a required argument: 'factor'"):
        iv.interpolated(model)
