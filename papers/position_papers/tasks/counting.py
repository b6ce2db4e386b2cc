"""Counting (CoPE, sec. 5.3): how often a variable was incremented since it was last set to zero.

    <bos> a = 0 ; pass ; a ++ ; pass ; a ++ ; print a 2

The operations are to set a variable to zero, to increment it and to pass; they are drawn with
weights 1, 7 and 50. Out of distribution the weight of pass is 100 ("longer": the relevant context
is longer) or 10 ("shorter"). The paper uses 1, 3 or 5 variables, and the variable of each operation
is drawn uniformly. The sequence begins by setting each variable once, in random order, and ends by
printing one. Values are at most 10: a further increment becomes a pass. The number of operations is
uniform between `fewest` and `operations` (512 in the paper: "up to 512"). The target is the printed
value. Score: exact match.

Some values are much more frequent than others. In the test sets `balanced_...` the value is drawn
first, uniformly from the values of at least 1 in 100 sequences; then sequences are drawn until one
has that value.

Spans: `needle` (the last "a = 0 ;" of the printed variable and its increments since then;
`needle.1` ... are these operations in order), `distractor` (the other operations that set or
increment a variable), `query` (print a). The value is generated. attributes: operations, value,
length (tokens).
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, WordTask, grown
from repo_interp.tasks.vocabulary import BOS, PAD
from repo_interp.values import Positive

END, SET, ZERO, INCREMENT, PASS, PRINT = ";", "=", "0", "++", "pass", "print"
LARGEST = 10
BALANCED = "balanced_"
"""Prefix of the names of test sets whose values are equally frequent."""
COMMON = 0.01
"""A balanced test set has the values that at least this share of sequences has."""
DRAWN = 2000
"""Number of sequences drawn to estimate this share."""


@dataclass(frozen=True)
class Counting(WordTask):
    """Counting. Weights are relative."""

    name: ClassVar[str] = "counting"
    does: ClassVar[str] = "counts how often a variable is incremented in {operations} operations"

    variables: Annotated[int, Interval(ge=1, le=26)] = 1
    operations: Number = 64
    fewest: Number = 8
    first_operations: Number = 16
    """Largest number of operations at the start of the curriculum."""
    set_weight: Positive = 1.0
    increment_weight: Positive = 7.0
    pass_weight: Positive = 50.0
    longer_pass_weight: Positive = 100.0
    shorter_pass_weight: Positive = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_ascending("variables", "fewest", "first_operations", "operations")

    def task_words(self) -> tuple[str, ...]:
        """The words of operations, the values and the variables."""
        names = (chr(ord("a") + index) for index in range(self.variables))
        return (
            END,
            SET,
            INCREMENT,
            PASS,
            PRINT,
            *(str(value) for value in range(LARGEST + 1)),
            *names,
        )

    @property
    def training_length(self) -> int:
        """The number of tokens of the longest possible sequence, since no operation is longer than
        "a = 0 ;".
        """
        return 1 + 4 * self.operations + 3

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Sets with as many passes as in training, with more and with fewer; then the same three
        with equally frequent values.
        """
        return (*self._pass_weights, *(f"{BALANCED}{name}" for name in self._pass_weights))

    @property
    def _pass_weights(self) -> dict[str, float]:
        return {
            "in_distribution": self.pass_weight,
            "longer": self.longer_pass_weight,
            "shorter": self.shorter_pass_weight,
        }

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Training sequences. The largest number of operations grows from `first_operations` to
        `operations`.
        """
        limit = grown(self.first_operations, self.operations, progress)
        return self._sequences(generator, size, limit, self.pass_weight)

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Sequences drawn with the weight of pass that belongs to a test set."""
        self._require_test_set(test_set)
        pass_weight = self._pass_weights[test_set.removeprefix(BALANCED)]
        if not test_set.startswith(BALANCED):
            return self._sequences(generator, size, self.operations, pass_weight)
        zero = self.vocabulary[ZERO]
        wanted = zero + generator.choice(self.common_values(test_set), size)
        return _side_by_side(
            [
                next(row for row in self._endless(generator, pass_weight) if row[-1] == value)
                for value in wanted
            ]
        )

    def common_values(self, test_set: str) -> tuple[int, ...]:
        """The values that at least 1 in 100 sequences of a test set have, in ascending order. A
        balanced test set has the values of the test set without the prefix.
        """
        return _common_values(self, test_set.removeprefix(BALANCED))

    def _endless(self, generator: np.random.Generator, pass_weight: float) -> Iterator[list[int]]:
        """Draw sequences without end."""
        while True:
            yield self._sequence(
                generator, int(generator.integers(self.fewest, self.operations + 1)), pass_weight
            )

    def _sequences(
        self, generator: np.random.Generator, size: int, limit: int, pass_weight: float
    ) -> Batch:
        counts = generator.integers(self.fewest, limit + 1, size)
        return _side_by_side(
            [self._sequence(generator, int(count), pass_weight) for count in counts]
        )

    def _sequence(
        self, generator: np.random.Generator, count: int, pass_weight: float
    ) -> list[int]:
        vocabulary, first = self.vocabulary, self.vocabulary["a"]
        end, equals, zero, plus, do_nothing = vocabulary.ids((END, SET, ZERO, INCREMENT, PASS))
        weights = np.array([self.set_weight, self.increment_weight, pass_weight])
        kinds = generator.choice(3, size=count, p=weights / weights.sum()).tolist()
        chosen = generator.integers(0, self.variables, count).tolist()
        kinds[: self.variables] = [0] * self.variables
        chosen[: self.variables] = generator.permutation(self.variables).tolist()
        values = [0] * self.variables
        tokens = [BOS]
        for kind, variable in zip(kinds, chosen, strict=True):
            if kind == 0:
                values[variable] = 0
                tokens += (first + variable, equals, zero, end)
            elif kind == 1 and values[variable] < LARGEST:
                values[variable] += 1
                tokens += (first + variable, plus, end)
            else:
                tokens += (do_nothing, end)
        printed = int(generator.integers(self.variables))
        return [*tokens, vocabulary[PRINT], first + printed, zero + values[printed]]

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with its spans, its value and its number of operations."""
        text = self.vocabulary.text(tokens)
        last = len(text) - 1
        starts = [1, *(at + 1 for at in range(last) if text[at] == END)]
        operations = [tuple(range(start, stop)) for start, stop in pairwise(starts)]
        changes = [places for places in operations if text[places[0]] != PASS]
        mine = [places for places in changes if text[places[0]] == text[last - 1]]
        zero = max(index for index, places in enumerate(mine) if text[places[1]] == SET)
        counted = mine[zero:]
        others = [places for places in changes if places not in counted]
        spans = {
            "needle": tuple(at for places in counted for at in places),
            "query": (last - 2, last - 1),
        }
        spans |= {f"needle.{number}": places for number, places in enumerate(counted, start=1)}
        if others:
            spans["distractor"] = tuple(at for places in others for at in places)
        return Prompt(
            tokens=tuple(tokens),
            spans=spans,
            generated=(last,),
            token_text=text,
            answers=(text[last],),
            attributes={
                "length": len(tokens),
                "operations": len(operations),
                "value": int(text[last]),
            },
        )


@functools.cache
def _common_values(task: Counting, test_set: str) -> tuple[int, ...]:
    generator = np.random.default_rng(zlib.crc32(test_set.encode()))
    drawn = islice(task._endless(generator, task._pass_weights[test_set]), DRAWN)
    counts = Counter(row[-1] - task.vocabulary[ZERO] for row in drawn)
    return tuple(sorted(value for value, count in counts.items() if count >= COMMON * DRAWN))


def _side_by_side(rows: Sequence[Sequence[int]]) -> Batch:
    """A batch of sequences padded on the right; the last token of each is the target."""
    tokens = np.full((len(rows), max(map(len, rows))), PAD)
    targets = np.zeros(tokens.shape, dtype=bool)
    for row, words in enumerate(rows):
        tokens[row, : len(words)] = words
        targets[row, len(words) - 1] = True
    return Batch(tokens, targets)


SIZES = {"small": Counting(), "paper": Counting(operations=512, first_operations=512)}
