"""Capture shows what attention computes with, layer by layer, and leaves nothing behind."""

import weakref
from dataclasses import replace

import pytest
import torch
from families import TOKENS, tiny
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.models.capture import capture, decode
from repo_interp.models.decoder import as_decoder
from repo_interp.models.observing import observing

VALID = torch.ones(2, 20, dtype=torch.bool)
NUMBERS = torch.arange(2)


def seen(model, tokens=TOKENS, valid=VALID, layers=None):
    inputs = []
    capture(as_decoder(model), tokens, valid, NUMBERS, inputs.append, layers)
    return inputs


def test_layers_come_in_order_and_only_those_asked_for():
    model = ri.reposition(tiny("llama"), "rope,nope,repo")
    assert [(i.layer, i.scheme) for i in seen(model)] == [(0, "rope"), (1, "nope"), (2, "repo")]
    assert [i.layer for i in seen(model, layers=[2, 0])] == [0, 2]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding_on_either_side_shows_the_same_inputs(family, side):
    model = ri.reposition(tiny(family), "repo@1")
    begin = 5 if side == "left" else 0
    kept, last = slice(begin, begin + 20), torch.tensor([19])
    tokens, valid = torch.zeros(2, 25, dtype=torch.long), torch.zeros(2, 25, dtype=torch.bool)
    tokens[:, kept], valid[:, kept] = TOKENS, True
    for plain, padded in zip(seen(model), seen(model, tokens, valid), strict=True):
        assert_close(padded.queries[:, :, kept], plain.queries, atol=1e-5, rtol=1e-5)
        assert_close(padded.positions[:, :, kept], plain.positions, atol=1e-4, rtol=1e-4)
        logits = padded.logits(last + begin)
        assert_close(logits[..., kept], plain.logits(last), atol=1e-4, rtol=1e-4)
        assert torch.isinf(logits[..., ~valid[0]]).all()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_residual_stream_is_what_enters_each_layer(family):
    model = tiny(family)
    states = model(TOKENS, output_hidden_states=True).hidden_states
    blocks = as_decoder(ri.reposition(model, "rope")).blocks
    for inputs, expected in zip(seen(model), states, strict=False):
        assert_close(inputs.residual, expected.detach(), atol=1e-5, rtol=1e-5)
    assert all(not block._forward_pre_hooks for block in blocks)


@pytest.mark.parametrize("wrap", [ri.bridge, lambda model: model])
def test_a_pass_ends_inside_the_last_layer_that_is_asked_for(wrap):
    model = ri.reposition(tiny("llama"), "repo")
    with torch.no_grad():
        states = model(TOKENS, output_hidden_states=True).hidden_states
    wrapped, passed = wrap(model), []
    for attention in as_decoder(wrapped).layers:
        attention.sites.attended.register_forward_hook(
            lambda *given, layer=attention.layer_idx: passed.append(layer)
        )
    valid = torch.arange(20).expand(2, -1) >= 5
    whole = seen(wrapped, valid=valid)
    assert passed == [0, 1, 2]
    for layers, wanted in (([0], []), ([2, 0], [0, 1])):
        passed.clear()
        some = seen(wrapped, valid=valid, layers=layers)
        assert passed == wanted
        for inputs in some:
            assert torch.equal(inputs.queries, whole[inputs.layer].queries)
    for layer in range(3):
        with torch.no_grad():
            assert_close(decode(as_decoder(wrapped), TOKENS, VALID, layer), states[layer])
    assert all(not layer._forward_pre_hooks for layer in model.model.layers)
    assert all(not attention.observers for attention in as_decoder(wrapped).layers)


def test_observers_are_gone_after_a_pass_that_raised():
    model = ri.reposition(tiny("llama"), "repo")

    def stop(inputs):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        capture(as_decoder(model), TOKENS, VALID, NUMBERS, stop)
    assert all(not attention.observers for attention in as_decoder(model).layers)


def test_nothing_of_a_layer_is_kept():
    alive = []

    def receive(inputs):
        assert all(reference() is None for reference in alive), "an earlier layer is in memory"
        alive.append(weakref.ref(inputs))

    capture(as_decoder(ri.reposition(tiny("llama"), "repo")), TOKENS, VALID, NUMBERS, receive)
    assert len(alive) == 3


def test_values_that_are_not_finite_are_named_where_they_first_appear():
    model = ri.reposition(tiny("llama"), "repo")
    with torch.no_grad():
        model.model.layers[1].self_attn.assigner.final_map.weight[0, 0] = float("inf")
    with refused("positions of layer 1, key-value head 0 in prompt 0 are NaN or infinite"):
        seen(model)


def test_half_precision_is_widened_before_measures_see_it():
    model = ri.reposition(tiny("llama"), "repo").to(torch.bfloat16)
    assert {inputs.queries.dtype for inputs in seen(model)} == {torch.float32}


@pytest.mark.parametrize("layout", ["rope", "repo@1", "selective_rope", "nope,rope,alibi"])
def test_what_measures_have_rotated_is_what_the_layer_goes_on_with(layout):
    model, rows = ri.reposition(tiny("llama"), layout), torch.tensor([3, 19])
    decoder, shared, unobserved = as_decoder(model), [], decode(as_decoder(model), TOKENS)

    def receive(inputs):
        of_pass = inputs.rotation_of_pass and inputs.rotation_of_pass(inputs)
        alone = replace(inputs, rotation_of_pass=None)
        assert torch.equal(inputs.logits(rows), alone.logits(rows))
        assert torch.equal(inputs.rotated_keys, alone.rotated_keys)
        if of_pass:
            shared.append(inputs.layer)
            assert inputs.rotated_keys is of_pass.turned_keys
            # Another layer's, or another prompt's, are rotated anew
            others = replace(inputs, keys=inputs.keys.clone())
            assert inputs.rotation_of_pass(others) is None

    with torch.no_grad(), observing(decoder, VALID, NUMBERS, receive):
        assert torch.equal(decode(decoder, TOKENS), unobserved)
    rotates = [layer.layer_idx for layer in decoder.layers if layer.scheme == "rope"]
    assert set(rotates) <= set(shared) <= {layer.layer_idx for layer in decoder.layers}
    shared.clear()
    # Hooked tables are the pass's alone
    for layer in decoder.layers:
        layer.sites.cosines.register_forward_hook(lambda module, given, tables: 2 * tables)
    with torch.no_grad(), observing(decoder, VALID, NUMBERS, receive):
        assert not torch.equal(decode(decoder, TOKENS), unobserved) or not rotates
    assert not shared
