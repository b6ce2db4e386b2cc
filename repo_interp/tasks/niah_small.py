"""A needle in a haystack for small models: a small vocabulary, one hop from question to value.

    <bos> filler ... M M v ... filler ... M M v' ... filler  Q c v*

A needle is the marker M twice and a value. There are `classes` x `values_per_class` values (16 x
8); value "c3v5" belongs to class c3, so the value itself names its class, and the
question "Q c3" is answered by the only value of class c3 in the context. One hop of attention finds
it. A pair of key and value would need two hops, which small models do not learn in minutes. A
context holds `needles` (8) needles of distinct classes, their
classes, values and places drawn uniformly. The filler is drawn uniformly, with replacement, from
`fillers` words. Chance: 1 / values_per_class for a model that knows the class of a value, 1 /
needles for one that knows the context.

Test prompts ask one question. Training sequences ask `questions` of them, Q c v* Q c' v'* ...,
about distinct needles. The first is like the question of a test prompt, the others are additional
training signal. Only answers are targets.

A curriculum grows the length, in tokens of the whole sequence, from `first_length` to `length`, one
length per batch. Test sets are named by the length. Spans: `needle` (parts `needle.1`,
`needle.1.key` the markers, `needle.1.value`), `distractor` (the other needles), `query` (Q c, part
`query.key` c); answers are generated. attributes: length, and depth in percent of the haystack (0
first, 100 last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from repo_interp.tasks.context import ContextTask, places
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, Words
from repo_interp.tasks.vocabulary import BOS

MARKER, QUESTION = "M", "Q"
NEEDLE = 3
"""Number of tokens of a needle."""
ASKING = 3
"""Number of tokens of a question and its answer."""


@dataclass(frozen=True)
class SmallNiah(ContextTask):
    """Needle in a haystack for small models. Lengths in tokens."""

    name: ClassVar[str] = "niah"
    does: ClassVar[str] = "finds a value by its key in a text of {length} random words"
    axes: ClassVar[tuple[str, ...]] = ("depth", "length")

    length: Number = 256
    first_length: Number = 64
    longest_test: Number = 1024
    needles: Number = 8
    questions: Number = 8
    """Number of questions in a training sequence."""
    classes: Words = 16
    values_per_class: Words = 8
    fillers: Words = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            1 <= self.needles <= self.classes,
            f"wanted 1 to {self.classes} needles, got {self.needles}",
        )
        self._require(
            1 <= self.questions <= self.needles,
            f"wanted 1 to {self.needles} questions, got {self.questions}",
        )
        self._require_lengths()

    def task_words(self) -> tuple[str, ...]:
        """M, Q, classes, values by class, filler words."""
        # Values of a class are consecutive: cKvJ has the id of c0v0 + K * values_per_class + J.
        classes = [f"c{index}" for index in range(self.classes)]
        values = [f"{name}v{index}" for name in classes for index in range(self.values_per_class)]
        return (
            MARKER,
            QUESTION,
            *classes,
            *values,
            *(f"w{index}" for index in range(self.fillers)),
        )

    @property
    def _contents(self) -> str:
        return f"{self.needles} needles"

    def _shortest(self, questions: int) -> int:
        return 1 + NEEDLE * self.needles + ASKING * questions

    def _sequences(
        self, generator: np.random.Generator, size: int, length: int, questions: int
    ) -> Batch:
        vocabulary = self.vocabulary
        first_value, first_filler = vocabulary["c0v0"], vocabulary["w0"]
        # Filler everywhere; needles and questions overwrite it
        tokens = generator.integers(first_filler, first_filler + self.fillers, (size, length))
        tokens[:, 0] = BOS
        # Tokens between <bos> and the first question
        room = length - 1 - ASKING * questions
        starts = 1 + self._starts(generator, size, room)
        # Distinct classes per row, in random order
        classes = np.argsort(generator.random((size, self.classes)))[:, : self.needles]
        values = first_value + classes * self.values_per_class
        values = values + generator.integers(0, self.values_per_class, values.shape)
        # Places ascend, and the questions are about the first needles, so places are shuffled.
        starts = generator.permuted(starts, axis=1)
        rows = np.arange(size)[:, None]
        tokens[rows, starts] = tokens[rows, starts + 1] = vocabulary[MARKER]
        tokens[rows, starts + 2] = values
        # Q c v, repeated up to the end
        tokens[:, 1 + room :: ASKING] = vocabulary[QUESTION]
        tokens[:, 2 + room :: ASKING] = vocabulary["c0"] + classes[:, :questions]
        tokens[:, 3 + room :: ASKING] = values[:, :questions]
        targets = np.zeros(tokens.shape, dtype=bool)
        targets[:, 3 + room :: ASKING] = True
        return Batch(tokens, targets)

    def _starts(
        self, generator: np.random.Generator, size: int, room: int
    ) -> Int[np.ndarray, "sequence needle"]:
        """Draw places of needles that do not overlap, uniformly over all layouts."""
        # Drawn as if a needle had width 1, and then widened, so that all layouts are equally likely
        slots = room - (NEEDLE - 1) * self.needles
        chosen = np.sort(np.argsort(generator.random((size, slots)))[:, : self.needles])
        return chosen + (NEEDLE - 1) * np.arange(self.needles)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Read spans, answers and the depths of the needles in the questions."""
        marker, question = self.vocabulary[MARKER], self.vocabulary[QUESTION]
        questions = [at for at in range(len(tokens)) if tokens[at] == question]
        answers = {tokens[at + 2] for at in questions}
        # The marker is not a filler word, so two markers are always a needle.
        starts = [at for at in range(len(tokens) - 1) if tokens[at] == tokens[at + 1] == marker]
        asked = [at for at in starts if tokens[at + 2] in answers]
        spans = {
            "needle": places(asked, 0, NEEDLE),
            "query": places(questions, 0, 2),
            "query.key": places(questions, 1, 2),
        }
        if len(asked) < len(starts):
            spans["distractor"] = places([at for at in starts if at not in asked], 0, NEEDLE)
        for number, at in enumerate(asked, start=1):
            spans[f"needle.{number}"] = (at, at + 1, at + 2)
            spans[f"needle.{number}.key"] = (at, at + 1)
            spans[f"needle.{number}.value"] = (at + 2,)
        generated = places(questions, 2, 3)
        text = self.vocabulary.text(tokens)
        # The last place where a needle can start: depth 100
        room = max(1, questions[0] - 1 - NEEDLE)
        depths = [round(100 * (at - 1) / room, 3) for at in asked]
        return Prompt(
            tokens=tuple(tokens),
            spans=spans,
            generated=generated,
            token_text=text,
            answers=tuple(text[at] for at in generated),
            attributes={
                "length": len(tokens),
                "depth": depths[0] if len(depths) == 1 else None,
                "depths": depths,
            },
        )


SIZES = {
    "small": SmallNiah(),
    "paper": SmallNiah(length=4096, first_length=256, longest_test=16384),
}
