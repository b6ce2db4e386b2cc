"""Values in the attention inputs: a measure of one's own weighs attention by what is moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from attention_inputs import random_inputs
from families import repositioned
from numpy.testing import assert_allclose
from refusals import refused

import repo_interp as ri
from repo_interp.inputs import select_heads, select_prompts
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.statistics import Statistics
from repo_interp.models.outputs import attention_values
from repo_interp.positions.rotary import expand_heads
from repo_interp.tasks import Prompt

PROMPTS = [Prompt(tuple(range(3, 3 + count))) for count in (9, 12)]


@dataclass(frozen=True)
class Moved:
    """Mean over queries and keys of |a_ij| |v_j|; changes the values that it was given."""

    name: str = "moved"
    required_spans: tuple[str, ...] = ()
    parameters: ClassVar = {}

    def observe(self, inputs, spans):
        rows = torch.arange(inputs.valid.shape[1])
        sizes = expand_heads(inputs.values.norm(dim=-1)[..., None], inputs.heads)[..., 0]
        moved = inputs.pattern(rows).nan_to_num() * sizes[:, :, None]
        inputs.values.zero_()  # a copy: the model goes on with its own
        share = moved.sum((-1, -2)) / inputs.valid.sum(-1)[:, None]
        array = of_layer(inputs, ("prompt", "layer", "head"), share)
        return Statistics(per_prompt=array.to_dataset(name="moved"))

    def conclude(self, statistics):
        return described(statistics.per_prompt["moved"], "weight moved", "1").to_dataset()


@pytest.mark.parametrize(
    ("scheme", "precision", "rtol"), [("repo", torch.float32, 1e-5), ("rope", torch.bfloat16, 0.02)]
)
@torch.no_grad()
def test_a_measure_weighs_attention_by_the_values_that_it_moves(scheme, precision, rtol):
    bridge = ri.bridge(repositioned(scheme).to(precision))
    ids = [torch.tensor([prompt.tokens]) for prompt in PROMPTS]
    before = bridge(ids[0])
    found = ri.analyze(bridge, PROMPTS, (Moved(),), batch_size=2)["moved"]["moved"]
    for number, tokens in enumerate(ids):
        values = {}
        with attention_values(bridge, values.__setitem__):
            _, cache = bridge.run_with_cache(tokens)
        for layer in range(3):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].double()
            norms = values[layer][0].double().norm(dim=-1).repeat_interleave(2, 0)
            moved = (pattern * norms[:, None]).sum((-1, -2)) / tokens.shape[1]
            assert_allclose(found.sel(prompt=number, layer=layer), moved, rtol=rtol)
    some = ri.analyze(bridge, PROMPTS, (Moved(),), layers=[1], heads=[3, 0])["moved"]["moved"]
    ours = found.sel(layer=[1], head=[0, 3])
    assert_allclose(some.sel(head=[0, 3]), ours, rtol=1e-5)
    assert torch.equal(bridge(ids[0]), before)


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
        _ = select_heads(inputs, [0]).values
