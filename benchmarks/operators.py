"""Operators that measuring one layer more dispatches, within an accelerator's memory: `python -m
benchmarks.operators [TOKENS ...]`.

One layer of OLMo-2-1B's shape and its forward pass, seven measures. An accelerator needs 5 to 10
microseconds for each, whatever its size; counted on a processor, where a triangle is solved by
scipy instead of by some 70 operators.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Olmo2Config

import repo_interp as ri
from benchmarks.shapes import _config, model_of, prompt_of
from repo_interp.measures.three_axis import ThreeAxis

MEMORY = 2**31
"""Bytes of a kernel."""
MEASURES = (
    "positions",
    "patterns",
    "attention_mass",
    "components",
    ThreeAxis(extras=()),
    "fake_distance",
    "rotation",
)
"""Without the fit over learned positions, whose steps depend on how fast it converges."""


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def operators(model: Any, tokens: int, layers: Sequence[int]) -> Counter[str]:
    """Return how often an analysis of some layers of a prompt of `tokens` tokens dispatches each
    operator.
    """
    prompt = prompt_of(tokens, 1024)
    with ri.working_memory(MEMORY), Counted() as counted:
        ri.analyze(model, [prompt], MEASURES, layers=layers, progress=lambda done, total: None)
    return counted.counts


def main(lengths: Sequence[int]) -> None:
    """Print a row per length."""
    model = ri.reposition(model_of(_config(Olmo2Config, 2, 2048, 16, 16, 8192, 1024)), "repo")
    for tokens in lengths:
        operators(model, tokens, (0,))  # tables that depend on a length are made once
        one, two = operators(model, tokens, (0,)), operators(model, tokens, (0, 1))
        per_layer = (two - one).total()
        sys.stdout.write(
            f"{tokens} tokens: {per_layer} operators per layer, {one.total()} for a call "
            "with one layer\n"
        )


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1024, 4096])
