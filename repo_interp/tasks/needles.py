"""Needles and the question about them: what RULER's needle-in-a-haystack tasks hide and ask for.

    One of the special magic {type} for {key} is: {value}.          type: numbers, words, uuids - always plural

Numbers have 7 digits, words are "adjective-noun", uuids are version 4. Keys and values of one prompt are distinct, so the
question has one answer. Knows nothing about where needles go.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from repo_interp.tasks.marked_text import MarkedText
from repo_interp.tasks.words import ADJECTIVES, NOUNS

DRAW: dict[str, Callable[[random.Random], str]] = {
    "numbers": lambda rng: str(rng.randrange(10**6, 10**7)),
    "words": lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}",
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Needle:
    """A sentence of the haystack that holds a value for a key."""

    value_type: str
    key: str
    value: str
    number: int | None
    """1-based place among the needles asked for, in the order of the text; None for a distractor."""

    def write(self, text: MarkedText) -> None:
        """Write the needle with its spans at the end of `text`."""
        span = "distractor" if self.number is None else f"needle.{self.number}"
        key = "distractor" if self.number is None else f"{span}.key"
        value = "distractor" if self.number is None else f"{span}.value"
        text.add(f"One of the special magic {self.value_type} for ", span)
        text.add(self.key, key)
        text.add(" is: ", span)
        text.add(self.value, value)
        text.add(".", span)


@dataclass(frozen=True)
class Question:
    """Needles, in the order in which they go into the text, and the keys asked for, in the order of the
    question.
    """

    key_type: str
    value_type: str
    needles: tuple[Needle, ...]
    queries: tuple[str, ...]

    @property
    def references(self) -> tuple[str, ...]:
        """Values of the keys asked for: key by key as in the question, a key's values in the order of the
        text.
        """
        return tuple(needle.value for query in self.queries for needle in self.needles if needle.key == query)

    @property
    def singular(self) -> bool:
        """Whether one value is asked for."""
        return len(self.references) == 1

    @property
    def asked_type(self) -> str:
        """The type as the question names it."""
        return self.value_type.removesuffix("s") if self.singular else self.value_type

    @property
    def asked(self) -> str:
        """The keys as the question names them."""
        return joined(self.queries)

    def distractor(self, rng: random.Random) -> Needle:
        """Another needle, with a key and a value that no needle of the question has."""
        key = _draw(rng, self.key_type, [needle.key for needle in self.needles])
        value = _draw(rng, self.value_type, [needle.value for needle in self.needles])
        return Needle(self.value_type, key, value, None)


def joined(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b, and c"."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def draw_question(rng: random.Random, key_type: str, value_type: str, keys: int, values: int, queries: int) -> Question:
    """Draw `keys` keys with `values` values each, in random order, `queries` of the keys asked for."""
    drawn_keys: list[str] = []
    drawn_values: list[str] = []
    pairs = []
    for _ in range(keys):
        drawn_keys.append(_draw(rng, key_type, drawn_keys))
        for _ in range(values):
            drawn_values.append(_draw(rng, value_type, drawn_values))
            pairs.append((drawn_keys[-1], drawn_values[-1]))
    rng.shuffle(pairs)
    asked = rng.sample(drawn_keys, queries)
    numbers = iter(range(1, len(pairs) + 1))
    needles = tuple(Needle(value_type, key, value, next(numbers) if key in asked else None) for key, value in pairs)
    return Question(key_type, value_type, needles, tuple(asked))


def _draw(rng: random.Random, kind: str, taken: Collection[str]) -> str:
    while (drawn := DRAW[kind](rng)) in taken:
        pass
    return drawn
