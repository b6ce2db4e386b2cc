"""Hard attention against the argmax of the logits, layer by layer."""

import pytest
import torch
from families import tiny
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder

TOKENS = torch.stack([torch.arange(3, 23), torch.arange(62, 42, -1)])  # without ties


@pytest.mark.parametrize(("layout", "layers"), [("cope", None), ("learned", None), ("rope", [1])])
def test_a_query_reads_the_key_of_its_largest_logit(layout, layers):
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), layout)
    model.set_attn_implementation("eager")
    for layer in as_decoder(model).layers if layout == "cope" else ():
        vectors = layer.position_logits.position_map.weight
        assert len(vectors) == 128  # p_max = T by default
        torch.nn.init.normal_(vectors)
    valid, rows, found = torch.ones_like(TOKENS, dtype=torch.bool), torch.arange(20), []
    soft = model(TOKENS).logits
    with ri.interventions.hard_attention(model, layers):
        output = model(TOKENS, output_attentions=True)
        capture(as_decoder(model), TOKENS, valid, torch.arange(2), found.append)
    for inputs, pattern in zip(found, output.attentions, strict=True):
        sharp = (inputs.logits(rows).double() * 1e9).softmax(-1).float()  # tau = 1e-9
        is_hard = layers is None or inputs.layer in layers
        assert_close(pattern, sharp if is_hard else inputs.pattern(rows), atol=1e-5, rtol=1e-5)
    if layout == "cope":  # gates count every key as before
        assert found[0].gate_features is not None
        assert found[0].position_logits(rows).abs().max() > 0
    assert (output.logits - soft).abs().max() > 0.01
    assert_close(model(TOKENS).logits, soft)
    output.logits.square().mean().backward()
    for layer in as_decoder(model).layers:
        assert float(layer.module.q_proj.weight.grad.abs().max()) > 0
    for layer in (7, [7]):
        with refused("layer 7 was asked for"), ri.interventions.hard_attention(model, layer):
            pass
    with refused("layer -1 was asked for"), ri.interventions.hard_attention(model, -1):
        pass
