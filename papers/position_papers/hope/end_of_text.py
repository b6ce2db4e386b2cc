"""Language modelling scored on the last tokens of every window (HoPE fig. 5).

    score = mean over the last min(n - 1, m) targets of a window of n tokens of -log p(token_t | tokens before t)

At every length the scored targets then have at least n - m tokens before them. Over all targets of
a long window, most would be predicted from no more tokens than in training. The windows are those
of the task `language`.
"""

from __future__ import annotations

from dataclasses import dataclass

from position_papers.tasks.language import Language
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Number

LAST = 256
"""Number of tokens that the paper scores."""


@dataclass(frozen=True)
class EndOfText(Language):
    """The task `language`, scored on the end of its windows."""

    last: Number = LAST

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the last tokens, but never the first token."""
        return super().targets(prompt)[-self.last :]
