"""A needle in a haystack for small models: a small vocabulary, and one hop from the question to the value.

    <bos> filler ... M M v ... filler ... M M v' ... filler  Q c v*

A needle is the marker M twice and a value. There are `classes` x `values_per_class` values (16 x 8); value "c3v5" belongs to
class c3, so the value itself says what it is a value of, and the question "Q c3" is answered by the one value of class c3 in the
context. One hop of attention finds it - no key stands apart from its value, as it would in a two-hop key-value pair, which small
models do not learn in minutes. Each context holds `needles` (8) needles of distinct classes, their classes, values and places
drawn uniformly. The filler is drawn uniformly, with replacement, from `fillers` words. Chance: 1 / values_per_class for a model
that knows the class of a value, 1 / needles for one that knows the context.

Test prompts ask one question. Training sequences ask `questions` of them, Q c v* Q c' v'* ..., about distinct needles: the first
is what a test prompt asks, the others are as much to learn from again. Only answers are targets.

Context lengths, in tokens with everything: a curriculum grows them from `first_length` to `length`; one
length per batch. Test sets are named by the length. Spans: `needle` (parts `needle.1`, `needle.1.key` the
markers, `needle.1.value`), `distractor` (the other needles), `query` (Q c, part `query.key` c); answers are
generated. attributes: length, and depth in percent of the haystack (0 first, 100 last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from repo_interp.errors import InputError
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, Words, WordTask, doublings, whole_number
from repo_interp.tasks.vocabulary import BOS

MARKER, QUESTION = "M", "Q"
NEEDLE = 3
"""Tokens of a needle."""
ASKING = 3
"""Tokens of a question and its answer."""


@dataclass(frozen=True)
class SmallNiah(WordTask):
    """Needle in a haystack for small models. Lengths in tokens."""

    name: ClassVar[str] = "niah"
    axes: ClassVar[tuple[str, ...]] = ("depth", "length")

    length: Number = 256
    first_length: Number = 64
    """Length where the curriculum begins."""
    longest_test: Number = 1024
    """Test sets are length, 2 x length, ... up to this."""
    needles: Number = 8
    questions: Number = 8
    """Needles asked for in a training sequence."""
    classes: Words = 16
    values_per_class: Words = 8
    fillers: Words = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1 <= self.needles <= self.classes, f"wanted 1 to {self.classes} needles, got {self.needles}")
        self._require(1 <= self.questions <= self.needles, f"wanted 1 to {self.needles} questions, got {self.questions}")
        self._require(
            self._shortest(self.questions) <= self.first_length <= self.length <= self.longest_test,
            f"wanted {self._shortest(self.questions)} <= first_length <= length <= longest_test, got "
            f"{self.first_length}, {self.length}, {self.longest_test}",
        )

    def task_words(self) -> tuple[str, ...]:
        """M, Q, classes, values by class, filler words."""
        classes = [f"c{index}" for index in range(self.classes)]
        values = [f"{name}v{index}" for name in classes for index in range(self.values_per_class)]
        return (MARKER, QUESTION, *classes, *values, *(f"w{index}" for index in range(self.fillers)))

    @property
    def training_length(self) -> int:
        """Tokens of the longest sequence to train on."""
        return self.length

    @property
    def test_sets(self) -> tuple[str, ...]:
        """The training length and its doublings."""
        return doublings(self.length, self.longest_test)

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Contexts of one length, which grows from `first_length` to `length`."""
        length = self.first_length + round(progress * (self.length - self.first_length))
        return self._sequences(generator, size, length, self.questions)

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Contexts of one length with one question."""
        length = whole_number(test_set, "the number of tokens")
        if length < self._shortest(1):
            raise InputError(f"{self.needles} needles need at least {self._shortest(1)} tokens, got {length}; ask for more")
        return self._sequences(generator, size, length, 1)

    def _shortest(self, questions: int) -> int:
        """Tokens of a sequence without filler."""
        return 1 + NEEDLE * self.needles + ASKING * questions

    def _sequences(self, generator: np.random.Generator, size: int, length: int, questions: int) -> Batch:
        vocabulary = self.vocabulary
        first_value, first_filler = vocabulary["c0v0"], vocabulary["w0"]
        tokens = generator.integers(first_filler, first_filler + self.fillers, (size, length))
        tokens[:, 0] = BOS
        room = length - 1 - ASKING * questions
        starts = 1 + self._starts(generator, size, room)
        classes = np.argsort(generator.random((size, self.classes)))[:, : self.needles]
        values = first_value + classes * self.values_per_class
        values = values + generator.integers(0, self.values_per_class, values.shape)
        starts = generator.permuted(starts, axis=1)
        rows = np.arange(size)[:, None]
        tokens[rows, starts] = tokens[rows, starts + 1] = vocabulary[MARKER]
        tokens[rows, starts + 2] = values
        tokens[:, 1 + room :: ASKING] = vocabulary[QUESTION]
        tokens[:, 2 + room :: ASKING] = vocabulary["c0"] + classes[:, :questions]
        tokens[:, 3 + room :: ASKING] = values[:, :questions]
        targets = np.zeros(tokens.shape, dtype=bool)
        targets[:, 3 + room :: ASKING] = True
        return Batch(tokens, targets)

    def _starts(self, generator: np.random.Generator, size: int, room: int) -> Int[np.ndarray, "sequence needle"]:
        """Uniform places of needles that do not overlap: choose among slots where a needle is one slot wide."""
        slots = room - (NEEDLE - 1) * self.needles
        chosen = np.sort(np.argsort(generator.random((size, slots)))[:, : self.needles])
        return chosen + (NEEDLE - 1) * np.arange(self.needles)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Spans, the answers and the depths of the needles asked for."""
        marker, question = self.vocabulary[MARKER], self.vocabulary[QUESTION]
        questions = [at for at in range(len(tokens)) if tokens[at] == question]
        answers = {tokens[at + 2] for at in questions}
        starts = [at for at in range(len(tokens) - 1) if tokens[at] == tokens[at + 1] == marker]
        asked = [at for at in starts if tokens[at + 2] in answers]
        spans = {
            "needle": _all(asked, NEEDLE),
            "query": _all(questions, 2),
            "query.key": _all([at + 1 for at in questions], 1),
        }
        if len(asked) < len(starts):
            spans["distractor"] = _all([at for at in starts if at not in asked], NEEDLE)
        for number, at in enumerate(asked, start=1):
            spans[f"needle.{number}"] = (at, at + 1, at + 2)
            spans[f"needle.{number}.key"] = (at, at + 1)
            spans[f"needle.{number}.value"] = (at + 2,)
        generated = _all([at + 2 for at in questions], 1)
        text = self.vocabulary.text(tokens)
        room = max(1, questions[0] - 1 - NEEDLE)
        depths = [round(100 * (at - 1) / room, 3) for at in asked]
        return Prompt(
            tokens=tuple(tokens),
            spans=spans,
            generated=generated,
            token_text=text,
            answers=tuple(text[at] for at in generated),
            attributes={"length": len(tokens), "depth": depths[0] if len(depths) == 1 else None, "depths": depths},
        )


def _all(starts: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple(at + step for at in starts for step in range(width))


SIZES = {"small": SmallNiah(), "paper": SmallNiah(length=4096, first_length=256, longest_test=16384)}
