"""Selective copy (Gu and Dao 2023; CoPE, sec. 5.2): copy all tokens except the blanks.

    <bos> D _ _ C F _ F E = D C F F E            _ the blank, = where the answer begins

A sequence has `copied` symbols (256 in the paper), drawn uniformly from an alphabet of 16, and
`blanks` blanks between them at uniform places: 256 in training and, out of distribution, half as
many ("dense", 128) and twice as many ("sparse", 512). Targets are the copied symbols. Score: exact
match.

Spans: `symbols`, `blanks`, `separator`. The answer is generated. attributes: length (tokens),
blanks, and source: for each generated token the index of the token that it copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, WordTask, grown
from repo_interp.tasks.vocabulary import BOS

BLANK, SEPARATOR = "_", "="


@dataclass(frozen=True)
class SelectiveCopy(WordTask):
    """Selective copy. Numbers of tokens."""

    name: ClassVar[str] = "selective_copy"
    does: ClassVar[str] = "copies all symbols but {blanks} blanks"

    symbols: Annotated[int, Interval(ge=2, le=26)] = 16
    """Size of the alphabet, not counting the blank."""
    copied: Number = 32
    first_copied: Number = 4
    """Number of symbols to copy at the start of the curriculum; the number of blanks is reduced in
    proportion.
    """
    blanks: Annotated[int, Interval(ge=2, le=65_536)] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_ascending(1, "first_copied", "copied")

    def task_words(self) -> tuple[str, ...]:
        """The blank, the separator and the letters."""
        return (BLANK, SEPARATOR, *(chr(ord("A") + index) for index in range(self.symbols)))

    @property
    def training_length(self) -> int:
        """The number of tokens of a sequence, including its answer."""
        return 2 + self.blanks + 2 * self.copied

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Sets with as many blanks as in training, with half as many, and with twice as many."""
        return tuple(self._blanks)

    @property
    def _blanks(self) -> dict[str, int]:
        return {
            "in_distribution": self.blanks,
            "dense": self.blanks // 2,
            "sparse": 2 * self.blanks,
        }

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Training sequences of equal length. The number of symbols grows from `first_copied` to
        `copied`, and the number of blanks in proportion.
        """
        copied = grown(self.first_copied, self.copied, progress)
        return self._sequences(
            generator, size, copied, max(1, round(self.blanks * copied / self.copied))
        )

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Sequences with the number of blanks of a test set."""
        self._require_test_set(test_set)
        return self._sequences(generator, size, self.copied, self._blanks[test_set])

    def _sequences(
        self, generator: np.random.Generator, size: int, copied: int, blanks: int
    ) -> Batch:
        first = self.vocabulary["A"]
        symbols = generator.integers(first, first + self.symbols, (size, copied))
        places = np.sort(np.argsort(generator.random((size, copied + blanks)))[:, :copied])
        context = np.full((size, copied + blanks), self.vocabulary[BLANK])
        np.put_along_axis(context, places, symbols, axis=1)
        edges = np.full((size, 1), BOS), np.full((size, 1), self.vocabulary[SEPARATOR])
        tokens = np.concatenate([edges[0], context, edges[1], symbols], axis=1)
        targets = np.zeros(tokens.shape, dtype=bool)
        targets[:, -copied:] = True
        return Batch(tokens, targets)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with its spans and the source of every generated symbol."""
        text = self.vocabulary.text(tokens)
        separator = text.index(SEPARATOR)
        blanks = tuple(at for at in range(separator) if text[at] == BLANK)
        symbols = tuple(at for at in range(1, separator) if text[at] != BLANK)
        return Prompt(
            tokens=tuple(tokens),
            spans={"symbols": symbols, "blanks": blanks, "separator": (separator,)},
            generated=tuple(range(separator + 1, len(tokens))),
            token_text=text,
            answers=(" ".join(text[separator + 1 :]),),
            attributes={"length": len(tokens), "blanks": len(blanks), "source": list(symbols)},
        )


SIZES = {"small": SelectiveCopy(), "paper": SelectiveCopy(copied=256, first_copied=256, blanks=256)}
