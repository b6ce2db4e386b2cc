"""The direct path: what heads add to a logit is what attention adds to the residual stream, read by the unembedding, in every family."""

from __future__ import annotations

import pytest
import torch
from families import CONFIGS, tiny

import repo_interp as ri
from repo_interp.models.capture import capture
from repo_interp.models.direct_path import NORMS_OUTPUT, direct_path, inner
from repo_interp.models.reposition import attentions, decoder_of
from repo_interp.positions.rotary import expand_heads

ROWS = torch.tensor([3, 9])
ANSWERS = torch.tensor([7, 20])


def hooks_of(model):
    return [hook for module in model.modules() for hook in module._forward_hooks]


def written_by_attention(model, tokens) -> dict[int, torch.Tensor]:
    """What attention adds to the residual stream in each layer [token, width], after any norm of its output."""
    added: dict[int, torch.Tensor] = {}
    handles = []
    for number, layer in enumerate(decoder_of(model).layers):
        normed = decoder_of(model).config.model_type in NORMS_OUTPUT
        module = layer.post_attention_layernorm if normed else layer.self_attn

        def keep(module, arguments, output, number=number):
            added[number] = (output[0] if isinstance(output, tuple) else output)[0]

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        decoder_of(model)(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return added


@pytest.mark.parametrize("family", CONFIGS)
def test_contributions_of_all_heads_and_keys_are_those_of_attention(family):
    model = ri.reposition(tiny(family), "repo@1")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    before = hooks_of(model)
    tokens = torch.randint(3, 64, (1, 12))
    moved: dict[int, torch.Tensor] = {}

    def receive(inputs):
        values = expand_heads(path.values.pop(inputs.layer), inputs.heads)[0]
        moved[inputs.layer] = (inputs.logits(ROWS)[0].softmax(-1) @ values).transpose(0, 1)

    with direct_path(model) as path:
        capture(model, tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros(1, dtype=torch.long), receive)
        found = {layer: path.contributions(layer, values, ROWS, ANSWERS) for layer, values in moved.items()}
    final = {}
    handle = decoder_of(model).norm.register_forward_hook(
        lambda module, given, output: final.update(given=given[0], output=output)
    )
    added = written_by_attention(model, tokens)
    handle.remove()
    unembedding = inner(model.get_output_embeddings()).weight.detach()
    factors = final["output"][0] / final["given"][0]  # elementwise: gain times the factor of the row
    directions = (unembedding[ANSWERS] - unembedding.mean(0)) * factors[ROWS]
    for layer, contributions in found.items():
        expected = (added[layer][ROWS] * directions).sum(-1)
        torch.testing.assert_close(contributions.sum(-1), expected.detach(), rtol=2e-4, atol=2e-5)
    assert set(found) == {attention.layer_idx for attention in attentions(model)}
    assert hooks_of(model) == before
