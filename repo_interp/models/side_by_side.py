"""Batches: prompts of similar length, up to a number of prompts or tokens.

    batches(order, lengths, 8)                       at most 8 prompts
    batches(order, lengths, SideBySide(tokens=4096)) as many as fit into 4096 tokens with their
                                                     padding, at least one
    restore_order(cut, results)                      results by prompt, from those by batch

This module knows nothing about models and prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from repo_interp.errors import InputError, quoted

Item = TypeVar("Item")
WORTHWHILE = {"cpu": 2048, "cuda": 32_768}
"""Tokens side by side, by kind of device, beyond which a pass gets no faster per token.

Measured on one thread of a processor: in a small model 54 us per token with 128 side by side, and
17 with 2,048 and with 16,384; in a large model the same time with each. Not measured on CUDA.
"""


@dataclass(frozen=True)
class SideBySide:
    """Limits of one forward pass; a single prompt is always allowed."""

    prompts: int = 1024
    tokens: int = 1 << 62
    """Most tokens, including padding."""
    padding: int = 1 << 62
    """Largest difference in tokens between a prompt and the first one of its batch."""

    def __post_init__(self) -> None:
        """Raises InputError if no prompt would go through."""
        # Anything that counts as a whole number, numpy's too; True is 1 to Python.
        if isinstance(self.prompts, bool) or not hasattr(self.prompts, "__index__"):
            raise InputError(
                f'a batch is a number of prompts, or "auto"; got {quoted(self.prompts)}'
            )
        if self.prompts < 1:
            raise InputError(f"a batch has at least one prompt, not {self.prompts}")

    def of_length(self, length: int) -> int:
        """Return the number of prompts of a length that go through together.

        Args:
            length: Tokens of a prompt.

        Returns:
            At least 1.
        """
        return max(1, min(self.prompts, self.tokens // max(1, length)))


BatchSize = int | SideBySide
"""A number of prompts, or limits of a batch."""


def limit(size: BatchSize) -> SideBySide:
    """Return a batch size as limits.

    Args:
        size: Number of prompts, or limits.

    Returns:
        The limits.

    Raises:
        InputError: No prompt would go through.
    """
    return size if isinstance(size, SideBySide) else SideBySide(prompts=size)


def restore_order(cut: Iterable[Sequence[int]], results: Iterable[Sequence[Item]]) -> list[Item]:
    """Reorder results of batches by number.

    Args:
        cut: Numbers of every batch, together 0, 1, ...
        results: Results of every batch, one per number.

    Returns:
        Results in the order of the numbers.
    """
    by_number = {
        number: made
        for some, of_some in zip(cut, results, strict=True)
        for number, made in zip(some, of_some, strict=True)
    }
    return [by_number[number] for number in range(len(by_number))]


def by_prompt(
    progress: Callable[[int, int], None] | None, cut: Sequence[Sequence[int]]
) -> Callable[[int, int], None] | None:
    """Make a progress function of batches that reports prompts.

    Args:
        progress: Function of prompts done and in all; None: nothing is reported.
        cut: Numbers of the prompts of every batch, in the order of the batches.

    Returns:
        Function of batches done and in all; None without `progress`.
    """
    # done[b] is the number of prompts in the first b batches.
    done = [0, *accumulate(map(len, cut))]
    return progress and (lambda batches, _: progress(done[batches], done[-1]))


def batches(order: Sequence[int], lengths: Sequence[int], size: BatchSize) -> list[list[int]]:
    """Cut an order of prompts into batches.

    With the order sorted by length, little is padded.

    Args:
        order: Numbers of the prompts.
        lengths: Tokens by number.
        size: Number of prompts, or limits.

    Returns:
        Numbers of every batch, in the order given.
    """
    most, longest = limit(size), 0
    cut: list[list[int]] = []
    for number in order:
        # Padding counts: every prompt takes as many tokens as the longest of its batch.
        longest = max(longest, lengths[number])
        alike = bool(cut) and abs(lengths[number] - lengths[cut[-1][0]]) <= most.padding
        if alike and len(cut[-1]) < most.of_length(longest):
            cut[-1].append(number)
        else:
            cut.append([number])
            longest = lengths[number]
    return cut
