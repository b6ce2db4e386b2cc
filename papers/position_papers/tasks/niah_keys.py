"""A needle in a haystack that needs positions: keys that differ only in the order of their words,
and values of several tokens.

    <bos> filler ... M a b x y z ... filler ... M b a x' y' z' ... filler  Q a b x y z  Q c a ...

A needle is the marker M, a key and a value. The keys of a context are ordered selections of
`key_tokens` (2) words from the same few `shared` (3) words, which are drawn from `key_words`. So
most words occur in several keys, many keys also occur in reverse order, and the words near a value
do not reveal its key. A value is `value_tokens` (3) words, drawn with replacement from
`value_words`, or from `shared_values` of them, chosen anew in every context. With `shared_values`,
values resemble one another, so the preceding tokens of a value do not reveal which value it is. The
answer gives the words in order. `doubled` keys have two needles; the answer then gives both values,
in the order of the context. The filler is drawn uniformly, with replacement, from `fillers` words.
Unlike the needles of `niah_small`, whose values name their class, no needle can be found by its
tokens alone: a model that cannot distinguish "before" from "after" can only guess one of `needles`.

Test prompts ask `test_questions` questions about distinct keys, one after the other; training
sequences ask `questions`. Only values are targets. Score: the share of requested values with every
token correct.

The context length counts all tokens. A curriculum increases it from `first_length` to `length`; all
sequences of a batch have the same length. Test sets are named by the length. Spans: `needle` (all
requested needles; parts `needle.1`, `needle.1.key` a b, `needle.1.value`, in the order of the
context), `distractor` (the other needles), `query` (all Q a b, part `query.key`). Values are
generated. attributes: length, `depths` of the requested needles, in percent of the haystack (0
first, 100 last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import perm
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from repo_interp.tasks.context import ContextTask, places
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, Response, Words
from repo_interp.tasks.vocabulary import BOS
from repo_interp.values import CountOrNone

MARKER, QUESTION = "M", "Q"


@dataclass(frozen=True)
class KeyedNiah(ContextTask):
    """Needle in a haystack whose keys share their words. Lengths in tokens."""

    name: ClassVar[str] = "niah_keys"
    does: ClassVar[str] = "finds values by the order of their keys' words in {length} random words"
    metric: ClassVar[str] = "share of the values found"

    length: Number = 128
    first_length: Number = 64
    longest_test: Number = 512
    needles: Number = 4
    doubled: CountOrNone = 0
    """Number of keys with two needles."""
    questions: Number = 4
    """Number of questions in a training sequence."""
    test_questions: Number = 2
    """Number of questions in a test prompt."""
    key_tokens: Number = 2
    value_tokens: Number = 3
    shared: Number = 3
    """Number of different words in the keys of a context."""
    shared_values: CountOrNone = 0
    """Number of words from which the values of a context are drawn; 0: all `value_words`."""
    key_words: Words = 16
    value_words: Words = 32
    fillers: Words = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = self.needles - self.doubled
        self._require(
            self.key_tokens <= self.shared <= min(8, self.key_words),
            f"wanted key_tokens <= shared <= 8 and key_words, got {self.key_tokens}, "
            f"{self.shared}, {self.key_words}",
        )
        self._require(
            max(1, self.doubled) <= keys <= perm(self.shared, self.key_tokens),
            f"wanted at least 1 and {self.doubled} keys, and at most the "
            f"{perm(self.shared, self.key_tokens)} orders of their words, "
            f"got {keys}: needles without those of a doubled key",
        )
        self._require(
            self.shared_values <= self.value_words,
            f"wanted at most the {self.value_words} value_words as shared_values, "
            f"got {self.shared_values}",
        )
        for name in ("questions", "test_questions"):
            self._require(
                1 <= getattr(self, name) <= keys,
                f"wanted {name} from 1 to the {keys} keys, got {getattr(self, name)}",
            )
        self._require_lengths()

    def task_words(self) -> tuple[str, ...]:
        """M, Q, and the words of keys, values and filler."""
        words = (("k", self.key_words), ("v", self.value_words), ("w", self.fillers))
        return (
            MARKER,
            QUESTION,
            *(f"{letter}{index}" for letter, count in words for index in range(count)),
        )

    @property
    def _contents(self) -> str:
        return f"{self.needles} needles and their questions"

    @property
    def _test_questions(self) -> int:
        return self.test_questions

    @property
    def _needle(self) -> int:
        """The number of tokens of a needle, which is also that of a question with one value."""
        return 1 + self.key_tokens + self.value_tokens

    def _shortest(self, questions: int) -> int:
        """The number of tokens of a sequence without filler whose questions include as many doubled
        keys as possible.
        """
        return (
            1
            + self._needle * (self.needles + questions)
            + self.value_tokens * min(questions, self.doubled)
        )

    def _sequences(
        self, generator: np.random.Generator, size: int, length: int, questions: int
    ) -> Batch:
        return Batch(
            *map(
                np.stack,
                zip(
                    *(self._sequence(generator, length, questions) for _ in range(size)),
                    strict=True,
                ),
            )
        )

    def _sequence(
        self, generator: np.random.Generator, length: int, questions: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """One sequence, and a mask of the tokens of its answers."""
        marker, question, first_key, first_value, first_filler = self.vocabulary.ids(
            (MARKER, QUESTION, "k0", "v0", "w0")
        )
        words = first_key + generator.permutation(self.key_words)[: self.shared]
        orders = list(permutations(words.tolist(), self.key_tokens))
        keys = [
            orders[index]
            for index in generator.permutation(len(orders))[: self.needles - self.doubled]
        ]
        key_of = generator.permutation([*range(len(keys)), *range(self.doubled)])
        shape = self.needles, self.value_tokens
        if self.shared_values:
            among = generator.permutation(self.value_words)[: self.shared_values]
            values = first_value + generator.choice(among, shape)
        else:
            values = first_value + generator.integers(0, self.value_words, shape)
        ending, answers = [], []
        for key in generator.permutation(len(keys))[:questions]:
            ending += [question, *keys[key]]
            for needle in np.flatnonzero(key_of == key):
                answers += range(len(ending), len(ending) + self.value_tokens)
                ending += values[needle].tolist()
        room = length - 1 - len(ending)
        # Draw uniform places of needles that do not overlap: choose among slots, each needle
        # taking one.
        slots = generator.permutation(room - (self._needle - 1) * self.needles)[: self.needles]
        starts = 1 + np.sort(slots) + (self._needle - 1) * np.arange(self.needles)
        filler = generator.integers(first_filler, first_filler + self.fillers, room)
        tokens, targets = np.array([BOS, *filler, *ending]), np.zeros(length, dtype=bool)
        for needle, start in enumerate(starts):
            tokens[start : start + self._needle] = [marker, *keys[key_of[needle]], *values[needle]]
        targets[1 + room + np.array(answers)] = True
        return tokens, targets

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with its spans, its answers and the depths of the requested needles."""
        marker, question = self.vocabulary.ids((MARKER, QUESTION))
        questions = [at for at, token in enumerate(tokens) if token == question]
        to_value = 1 + self.key_tokens
        asked = {tuple(tokens[at + 1 : at + to_value]) for at in questions}
        starts = [at for at, token in enumerate(tokens) if token == marker]
        mine = [at for at in starts if tuple(tokens[at + 1 : at + to_value]) in asked]
        spans = {
            "needle": places(mine, 0, self._needle),
            "query": places(questions, 0, to_value),
            "query.key": places(questions, 1, to_value),
        }
        if len(mine) < len(starts):
            spans["distractor"] = places([at for at in starts if at not in mine], 0, self._needle)
        for number, at in enumerate(mine, start=1):
            spans[f"needle.{number}"] = places([at], 0, self._needle)
            spans[f"needle.{number}.key"] = places([at], 1, to_value)
            spans[f"needle.{number}.value"] = places([at], to_value, self._needle)
        ends = [*questions[1:], len(tokens)]
        answers = [range(at + to_value, end) for at, end in zip(questions, ends, strict=True)]
        text = self.vocabulary.text(tokens)
        room = max(1, questions[0] - 1 - self._needle)
        return Prompt(
            tokens=tuple(tokens),
            spans=spans,
            generated=tuple(at for answer in answers for at in answer),
            token_text=text,
            answers=tuple(" ".join(text[at] for at in answer) for answer in answers),
            attributes={
                "length": len(tokens),
                "depths": [round(100 * (at - 1) / room, 3) for at in mine],
            },
        )

    def score(
        self, responses: Sequence[Response], prompts: Sequence[Prompt]
    ) -> Float[np.ndarray, " prompt"]:
        """The share of requested values in each prompt with every token correct."""
        right = self.right(responses, prompts)
        return np.array(
            [targets.reshape(-1, self.value_tokens).all(axis=1).mean() for targets in right]
        )


SIZES = {
    "small": KeyedNiah(),
    "paper": KeyedNiah(
        length=4096,
        first_length=256,
        longest_test=16384,
        needles=12,
        doubled=2,
        questions=8,
        test_questions=4,
        shared=4,
    ),
}
