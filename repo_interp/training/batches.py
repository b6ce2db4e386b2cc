"""Prompts as tensors, and which of their tokens the loss is taken on.

    loss = mean over answer tokens t of -log p(token_t | tokens before t)

Answer tokens are a prompt's generated ones. Prompts are padded on the right, where a causal model's answers cannot see it. The prompts
of a step depend on seed and step alone. Knows nothing about models or tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.tasks.prompts import Prompt


@dataclass(frozen=True)
class Batch:
    """Padded prompts and where the model is asked."""

    tokens: Int[Tensor, "prompt token"]
    rows: Int[Tensor, "answer"]
    """The prompt of every answer token."""
    columns: Int[Tensor, "answer"]
    """The token before it: the one that predicts it."""
    targets: Int[Tensor, "answer"]
    """The answer token itself."""


def make_batch(prompts: Sequence[Prompt], device: torch.device | str = "cpu") -> Batch:
    """Pad `prompts` on the right. Raises InputError where a prompt has no answer, or one that nothing stands before."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    rows, columns = [], []
    for row, prompt in enumerate(prompts):
        if not prompt.generated or min(prompt.generated) == 0:
            raise InputError("a prompt to train on needs answer tokens (`generated`), each with a token before it")
        rows += [row] * len(prompt.generated)
        columns += [index - 1 for index in prompt.generated]
    padded = [prompt.tokens + (0,) * (longest - len(prompt.tokens)) for prompt in prompts]
    tokens = torch.tensor(padded, dtype=torch.long)
    row, column = torch.tensor(rows), torch.tensor(columns)
    return Batch(*(part.to(device) for part in (tokens, row, column, tokens[row, column + 1])))


def stream_seed(seed: int, purpose: str, number: int) -> int:
    """A seed for one batch: 63 bits that differ for every seed, purpose ("train", "score") and number."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
