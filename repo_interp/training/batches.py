"""A task's sequences as tensors, and where the model is asked.

    loss = mean over targets t of -log p(token_t | tokens before t)

Sequences are padded on the right, where a causal model's answers cannot see it. The sequences of a step depend on the seed and the
step's number alone. Knows nothing about models.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.tasks import Batch, Task


@dataclass(frozen=True)
class Question:
    """Padded sequences, and their tokens that are to be predicted, sequence by sequence."""

    tokens: Int[Tensor, "sequence token"]
    rows: Int[Tensor, "target"]
    """The sequence of every target."""
    columns: Int[Tensor, "target"]
    """The token before it: the one that predicts it."""
    targets: Int[Tensor, "target"]
    """The token id that stands there."""


def to_question(batch: Batch, device: torch.device | str = "cpu") -> Question:
    """`batch` as tensors on `device`."""
    tokens = torch.from_numpy(np.ascontiguousarray(batch.tokens, dtype=np.int64))
    rows, places = torch.from_numpy(np.ascontiguousarray(batch.targets)).nonzero(as_tuple=True)
    return Question(*(part.to(device) for part in (tokens, rows, places - 1, tokens[rows, places])))


def training_question(
    task: Task, seed: int, number: int, size: int, progress: float, device: torch.device | str = "cpu"
) -> Question:
    """Batch `number` of a training run with `seed`: always the same."""
    return to_question(task.batch(generator_for(seed, "train", number), size, progress), device)


def generator_for(seed: int, purpose: str, number: int) -> np.random.Generator:
    """Random numbers that differ for every seed, purpose and number."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), number])
