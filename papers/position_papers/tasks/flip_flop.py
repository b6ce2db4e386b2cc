"""Flip-flop language modelling (Liu et al. 2024; CoPE, sec. 5.1): remember the last bit written.

    <bos> w 0 i 1 r 0 w 1 i 1 i 0 r 1            pairs of an instruction and a bit

w writes the bit that follows it, i means that the bit after it is to be ignored, and r reads: the
bit after r repeats the bit of the last w. The first instruction is w and the last is r. The others
are drawn: i with probability p, and w and r with probability (1 - p) / 2 each. p is 0.8 in
training; out of distribution it is 0.98 ("sparse": the last w is far away) and 0.1 ("dense"). Bits
after w and i are uniform. Lengths are tokens without <bos>, two per pair.

Targets are the bits after every r; the last one is generated. Score: the share of correct reads in
a prompt (1 - the papers' error). Spans: `needle` (the w that the last r reads, with its bit; parts
`needle.1`, `.key` the w, `.value` its bit), `query` (the last r), `writes`, `ignored`, `reads` (the
other pairs). attributes: length, distance (tokens from the last w to the last r).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, Response, WordTask
from repo_interp.tasks.vocabulary import BOS
from repo_interp.values import Share

WRITE, IGNORE, READ = "w", "i", "r"
SETS: tuple[str, ...] = ("in_distribution", "sparse", "dense")


@dataclass(frozen=True)
class FlipFlop(WordTask):
    """Flip-flop.

    Test sets: three densities at the training length and, with "long_" before the name, at
    `longest_test`.
    """

    name: ClassVar[str] = "flip_flop"
    does: ClassVar[str] = "remembers the last bit that was written, {distance} tokens back"
    metric: ClassVar[str] = "accuracy of reads"

    length: Number = 128
    first_length: Number = 128
    """Length at the start of the curriculum. With the value of `length` there is no curriculum."""
    longest_test: Number = 512
    ignore: Share = 0.8
    """The probability p of i in training."""
    sparse: Share = 0.98
    dense: Share = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_ascending(4, "first_length", "length", "longest_test")
        for name in ("length", "first_length", "longest_test"):
            self._require(
                getattr(self, name) % 2 == 0,
                f"wanted an even {name}, pairs of tokens; got {getattr(self, name)}",
            )

    def task_words(self) -> tuple[str, ...]:
        """The instructions and the bits."""
        return (WRITE, IGNORE, READ, "0", "1")

    @property
    def training_length(self) -> int:
        """The number of tokens of a sequence, including <bos>."""
        return 1 + self.length

    @property
    def test_sets(self) -> tuple[str, ...]:
        """In distribution, sparse and dense; then the same with the length `longest_test`."""
        longer = () if self.longest_test == self.length else tuple(f"long_{name}" for name in SETS)
        return (*SETS, *longer)

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Training sequences of equal length, which grows from `first_length` to `length`."""
        pairs = round((self.first_length + progress * (self.length - self.first_length)) / 2)
        return self._sequences(generator, size, pairs, self.ignore)

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Sequences with the length and the density of a test set."""
        self._require_test_set(test_set)
        length = self.longest_test if test_set.startswith("long_") else self.length
        share = (self.ignore, self.sparse, self.dense)[SETS.index(test_set.removeprefix("long_"))]
        return self._sequences(generator, size, length // 2, share)

    def _sequences(
        self, generator: np.random.Generator, size: int, pairs: int, ignore: float
    ) -> Batch:
        write, ignored, read = self.vocabulary.ids((WRITE, IGNORE, READ))
        chance = [(1 - ignore) / 2, ignore, (1 - ignore) / 2]
        instructions = generator.choice([write, ignored, read], size=(size, pairs), p=chance)
        instructions[:, 0], instructions[:, -1] = write, read
        bits = generator.integers(0, 2, (size, pairs))
        written = np.maximum.accumulate(
            np.where(instructions == write, np.arange(pairs), 0), axis=1
        )
        reads = instructions == read
        bits = np.where(reads, np.take_along_axis(bits, written, axis=1), bits)
        tokens = np.full((size, 1 + 2 * pairs), BOS)
        tokens[:, 1::2] = instructions
        tokens[:, 2::2] = self.vocabulary["0"] + bits
        targets = np.zeros(tokens.shape, dtype=bool)
        targets[:, 2::2] = reads
        return Batch(tokens, targets)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with its spans, its length and the distance of its last read."""
        text = self.vocabulary.text(tokens)
        pairs = {
            word: [at for at in range(1, len(tokens), 2) if text[at] == word]
            for word in (WRITE, IGNORE, READ)
        }
        written, last = pairs[WRITE][-1], pairs[READ][-1]
        spans = {
            "needle": (written, written + 1),
            "needle.1": (written, written + 1),
            "needle.1.key": (written,),
            "needle.1.value": (written + 1,),
            "query": (last,),
        }
        others = {"writes": pairs[WRITE][:-1], "ignored": pairs[IGNORE], "reads": pairs[READ][:-1]}
        spans |= {
            name: tuple(at + step for at in starts for step in (0, 1))
            for name, starts in others.items()
            if starts
        }
        return Prompt(
            tokens=tuple(tokens),
            spans=spans,
            generated=(last + 1,),
            token_text=text,
            answers=(text[last + 1],),
            attributes={"length": len(tokens) - 1, "distance": last - written},
        )

    def targets(self, prompt: Prompt) -> tuple[int, ...]:
        """The indices of the bits after every r."""
        read = self.vocabulary[READ]
        return tuple(at + 1 for at in range(1, len(prompt.tokens), 2) if prompt.tokens[at] == read)

    def score(
        self, responses: Sequence[Response], prompts: Sequence[Prompt]
    ) -> Float[np.ndarray, " prompt"]:
        """The share of correct reads in each prompt."""
        return np.array([right.mean() for right in self.right(responses, prompts)])


SIZES = {"small": FlipFlop(), "paper": FlipFlop(length=512, first_length=512)}
