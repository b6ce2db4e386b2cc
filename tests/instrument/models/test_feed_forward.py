"""Feed-forward parts in blocks of tokens: the same numbers, in parts of the size that is said;
whole where a hook is within.
"""

from __future__ import annotations

import pytest
import torch
from families import tiny

import repo_interp as ri
from repo_interp.models import feed_forward
from repo_interp.models.capture import decode
from repo_interp.models.decoder import as_decoder
from repo_interp.models.feed_forward import block_of, in_blocks

TOKENS = torch.randint(3, 64, (2, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["llama", "gemma2"])
def bridge(request):
    return ri.bridge(ri.reposition(tiny(request.param), "repo@1"))


def passed(bridge):
    """Hidden states, and how many tokens every call of a feed-forward part's activation got."""
    tokens: list[int] = []
    activations = [part.act_fn for part in parts_of(bridge)]
    for activation in activations:  # a hook would be seen
        activation.forward = lambda x, original=activation.forward: (
            tokens.append(x.shape[:-1].numel()) or original(x)
        )
    try:
        with torch.no_grad():
            return decode(
                as_decoder(bridge), TOKENS, torch.ones_like(TOKENS, dtype=torch.bool)
            ), tokens
    finally:
        for activation in activations:
            del activation.forward


def parts_of(bridge):
    return [layer.mlp._original_component for layer in as_decoder(bridge).stack.layers]


def test_blocks_give_the_same_and_have_the_size_that_is_said(bridge, monkeypatch):
    whole, tokens = passed(bridge)
    layers = len(tokens)
    assert tokens == [TOKENS.numel()] * layers, "short prompts are one block"
    size = parts_of(bridge)[0].intermediate_size
    monkeypatch.setattr(feed_forward, "_CELLS", 10 * size + 1)
    assert block_of(size, torch.device("cpu")) == 10
    in_parts, tokens = passed(bridge)
    assert tokens == [10, 10, 10, 10, 6] * layers
    torch.testing.assert_close(in_parts, whole, rtol=1e-5, atol=1e-6)
    with ri.working_memory(2**31):
        assert passed(bridge)[1] == [TOKENS.numel()] * layers, "few launches where memory allows"


def test_hooks_see_all_tokens_at_a_time(bridge, monkeypatch):
    monkeypatch.setattr(feed_forward, "_CELLS", 1)
    seen = []
    for point in (bridge.blocks[0].mlp.hook_out, bridge.blocks[1].mlp.gate.hook_out):
        point.add_hook(lambda value, hook: seen.append(value.shape[:2]))
    count = TOKENS.numel()
    assert passed(bridge)[1] == [1] * count + [count] + [1] * count * (bridge.cfg.n_layers - 2)
    assert seen == [TOKENS.shape] * 2
    bridge.reset_hooks()
    assert set(passed(bridge)[1]) == {1}


def test_nothing_stays_behind_also_after_a_failure(bridge):
    parts = parts_of(bridge)
    with in_blocks(as_decoder(bridge)):
        assert all("forward" in vars(part) for part in parts)
    assert not any("forward" in vars(part) for part in parts)

    def stop(*given):
        raise KeyError("stopped")

    parts[-1].register_forward_hook(stop)
    with pytest.raises(KeyError, match="stopped"):
        passed(bridge)
    assert not any("forward" in vars(part) for part in parts)
