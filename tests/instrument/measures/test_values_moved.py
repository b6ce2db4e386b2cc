"""Values in the attention inputs: a measure of one's own weighs attention by what is moved."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    @property
    def parameters(self):
        return {}

    def observe(self, inputs, spans):
        rows = torch.arange(inputs.valid.shape[1])
        sizes = expand_heads(inputs.values.norm(dim=-1)[..., None], inputs.heads)[..., 0]
        moved = inputs.pattern(rows).nan_to_num() * sizes[:, :, None]
        inputs.values.zero_()  # a copy: the model goes on with its own
        share = moved.sum((-1, -2)) / inputs.valid.sum(-1)[:, None]
        return Statistics(
            per_prompt=ri_dataset(of_layer(inputs, ("prompt", "layer", "head"), share))
        )

    def conclude(self, statistics):
        return ri_dataset(described(statistics.per_prompt["moved"], "weight moved", "1"))


def ri_dataset(array):
    return array.to_dataset(name="moved")


@pytest.mark.parametrize(
    ("scheme", "precision"), [("repo", torch.float32), ("rope", torch.bfloat16)]
)
def test_a_measure_weighs_attention_by_the_values_that_it_moves(scheme, precision):
    torch.manual_seed(0)
    bridge = ri.bridge(repositioned(scheme).to(precision))
    with torch.no_grad():
        before = bridge(torch.tensor([PROMPTS[0].tokens]))
    run = ri.analyze(bridge, PROMPTS, (Moved(),), batch_size=2)
    some = ri.analyze(bridge, PROMPTS, (Moved(),), layers=[1], heads=[3, 0])
    values, width = {}, bridge.cfg.n_heads
    for number, prompt in enumerate(PROMPTS):
        count, ids = len(prompt.tokens), torch.tensor([prompt.tokens])
        with attention_values(bridge, values.__setitem__), torch.no_grad():
            _, cache = bridge.run_with_cache(ids)
        for layer in range(3):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].double()
            for head in range(width):
                total = 0.0
                for row in range(count):
                    for key in range(row + 1):
                        norm = values[layer][0, head * 2 // width, key].double().norm()
                        total += float(pattern[head, row, key] * norm)
                found = run["moved"]["moved"].sel(prompt=number, layer=layer, head=head)
                assert_allclose(
                    found, total / count, rtol=1e-5 if precision == torch.float32 else 0.02
                )
    ours = run["moved"]["moved"].sel(layer=[1], head=[0, 3])
    assert_allclose(some["moved"]["moved"].sel(head=[0, 3]), ours, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(bridge(torch.tensor([PROMPTS[0].tokens])), before)


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
