"""Language modelling scored on the last tokens of every window (HoPE fig. 5).

    score = mean over the last min(n - 1, m) targets of a window of n tokens of -log p(token_t | tokens before t)

Every length is then scored on targets that have at least n - m tokens before them: over all targets,
most of a long window's would be predicted from no more tokens than in training. The windows are
those of the task `language`.
"""

from __future__ import annotations

from dataclasses import dataclass

from position_papers.tasks.language import Language
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Number

LAST = 256
"""Tokens that the paper scores."""


@dataclass(frozen=True)
class EndOfText(Language):
    """The task `language`, scored on the end of its windows."""

    last: Number = LAST

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """The last tokens; never the first."""
        return super().targets(prompt)[-self.last :]
