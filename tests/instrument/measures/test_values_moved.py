"""Values in the attention inputs: those of the pass, read on demand."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import random_inputs
from families import TOKENS, repositioned
from refusals import refused

import repo_interp as ri
from repo_interp.inputs import select_heads, select_prompts
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.models.outputs import attention_values


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_values_are_those_of_the_pass_and_a_copy(precision):
    bridge = ri.bridge(repositioned("rope,nope,repo").to(precision))
    expected, found = {}, {}
    with attention_values(as_decoder(bridge), expected.__setitem__):
        bridge(TOKENS)

    def read(inputs):
        found[inputs.layer] = inputs.values.clone()
        inputs.values.zero_()  # else layers above would have other ones

    capture(
        as_decoder(bridge), TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), torch.arange(2), read
    )
    for layer, values in expected.items():
        assert found[layer].shape == (2, 2, 20, 8)
        torch.testing.assert_close(found[layer], values.float(), atol=0, rtol=0)


def test_values_are_read_on_demand_and_follow_prompts_and_heads():
    inputs, asked = random_inputs(heads=4, kv_heads=2), []
    values = torch.randn(2, 2, 24, 5)

    def read():
        asked.append(1)
        return values

    given = replace(inputs, read_values=read)
    one = select_prompts(select_heads(given, [3, 0, 1]), slice(1, 2))
    assert not asked, "nothing is copied where nobody asks"
    torch.testing.assert_close(one.values, values[1:, [1, 0, 0]])
    assert given.values is values and len(asked) == 2
    with refused(r"lack values; set AttentionInputs\.read_values"):
        _ = select_heads(replace(inputs, read_values=None), [0]).values
