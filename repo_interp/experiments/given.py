"""Prompts that were given, not made by a task, as a task: what is judged on them when nobody says what they are for.

    Answers    prompts that mark generated tokens: those are the targets; score: exact match, 1 where all of them are likeliest
    Windows    any other text: every token but the first is a target; score: log perplexity, nats a token

Nothing more can be drawn from them, and nothing can be trained on them. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np
from jaxtyping import Float

from repo_interp.errors import InputError
from repo_interp.tasks import Batch, Prompt, Response, Task
from repo_interp.tasks.task import log_perplexity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def given_task(prompts: Sequence[Prompt]) -> Task:
    """How `prompts` are judged: by their generated tokens where all have some, else by every token but the first."""
    vocabulary, longest = 1 + max(max(prompt.tokens) for prompt in prompts), max(len(prompt.tokens) for prompt in prompts)
    kind = Answers if all(prompt.generated for prompt in prompts) else Windows
    return kind(vocabulary, longest)


@dataclass(frozen=True)
class Answers(Task):
    """Prompts with generated tokens, scored by exact match."""

    name: ClassVar[str] = "given prompts"

    vocabulary: int
    """Token ids that occur are below it."""
    longest: int
    """Tokens of the longest prompt."""

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id."""
        return self.vocabulary

    @property
    def training_length(self) -> int:
        """Tokens of the longest prompt."""
        return self.longest

    @property
    def test_sets(self) -> tuple[str, ...]:
        """None: there are only the prompts that were given."""
        return ()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """There is none. Raises InputError."""
        _refuse("a tokenizer")

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Nothing to train on. Raises InputError."""
        _refuse("sequences to train on")

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Nothing more to draw. Raises InputError."""
        _refuse("more prompts")

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Tokens without spans."""
        return Prompt(tokens=tuple(tokens))


@dataclass(frozen=True)
class Windows(Answers):
    """Prompts of plain text, scored by their log perplexity."""

    metric: ClassVar[str] = "log perplexity"
    higher_is_better: ClassVar[bool] = False

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """All but the first."""
        return tuple(range(1, len(prompt.tokens)))

    def score(self, responses: Sequence[Response], prompts: Sequence[Prompt]) -> Float[np.ndarray, " prompt"]:
        """Nats a token."""
        return log_perplexity(self, responses, prompts)


def _refuse(what: str) -> NoReturn:
    raise InputError(f"prompts were given, so there is no task to give {what}; name a task instead")
