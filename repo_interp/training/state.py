"""Everything a training run needs to go on with the same bytes: weights, optimiser, step, generators of random numbers, log.

Learning rate, difficulty and the prompts of a step are functions of its number (`schedule`, `batches`), so the number is all that is
kept of them. Knows nothing about directories.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from repo_interp.errors import InputError
from repo_interp.training.folder import replace_file


@dataclass
class Moment:
    """Where a run stands between two steps."""

    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Time spent in all sessions."""
    log_size: int = 0
    """Bytes of the log that belong to the steps done."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last record."""


def save_state(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, moment: Moment) -> None:
    """Write the state, whole or not at all."""
    buffer = io.BytesIO()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "moment": vars(moment),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, buffer)
    replace_file(file, buffer.getvalue())


def load_state(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Moment:
    """Put model, optimiser and random numbers back where `file` says; the beginning where there is no file.

    Raises InputError when the file is damaged or belongs to another model.
    """
    if not file.exists():
        return Moment()
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])
        return Moment(**state["moment"])
    except (RuntimeError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{file} does not hold the state of this run ({' '.join(str(error).split())[:120]}); begin anew with --overwrite"
        ) from None
