"""Few-shot following (HoPE, sec. 4.1, table 2, app. C): does a model answer within the label set of its examples?

    <bos> x x x -> l ;  (5 examples)  filler ... filler  x x x ->  l

A context has two labels, drawn from a pool; the words x of an example are all of one kind or all of the other, and each kind has
one of the labels, which way round is drawn. The question, behind `length` tokens' worth of meaningless filler, has words of one
kind: its label is the answer. Both kinds are among the 5 examples, so the answer is determined. Test sets are named by the length
in tokens; a curriculum grows it from `first_length` to `length`, one length per batch. Training sequences ask `questions` of them,
one behind the other. Targets are the labels of the questions.

Score, as in the paper: following - whether the answer is in the label set, right or wrong; exact answers are in `right`. Spans:
`examples` (parts `examples.1` ..., `examples.1.label`), `padding`, `query`; the label is generated. attributes: length, labels
(token ids of the set). The same on real text, for any tokenizer: `repo_interp.tasks.few_shot_prompts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval
from jaxtyping import Float, Int

from repo_interp.tasks.context import ContextTask, places
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, Response, Words
from repo_interp.tasks.vocabulary import BOS

ARROW, END = "->", ";"
ITEMS = 3
"""Words of an example."""
EXAMPLE = ITEMS + 3
QUESTION = ITEMS + 2
"""Tokens of a question with its label."""


@dataclass(frozen=True)
class FewShot(ContextTask):
    """Few-shot following. Lengths in tokens, with everything."""

    name: ClassVar[str] = "few_shot"
    metric: ClassVar[str] = "following"

    shots: Annotated[int, Interval(ge=2, le=65_536)] = 5
    length: Number = 128
    first_length: Number = 64
    longest_test: Number = 512
    questions: Number = 4
    """Questions of a training sequence."""
    labels: Annotated[int, Interval(ge=2, le=1_000_000)] = 16
    items: Words = 16
    """Words of each of the two kinds."""
    fillers: Words = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_lengths()

    def task_words(self) -> tuple[str, ...]:
        """Signs, labels, words of the two kinds, filler words."""
        labels = [f"l{index}" for index in range(self.labels)]
        items = [f"{kind}{index}" for kind in "ab" for index in range(self.items)]
        return (ARROW, END, *labels, *items, *(f"w{index}" for index in range(self.fillers)))

    @property
    def _contents(self) -> str:
        return f"{self.shots} examples"

    def _shortest(self, questions: int) -> int:
        return 1 + EXAMPLE * self.shots + 1 + QUESTION * questions

    def _sequences(self, generator: np.random.Generator, size: int, length: int, questions: int) -> Batch:
        vocabulary = self.vocabulary
        pairs = np.argsort(generator.random((size, self.labels)))[:, :2] + vocabulary["l0"]
        kinds = generator.integers(0, 2, (size, self.shots))
        one, other = generator.permuted(np.tile(np.arange(self.shots), (size, 1)), axis=1)[:, :2].T
        rows = np.arange(size)
        kinds[rows, one], kinds[rows, other] = 0, 1
        examples = np.concatenate(
            [
                self._items(generator, kinds),
                np.full((size, self.shots, 1), vocabulary[ARROW]),
                np.take_along_axis(pairs, kinds, axis=1)[:, :, None],
                np.full((size, self.shots, 1), vocabulary[END]),
            ],
            axis=2,
        ).reshape(size, -1)
        asked = generator.integers(0, 2, (size, questions))
        asking = np.concatenate(
            [
                self._items(generator, asked),
                np.full((size, questions, 1), vocabulary[ARROW]),
                np.take_along_axis(pairs, asked, axis=1)[:, :, None],
            ],
            axis=2,
        ).reshape(size, -1)
        room = length - 1 - examples.shape[1] - asking.shape[1]
        filler = generator.integers(vocabulary["w0"], vocabulary["w0"] + self.fillers, (size, room))
        tokens = np.concatenate([np.full((size, 1), BOS), examples, filler, asking], axis=1)
        targets = np.zeros(tokens.shape, dtype=bool)
        targets[:, length - QUESTION * questions + QUESTION - 1 :: QUESTION] = True
        return Batch(tokens, targets)

    def _items(
        self, generator: np.random.Generator, kinds: Int[np.ndarray, "row example"]
    ) -> Int[np.ndarray, "row example item"]:
        drawn = generator.integers(0, self.items, (*kinds.shape, ITEMS))
        return self.vocabulary["a0"] + kinds[:, :, None] * self.items + drawn

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Spans and the label set."""
        text = self.vocabulary.text(tokens)
        arrows = [at for at, word in enumerate(text) if word == ARROW]
        examples, questions = arrows[: self.shots], arrows[self.shots :]
        end = examples[-1] + 3
        spans = {
            "examples": tuple(range(1, end)),
            "padding": tuple(range(end, questions[0] - ITEMS)),
            "query": places(questions, -ITEMS, 1),
        }
        for number, at in enumerate(examples, start=1):
            spans[f"examples.{number}"] = tuple(range(at - ITEMS, at + 3))
            spans[f"examples.{number}.label"] = (at + 1,)
        generated = places(questions, 1, 2)
        return Prompt(
            tokens=tuple(tokens),
            spans=spans,
            generated=generated,
            token_text=text,
            answers=tuple(text[at] for at in generated),
            attributes={"length": len(tokens), "labels": sorted({tokens[at + 1] for at in examples})},
        )

    def score(self, responses: Sequence[Response], prompts: Sequence[Prompt]) -> Float[np.ndarray, " prompt"]:
        """Share of a prompt's answers that are in its label set."""
        self.right(responses, prompts)
        pairs = zip(responses, prompts, strict=True)
        return np.array([np.mean(np.isin(response.tokens, prompt.attributes["labels"])) for response, prompt in pairs])


SIZES = {
    "small": FewShot(),
    "paper": FewShot(length=512, first_length=64, longest_test=2048),
}
