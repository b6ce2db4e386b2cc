"""Capture shows what attention computes with, layer by layer, and leaves nothing behind."""

import pytest
import torch
from families import TOKENS, tiny
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.models.capture import capture, decode
from repo_interp.models.decoder import as_decoder

VALID = torch.ones(2, 20, dtype=torch.bool)
NUMBERS = torch.arange(2)


def seen(model, tokens=TOKENS, valid=VALID, layers=None):
    inputs = []
    capture(model, tokens, valid, NUMBERS, inputs.append, layers)
    return inputs


def test_layers_come_in_order_and_only_those_asked_for():
    model = ri.reposition(tiny("llama"), "rope,nope,repo")
    assert [(i.layer, i.scheme) for i in seen(model)] == [(0, "rope"), (1, "nope"), (2, "repo")]
    assert [i.layer for i in seen(model, layers=[2, 0])] == [0, 2]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding_on_either_side_shows_the_same_inputs(family, side):
    model = ri.reposition(tiny(family), "repo@1")
    padding = torch.zeros(2, 5, dtype=torch.long)
    parts, marks = [TOKENS, padding], [torch.ones(2, 20), torch.zeros(2, 5)]
    if side == "left":
        parts, marks = parts[::-1], marks[::-1]
    tokens, valid = torch.cat(parts, 1), torch.cat(marks, 1).bool()
    for plain, padded in zip(seen(model), seen(model, tokens, valid), strict=True):
        kept = slice(5, None) if side == "left" else slice(None, 20)
        assert_close(padded.queries[:, :, kept], plain.queries, atol=1e-5, rtol=1e-5)
        assert_close(padded.positions[:, :, kept], plain.positions, atol=1e-4, rtol=1e-4)
        row = torch.tensor([24 if side == "left" else 19])
        assert_close(
            padded.logits(row)[..., kept], plain.logits(torch.tensor([19])), atol=1e-4, rtol=1e-4
        )
        assert (
            torch.isinf(padded.logits(row)).sum()
            == 2 * 4 * 5 + torch.isinf(plain.logits(torch.tensor([19]))).sum()
        )


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3"])
def test_the_residual_stream_is_what_enters_each_layer(family):
    model = tiny(family)
    states = model(TOKENS, output_hidden_states=True).hidden_states
    blocks = as_decoder(ri.reposition(model, "rope")).blocks
    for inputs, expected in zip(seen(model), states, strict=False):
        assert_close(inputs.residual, expected.detach(), atol=1e-5, rtol=1e-5)
    assert all(not block._forward_pre_hooks for block in blocks)


@pytest.mark.parametrize("wrap", [ri.bridge, lambda model: model])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_pass_ends_inside_the_last_layer_that_is_asked_for(wrap, padding):
    model = ri.reposition(tiny("llama"), "repo")
    with torch.no_grad():
        states = model(TOKENS, output_hidden_states=True).hidden_states
    wrapped = wrap(model)
    passed = []
    handles = [
        attention.sites.attended.register_forward_hook(
            lambda *given, layer=attention.layer_idx: passed.append(layer)
        )
        for attention in as_decoder(wrapped).layers
    ]
    tokens = torch.cat([torch.zeros(2, padding, dtype=torch.long), TOKENS], 1)
    valid = torch.arange(padding + 20).expand(2, -1) >= padding
    whole = seen(wrapped, tokens, valid)
    assert passed == [0, 1, 2]
    for layers, wanted in (([0], []), ([1], [0]), ([2, 0], [0, 1])):
        passed.clear()
        some = seen(wrapped, tokens, valid, layers)
        assert passed == wanted
        for inputs in some:
            assert torch.equal(inputs.queries, whole[inputs.layer].queries)
    for layer in range(3):
        with torch.no_grad():
            assert_close(decode(wrapped, TOKENS, VALID, layer), states[layer])
    for handle in handles:
        handle.remove()
    assert all(not layer._forward_pre_hooks for layer in model.model.layers)
    assert all(not attention.observers for attention in as_decoder(wrapped).layers)


class _Stop(Exception):
    pass


def test_observers_are_gone_after_capture_and_after_a_pass_that_raised():
    model = ri.reposition(tiny("llama"), "repo")

    def stop(inputs):
        raise _Stop

    seen(model)
    assert all(not attention.observers for attention in as_decoder(model).layers)
    with pytest.raises(_Stop):
        capture(model, TOKENS, VALID, NUMBERS, stop)
    assert all(not attention.observers for attention in as_decoder(model).layers)


def test_nothing_of_a_layer_is_kept():
    import weakref

    model = ri.reposition(tiny("llama"), "repo")
    alive = []

    def receive(inputs):
        assert all(reference() is None for reference in alive), (
            "an earlier layer's inputs are still in memory"
        )
        alive.append(weakref.ref(inputs))

    capture(model, TOKENS, VALID, NUMBERS, receive)
    assert len(alive) == 3


def test_values_that_are_not_finite_are_named_where_they_first_appear():
    model = ri.reposition(tiny("llama"), "repo")
    with torch.no_grad():
        model.model.layers[1].self_attn.assigner.final_map.weight[0, 0] = float("inf")
        model.model.embed_tokens.weight[63] = 0.1
    tokens = TOKENS.clone()
    with refused(
        "positions of layer 1, key-value head 0 in prompt 0 are NaN or infinite, the first place"
    ):
        seen(model, tokens)


def test_half_precision_is_widened_before_measures_see_it():
    model = ri.reposition(tiny("llama"), "repo").to(torch.bfloat16)
    assert {inputs.queries.dtype for inputs in seen(model)} == {torch.float32}
