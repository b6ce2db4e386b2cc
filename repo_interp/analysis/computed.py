"""Stores of finished work, which belong to one question to one model as it computes now.

    question = SHA-256(checkpoint, versions, outputs of the model, options of the question)
    computes = round(100 mean_i h_i / max |mean_i h_i|),
            h_i the last hidden state of token i of one prompt

Hidden states are part of the question because no name and no digest of files shows an active
intervention, or weights edited in memory. They are rounded coarsely, so that the result does not
depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder
from repo_interp.models.provenance import identity
from repo_interp.run import versions
from repo_interp.storage.files import path_of
from repo_interp.storage.store import Store
from repo_interp.tasks.prompt import Prompt


def store_of(
    decoder: Decoder,
    prompt: Prompt,
    question: Mapping[str, Any],
    directory: str | Path | None,
    every: float = 0.0,
) -> Store:
    """Return the store of one question to a model in its current state.

    Args:
        decoder: Decoder of the model.
        prompt: A prompt of the question, on which the model is run to identify it.
        question: Options that decide the result.
        directory: Directory of the store; None: nothing is kept.
        every: Least number of seconds between two writes.

    Returns:
        The store.
    """

    def digest() -> str:
        decisive = {
            # of the stored values; raise it when an older form would be read wrongly
            "form": 2,
            "model": identity(decoder),
            "computes": _summarize_outputs(decoder, prompt),
            "versions": versions(),
            **question,
        }
        return hashlib.sha256(
            # Sorted, so that the order in which a caller builds its options does not matter
            json.dumps(decisive, sort_keys=True, default=str).encode()
        ).hexdigest()

    return Store(
        None if directory is None else path_of(directory, "the directory of a store"), every, digest
    )


def _summarize_outputs(decoder: Decoder, prompt: Prompt) -> list[float]:
    """Return a summary of the model's outputs for `prompt`, with its present hooks and weights."""
    tokens = torch.tensor([prompt.tokens], device=decoder.device)
    with torch.inference_mode():
        mean = (
            decode(decoder, tokens, torch.ones_like(tokens, dtype=torch.bool)).float().mean((0, 1))
        )
    return (100 * mean / mean.abs().max()).round().tolist()
