"""Prompts of an experiment, and their scoring if there is no task.

    given text     `Windows`: every token but the first is a target; score: log perplexity, nats per
                   token
    given answers  `Answers`: marked generated tokens are the targets; score: 1 if all are the
                   likeliest tokens

This module knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from repo_interp.tasks import Prompt
from repo_interp.tasks.task import PlainText, Scoring


@dataclass(frozen=True)
class Answers(Scoring):
    """Prompts with generated tokens, scored by exact match."""

    name: ClassVar[str] = "given prompts"


@dataclass(frozen=True)
class Windows(PlainText):
    """Prompts of plain text, scored by their log perplexity."""

    name: ClassVar[str] = "given prompts"


def scoring_of(prompts: Sequence[Prompt]) -> Scoring:
    """Choose how given prompts are scored.

    Args:
        prompts: Prompts without a task.

    Returns:
        Exact match of the generated tokens if all prompts have some, else log perplexity.
    """
    # One scoring serves all prompts, so one prompt without an answer makes all of them text.
    return Answers() if all(prompt.generated for prompt in prompts) else Windows()
