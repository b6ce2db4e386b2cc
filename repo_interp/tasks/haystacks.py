"""Needles and questions of RULER's needle-in-a-haystack tasks, and their three haystacks.

    One of the special magic {type} for {key} is: {value}.

    type     numbers, words, uuids - always plural
    noise    `size` times the line "The grass is green. ...", needles before uniformly drawn lines
    needle   `size` lines, all needles with random key and value, likewise
    essay    the first `size` words of a prose text; a needle of depth p goes before sentence
             int(sentences * p / 100), depths drawn without replacement from
             round(linspace(0, 100, 40)) and sorted

Numbers have 7 digits, words are "adjective-noun", uuids are version 4. Keys and values of one
prompt are distinct, so the question has one answer. A haystack is a pure function of its size;
`niah`, which knows the tokens, searches for the largest size that fits.
"""

from __future__ import annotations

import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from repo_interp.tasks.essay import Essay
from repo_interp.tasks.prompt.text import MarkedText
from repo_interp.tasks.vocabulary import ADJECTIVES, NOUNS

DRAW: dict[str, Callable[[random.Random], str]] = {
    "numbers": lambda rng: str(rng.randrange(10**6, 10**7)),
    "words": lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}",
    # Not uuid4(), which draws from the system and differs in every run
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# RULER's 40 depths
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, 40)))


@dataclass(frozen=True)
class Needle:
    """A sentence of the haystack that holds a value for a key."""

    value_type: str
    key: str
    value: str
    number: int | None
    """1-based place among the needles in the question, in text order; None for a distractor.
    """

    def write(self, text: MarkedText) -> None:
        """Write the needle with its spans at the end of a text.

        Args:
            text: Text to write to.
        """
        span = "distractor" if self.number is None else f"needle.{self.number}"
        key = "distractor" if self.number is None else f"{span}.key"
        value = "distractor" if self.number is None else f"{span}.value"
        text.add(f"One of the special magic {self.value_type} for ", span)
        # Pieces name their part, and `MarkedText` adds them to the parents needle.1 and needle
        text.add(self.key, key)
        text.add(" is: ", span)
        text.add(self.value, value)
        text.add(".", span)


@dataclass(frozen=True)
class NeedleQuestion:
    """Needles in the order in which they are placed, and keys in the order of the question."""

    key_type: str
    value_type: str
    needles: tuple[Needle, ...]
    queries: tuple[str, ...]

    @property
    def references(self) -> tuple[str, ...]:
        """Values of the keys in the question, key by key; values of a key are in text order."""
        return tuple(
            needle.value for query in self.queries for needle in self.needles if needle.key == query
        )

    @property
    def singular(self) -> bool:
        """Whether the answer is a single value."""
        return len(self.references) == 1

    @property
    def asked_type(self) -> str:
        """Name of the type in the question."""
        return self.value_type.removesuffix("s") if self.singular else self.value_type

    @property
    def asked(self) -> str:
        """The keys as a phrase in the question."""
        return join_names(self.queries)

    def distractor(self, rng: random.Random) -> Needle:
        """Draw a needle with a key and a value that differ from all needles of the question.

        Args:
            rng: Source of randomness.

        Returns:
            The needle.
        """
        # A repeated key would give the question a second answer.
        key = _draw(rng, self.key_type, [needle.key for needle in self.needles])
        value = _draw(rng, self.value_type, [needle.value for needle in self.needles])
        return Needle(self.value_type, key, value, None)


def join_names(names: Sequence[str]) -> str:
    """Join names as in English: a; a and b; a, b, and c.

    Args:
        names: At least one name.

    Returns:
        One text.
    """
    if len(names) <= 2:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def draw_question(
    rng: random.Random, key_type: str, value_type: str, keys: int, values: int, queries: int
) -> NeedleQuestion:
    """Draw keys with values, and the keys in the question.

    Args:
        rng: Source of randomness.
        key_type: Type of the keys, one of `DRAW`.
        value_type: Type of the values, one of `DRAW`.
        keys: Number of keys.
        values: Values of a key.
        queries: Number of keys in the question.

    Returns:
        The question, its needles in random order.
    """
    drawn_keys: list[str] = []
    drawn_values: list[str] = []
    pairs = []
    for _ in range(keys):
        drawn_keys.append(_draw(rng, key_type, drawn_keys))
        for _ in range(values):
            drawn_values.append(_draw(rng, value_type, drawn_values))
            pairs.append((drawn_keys[-1], drawn_values[-1]))
    # Otherwise values of a key would be adjacent
    rng.shuffle(pairs)
    asked = rng.sample(drawn_keys, queries)
    # Numbers follow the text, since depths are sorted before needles get them
    numbers = iter(range(1, len(pairs) + 1))
    needles = tuple(
        Needle(value_type, key, value, next(numbers) if key in asked else None)
        for key, value in pairs
    )
    return NeedleQuestion(key_type, value_type, needles, tuple(asked))


def _draw(rng: random.Random, kind: str, taken: Collection[str]) -> str:
    # There are thousands of words and few needles, so a second draw is rare.
    while (drawn := DRAW[kind](rng)) in taken:
        pass
    return drawn


@dataclass(frozen=True)
class Haystack(ABC):
    """Places for the needles of a question.

    `depth` (percent) sets the depth of the needle in the question; None draws it.
    """

    question: NeedleQuestion
    seed: int
    depth: float | None
    essay: Essay | None

    @abstractmethod
    def write(self, text: MarkedText, size: int) -> list[float]:
        """Write a haystack with the needles.

        Args:
            text: Text to write to.
            size: Number of units of the haystack.

        Returns:
            Depths in percent of the needles in the question, in order.
        """

    def _with_depth(self, depths: Sequence[float]) -> list[tuple[float, Needle]]:
        """Needles with their depths, in the order of the text."""
        if self.depth is None:
            # Sorted, so that needles are in the order of their numbers.
            return list(zip(sorted(depths), self.question.needles, strict=True))
        pairs = [
            (self.depth if needle.number else drawn, needle)
            for drawn, needle in zip(sorted(depths), self.question.needles, strict=True)
        ]
        return sorted(pairs, key=lambda pair: pair[0])


class Essays(Haystack):
    """Prose; a unit is a word."""

    def write(self, text: MarkedText, size: int) -> list[float]:
        """Write needles between sentences."""
        assert self.essay is not None
        sentences = self.essay.sentences(size)
        placed = self._with_depth(
            # Seeded for each call, since the search for a size writes many haystacks with the same
            # depths.
            random.Random(self.seed).sample(DEPTHS, len(self.question.needles))
        )
        # Sentences written so far
        written = 0
        for depth, needle in placed:
            place = int(len(sentences) * depth / 100)
            text.add("".join(f"{sentence} " for sentence in sentences[written:place]))
            written = place
            needle.write(text)
            text.add(" " if (depth, needle) != placed[-1] or written < len(sentences) else "")
        text.add(" ".join(sentences[written:]))
        return [depth for depth, needle in placed if needle.number]


class LineHaystack(Haystack):
    """Lines; a unit is a line, a needle one more."""

    def write(self, text: MarkedText, size: int) -> list[float]:
        """Write needles before randomly drawn lines."""
        # Distinct lines; like the filler, they depend only on the seed and the size.
        drawn = random.Random(self.seed).sample(range(size), len(self.question.needles))
        placed = self._with_depth([100 * line / size for line in drawn])
        waiting = [(round(size * depth / 100), needle) for depth, needle in placed]
        # A separate stream from the places, so that an additional line does not change earlier ones
        fillers = random.Random(self.seed + 1)
        for line in range(size + 1):
            # Line `size` is after the last line: a needle of depth 100 ends the haystack.
            while waiting and waiting[0][0] <= line:
                waiting.pop(0)[1].write(text)
                text.add("\n" if line < size else "")
            if line < size:
                self.write_line(text, fillers)
                text.add("\n" if line < size - 1 or waiting else "")
        return [depth for depth, needle in placed if needle.number]

    @abstractmethod
    def write_line(self, text: MarkedText, rng: random.Random) -> None:
        """Write one line of filler."""


class Noise(LineHaystack):
    """The same line, repeated."""

    def write_line(self, text: MarkedText, rng: random.Random) -> None:
        """Write the noise line."""
        text.add(NOISE)


class Needles(LineHaystack):
    """Distractor needles."""

    def write_line(self, text: MarkedText, rng: random.Random) -> None:
        """Write a needle with a random key and value."""
        self.question.distractor(rng).write(text)


HAYSTACKS: dict[str, type[Haystack]] = {"noise": Noise, "essay": Essays, "needle": Needles}
