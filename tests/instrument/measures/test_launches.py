"""How many operators measuring dispatches: on an accelerator each costs a launch, whatever its size."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import random_inputs
from families import repositioned
from torch.utils._python_dispatch import TorchDispatchMode

import repo_interp as ri
from repo_interp.measures.kernels.heads import Reduction, reduced
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.tasks.prompt import Prompt

SEVEN = ("positions", "patterns", "attention_mass", "components", ThreeAxis(extras=()), "fake_distance", "rotation")
"""Without the fit over learned positions, whose steps depend on how fast it converges."""
MOST = 2300
"""Operators of one layer and its forward pass, within the memory of an accelerator."""


class Counted(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        """Call `operator`."""
        self.count += 1
        return operator(*arguments, **(keywords or {}))


def launches(model, tokens, memory):
    drawn = torch.randint(3, 60, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = Prompt(tokens=tuple(drawn), spans={"needle": (3, 4)}, generated=(tokens - 2, tokens - 1))
    with ri.working_memory(memory), Counted() as counted:
        ri.analyze(model, [prompt], SEVEN, layers=(0,), progress=lambda done, total: None)
    return counted.count


def test_an_accelerators_memory_takes_few_launches_whatever_the_length():
    """Found: 33,436 in a layer of 4,096 tokens, 9,380 in one of 1,024."""
    model = repositioned("repo")
    short, long = (launches(model, tokens, 2**31) for tokens in (256, 1024))
    assert short == long <= MOST
    assert launches(model, 1024, 2**18) > 1.5 * long


class TooLarge(Reduction):
    """Runs out of memory for more than one key at a time, as a small card does."""

    def start(self, inputs):
        return torch.zeros(inputs.heads)

    def add(self, result, inputs, block):
        if block.head.shape[0] > 1:
            raise torch.OutOfMemoryError
        result[block.head.flatten()] += 1

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return self is other


def test_out_of_memory_halves_the_blocks_and_begins_again():
    inputs = random_inputs(prompts=1, heads=4, kv_heads=4, tokens=2048, d_head=64)
    (counts,) = reduced(inputs, [TooLarge()])
    assert counts.tolist() == [1.0] * 4


@pytest.mark.parametrize("bytes", [0, -1, 1.5, True, "1 GiB"])
def test_working_memory_is_a_number_of_bytes(bytes):
    with pytest.raises(ri.InputError, match="positive whole number of bytes"), ri.working_memory(bytes):
        pass
