"""Tasks with questions after a context: the common parts of `niah_small` and `niah_keys`.

    <bos> contents and filler ...   question answer   question answer ...     `length` tokens in all

A curriculum grows the length from `first_length` to `length`, one length per batch, with
`questions` questions. Test sets are named by the length: `length`, 2 x `length`, ... up to
`longest_test`; their prompts have one question unless a task differs. The filler takes the rest of
the length, so contents and questions must fit into the shortest length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from repo_interp.errors import InputError
from repo_interp.tasks.task import Batch, Number, WordTask, doublings, grown, whole_number


class ContextTask(WordTask):
    """Questions after a context.

    A task declares these options as fields, in any order and with its defaults.
    """

    axes: ClassVar[tuple[str, ...]] = ("length",)

    length: Number
    """Tokens of the longest training sequence."""
    first_length: Number
    """Initial length of the curriculum."""
    longest_test: Number
    """Longest test set; the sets are length, 2 x length, ..."""
    questions: Number
    """Number of questions of a training sequence."""

    @property
    @abstractmethod
    def _contents(self) -> str:
        """Contents of a context for messages, such as "8 needles"."""

    @property
    def _test_questions(self) -> int:
        """Questions of a test prompt."""
        return 1

    @abstractmethod
    def _shortest(self, questions: int) -> int:
        """Tokens of a sequence without filler."""

    @abstractmethod
    def _sequences(
        self, generator: np.random.Generator, size: int, length: int, questions: int
    ) -> Batch:
        """Make `size` sequences of `length` tokens with `questions` questions."""

    def _require_lengths(self) -> None:
        # Contents and questions must fit into the shortest sequence of the curriculum
        self._require_ascending(
            self._shortest(self.questions), "first_length", "length", "longest_test"
        )

    @property
    def training_length(self) -> int:
        """Tokens of the longest sequence to train on."""
        return self.length

    @property
    def test_sets(self) -> tuple[str, ...]:
        """The training length and its doublings."""
        return doublings(self.length, self.longest_test)

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Make sequences of one length, which grows from `first_length` to `length`."""
        # One length per batch, so that no sequence is padded
        return self._sequences(
            generator, size, grown(self.first_length, self.length, progress), self.questions
        )

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Make sequences of one length with the questions of a test prompt."""
        length, shortest = (
            whole_number(test_set, "the number of tokens"),
            self._shortest(self._test_questions),
        )
        if length < shortest:
            raise InputError(
                f"{self._contents} need at least {shortest} tokens, got {length}; ask for more"
            )
        return self._sequences(generator, size, length, self._test_questions)


def places(starts: Sequence[int], first: int, end: int) -> tuple[int, ...]:
    """List the places of one part of several needles or questions of equal width.

    Args:
        starts: First places of the needles or questions.
        first: Begin of the part, relative to a start.
        end: End of the part, relative to a start.

    Returns:
        Places in the order of `starts`.
    """
    return tuple(at + step for at in starts for step in range(first, end))
