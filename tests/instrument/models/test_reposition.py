"""Repositioned decoders: equal to stock where the scheme is stock's, and whole decoders in every
other respect.
"""

import copy

import pytest
import torch
from families import CONFIGS, TOKENS, tiny
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.checkpoint_files.architectures import native_layout
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import mix_with_index


@pytest.mark.parametrize("family", CONFIGS)
def test_learned_positions_mixed_wholly_with_the_index_are_rope(family):
    model = tiny(family)
    model.set_attn_implementation("eager")
    rotated = [
        layer for layer, scheme in enumerate(native_layout(model.config)) if scheme == "rope"
    ]
    with torch.no_grad():
        stock = model(TOKENS).logits
        ri.reposition(model, ",".join("repo" if layer in rotated else "nope" for layer in range(3)))
        learned = model(TOKENS).logits
        mix_with_index(as_decoder(model), 1.0)
        assert_close(model(TOKENS).logits, stock, atol=1e-5, rtol=0)
    assert (learned - stock).abs().max() > 1e-2


def test_checkpointed_gradients_are_plain_ones():
    model = ri.reposition(tiny("llama"), "repo@1").train()
    twin = copy.deepcopy(model)
    twin.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for one in (model, twin):
        one(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for (name, plain), (_, again) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert_close(plain.grad, again.grad, msg=name)


def test_added_parameters_are_those_of_f_phi():
    d, rows, layers = 32, 2, 2
    model = ri.reposition(tiny("llama"), "repo@1/3")
    assert ri.layout(model) == ("rope", "repo", "repo")
    assert ri.added_parameters(model) == layers * (2 * d * (d // 8) + (d // 8) * rows)


def test_repositioning_again_starts_the_new_scheme_afresh():
    model = ri.reposition(tiny("llama"), "rope")
    with torch.no_grad():
        before = model(TOKENS).logits
        ri.reposition(model, "repo")
        mix_with_index(as_decoder(model), 1.0)
        assert_close(model(TOKENS).logits, before)
        assert_close(ri.reposition(model, "rope")(TOKENS).logits, before)
    assert ri.added_parameters(model) == 0
