"""The three haystacks of RULER's needle-in-a-haystack tasks, each a pure function of its size.

    noise    `size` times the line "The grass is green. ...", needles before uniformly drawn lines
    needle   `size` lines, each a needle with random key and value, likewise
    essay    the first `size` words of a prose text; a needle of depth p goes before sentence int(sentences * p / 100),
             depths drawn without replacement from round(linspace(0, 100, 40)) and sorted

Knows nothing about tokens: how large a haystack fits is searched by who knows them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from repo_interp.tasks.essay import Essay
from repo_interp.tasks.marked_text import MarkedText
from repo_interp.tasks.needles import Needle, Question

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, 40)))


class Haystack(ABC):
    """Where the needles of a question go. `depth` (percent) fixes that of the needle asked for; None draws
    it.
    """

    def __init__(self, question: Question, seed: int, depth: float | None, essay: Essay | None) -> None:
        self.question = question
        self.seed = seed
        self.depth = depth
        self.essay = essay

    @abstractmethod
    def write(self, text: MarkedText, size: int) -> list[float]:
        """Write a haystack of `size` units with the needles; the depths, in percent, of those asked for, in
        their order.
        """

    def _with_depth(self, depths: Sequence[float]) -> list[tuple[float, Needle]]:
        """Needles with their depths, in the order of the text."""
        if self.depth is None:
            return list(zip(sorted(depths), self.question.needles, strict=True))
        pairs = [
            (self.depth if needle.number else drawn, needle)
            for drawn, needle in zip(sorted(depths), self.question.needles, strict=True)
        ]
        return sorted(pairs, key=lambda pair: pair[0])


class Essays(Haystack):
    """Prose; a unit is a word."""

    def write(self, text: MarkedText, size: int) -> list[float]:
        """Needles stand between sentences."""
        assert self.essay is not None
        sentences = self.essay.sentences(size)
        placed = self._with_depth(random.Random(self.seed).sample(DEPTHS, len(self.question.needles)))
        written = 0
        for depth, needle in placed:
            place = int(len(sentences) * depth / 100)
            text.add("".join(f"{sentence} " for sentence in sentences[written:place]))
            written = place
            needle.write(text)
            text.add(" " if (depth, needle) != placed[-1] or written < len(sentences) else "")
        text.add(" ".join(sentences[written:]))
        return [depth for depth, needle in placed if needle.number]


class Lines(Haystack):
    """Lines; a unit is a line, a needle one more."""

    def write(self, text: MarkedText, size: int) -> list[float]:
        """Needles stand before the lines drawn for them."""
        drawn = random.Random(self.seed).sample(range(size), len(self.question.needles))
        placed = self._with_depth([100 * line / size for line in drawn])
        waiting = [(round(size * depth / 100), needle) for depth, needle in placed]
        fillers = random.Random(self.seed + 1)
        for line in range(size + 1):
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


class Noise(Lines):
    """The same line again and again."""

    def write_line(self, text: MarkedText, rng: random.Random) -> None:
        """The noise line."""
        text.add(NOISE)


class Needles(Lines):
    """Distractor needles."""

    def write_line(self, text: MarkedText, rng: random.Random) -> None:
        """A needle with a random key and value."""
        self.question.distractor(rng).write(text)


HAYSTACKS: dict[str, type[Haystack]] = {"noise": Noise, "essay": Essays, "needle": Needles}
