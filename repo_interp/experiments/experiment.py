"""What an experiment is: a measurement that needs several forward passes, with its parameters,
which plans before anything is run.

    experiment.plan(model, scoring, prompts, training_length)     refuses what cannot work; how many passes, of how many tokens
    plan.run(batch_size, store, progress)                         groups of a run, by name

Prompts and scores are a task's; prompts that were given are scored as `prompt_sets.scoring_of`
says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import xarray as xr
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.store import Progress, Store
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import check_fields

TOKENS = 2048
"""Tokens that are run side by side, at least."""
PATH_TOKENS = 512
"""The same where activations are kept for a backward pass."""


@dataclass(frozen=True)
class Plan:
    """What an experiment will do on one model and its prompts."""

    experiment: Experiment
    passes: tuple[int, ...]
    """Tokens of every prompt of every forward pass."""
    run: Callable[[int, Store, Progress | None], dict[str, xr.Dataset]]
    """Returns groups of a run; takes the number of prompts side by side, the store of finished
    points, and a function of progress.
    """


class Experiment(ABC):
    """A measurement that needs several forward passes: a frozen dataclass whose fields are its
    parameters.
    """

    name: ClassVar[str]
    """Its name, and that of its main group."""

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not of the type and range that it states."""
        check_fields(self, self.name)  # pyright: ignore[reportArgumentType]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Values of the fields by name, as the attributes of its groups record them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # pyright: ignore[reportArgumentType]

    @abstractmethod
    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """What it will do. Raises InputError where it cannot."""


def require_targets(experiment: str, scoring: Scoring, prompts: Sequence[Prompt]) -> None:
    """Check that every prompt has something to predict, and something to predict it from.

    Args:
        experiment: Name for the message.
        scoring: Names the targets of a prompt.
        prompts: Prompts to check.

    Raises:
        InputError: A prompt has no target, or its first token is one.
    """
    for number, prompt in enumerate(prompts):
        if not scoring.targets(prompt):
            raise InputError(
                f"{experiment} judges what is predicted, but prompt {number} has nothing to "
                f"predict for {scoring.name}"
            )
        if 0 in scoring.targets(prompt):
            raise InputError(
                f"{experiment} judges what is predicted, but nothing stands before token 0 "
                f"of prompt {number}; "
                "leave it out of the generated tokens, or begin the prompt with another one"
            )


def side_by_side(batch_size: int, longest: int) -> int:
    """Choose how many prompts run in one pass.

    Args:
        batch_size: Number that was asked for.
        longest: Tokens of the longest prompt.

    Returns:
        `batch_size`, or more where prompts are short.
    """
    return max(batch_size, TOKENS // longest)
