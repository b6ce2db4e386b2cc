"""The interface of experiments: measurements that need several forward passes.

    experiment.plan(model, scoring, prompts, training_length)    checks the request, counts passes
    plan.run(batch_size, store, progress)                        groups of a run, by name

A task makes and scores prompts; given prompts are scored as `prompt_sets.scoring_of` decides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.measures.fitting import Layers
from repo_interp.storage.store import Progress, Store
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import check_fields

TOKENS = 2048
"""Least number of tokens of a pass, if there are as many."""
PATH_TOKENS = 512
"""The same for passes that keep activations for a backward pass."""
QUICK = 2e11
"""Limit of tokens times parameters for an experiment by default: about half a minute on one core.
"""


@dataclass(frozen=True)
class Plan:
    """The work of an experiment on one model and its prompts."""

    experiment: Experiment
    passes: tuple[int, ...]
    """Tokens of every prompt of every forward pass."""
    run: Callable[[int, Store, Progress | None], dict[str, xr.Dataset]]
    """Function of the batch size, the store of finished points, and a function of progress; returns
    groups of a run.
    """


@dataclass(frozen=True)
class Unasked:
    """An experiment that an analysis makes by default, if the user names none."""

    experiment: Experiment
    work: float = math.inf
    """Most tokens times parameters of its passes; an experiment that needs more is left out.
    Without a limit it is always planned, and a warning says why if that is impossible.
    """


class Experiment(ABC):
    """A measurement of several forward passes: a frozen dataclass; its fields are parameters."""

    name: ClassVar[str]
    """Name of the experiment and of its main group."""
    describes: ClassVar[str] = ""
    """A few words on the result, for `--help`."""
    performance: ClassVar[str] = ""
    """Variables of its group that measure performance on the task, each with a phrase: "variable:
    words; variable: words". "{metric}" stands for the attribute `metric` of the group.
    """
    by_pair: ClassVar[bool] = False
    """Whether it supports positions that differ by rotary pair."""

    def __post_init__(self) -> None:
        """Raises InputError for a field with a wrong type or out of range."""
        # Here and not in every subclass; values may come from the command line or from Python.
        check_fields(self, self.name)  # pyright: ignore[reportArgumentType]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Values of the fields by name, for the attributes of the groups."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # pyright: ignore[reportArgumentType]

    def unasked(self, layers: Layers, task: Scoring | None) -> Unasked | None:
        """Return the experiment that an analysis makes by default.

        Args:
            layers: Layers of the model.
            task: Task of the prompts; None: prompts may have no answer.

        Returns:
            The experiment and its limit; None: not made by default. Subclasses may override this.
        """
        return None

    def completed(self, groups: Mapping[str, xr.Dataset]) -> Mapping[str, xr.Dataset]:
        """Return the groups with data from other groups, after all groups of the run exist.

        Args:
            groups: All groups of the run by name.

        Returns:
            Groups to replace; none unless a subclass overrides this.
        """
        return {}

    @abstractmethod
    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan the passes on `prompts`. Raises InputError if the experiment cannot work."""


def require_targets(experiment: str, scoring: Scoring, prompts: Sequence[Prompt]) -> None:
    """Check that every prompt has targets, and tokens before them.

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
        # No row before token 0 predicts it, and index -1 would silently read the last one.
        if 0 in scoring.targets(prompt):
            raise InputError(
                f"{experiment} judges what is predicted, but no token precedes token 0 "
                f"of prompt {number}; "
                "leave it out of the generated tokens, or begin the prompt with another one"
            )


def score_texts(texts: Mapping[str, str], scoring: Scoring) -> dict[str, str]:
    """Fill the metric and the units of a scoring into long names with units.

    Args:
        texts: Labels by name; {metric} and {units} stand for the name and units of the score.
        scoring: Scores the answers.

    Returns:
        Labels by name.
    """
    known = {"metric": scoring.metric, "units": scoring.units}
    return {name: text.format(**known) for name, text in texts.items()}


def standard_error(scores: Float[np.ndarray, "prompt"]) -> float:
    """Compute the standard error of a mean over prompts.

    Args:
        scores: Score of every prompt.

    Returns:
        The error; NaN for one prompt.
    """
    # A single score has no spread; numpy would warn, and warnings are errors here.
    return float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else float("nan")


def side_by_side(batch_size: int, longest: int) -> int:
    """Choose how many prompts run in one pass.

    Args:
        batch_size: Requested number.
        longest: Tokens of the longest prompt.

    Returns:
        `batch_size`, or more if prompts are short.
    """
    # More for short prompts, since a small pass wastes the device.
    return max(batch_size, TOKENS // longest)
