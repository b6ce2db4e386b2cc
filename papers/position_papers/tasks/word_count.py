"""Counting words of prose (CoPE, tables 1 and 6): how often a word occurs in the last sentence.

    sentence ... last sentence

    Now, tell me how many times word "the" is mentioned in the last sentence. Answer: 2

The sentences are consecutive sentences in the docstrings of the standard library. Words have at
least three letters, upper or lower case, and also occur in an earlier sentence, as "Alice" does in
the paper. The answer is 0 to 2. First a word is drawn, then an answer, then a place with this word
and answer, each uniformly. Only words for which every answer occurs are used, so neither the word
nor its frequency gives the answer away. Another Python version has other docstrings. The tokenizer
is the tokenizer of the task `language`.

Test sets are named by the number of sentences, 2 in the paper. Score: exact match. Spans: `needle`
(the word in the last sentence; `needle.1` ... are its occurrences in order; absent if the answer is
0), `distractor` (the word in earlier sentences), `last` (the rest of the last sentence), `query`
(the question). The answer is generated. attributes: sentences, value.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from position_papers.tasks.corpus import corpus
from repo_interp.errors import InputError
from repo_interp.tasks.essay import SENTENCE_END, essay
from repo_interp.tasks.prompt import GENERATED, Prompt
from repo_interp.tasks.prompt.text import prompt_from_text
from repo_interp.tasks.task import MOST, Batch, Task
from repo_interp.tasks.vocabulary import PAD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LARGEST = 2
"""The largest answer."""
_WORDS = 20_000
"""Sentences are taken from this number of words of docstrings."""
_WORD = re.compile(r" ?(?<![\w'-])[A-Za-z]{3,}(?![\w'-])")
"""A word with the space before it, which is often part of its token."""
_QUESTION = '\n\nNow, tell me how many times word "{}" is mentioned in the last sentence. Answer:'
_PROMPT = re.compile(f"(.*){'([a-z]+)'.join(map(re.escape, _QUESTION.split('{}')))} ([0-9]+)")


@dataclass(frozen=True)
class WordCount(Task):
    """Counting words of the last sentence."""

    name: ClassVar[str] = "word_count"
    does: ClassVar[str] = "counts a word in the last of {sentences} sentences"
    axes: ClassVar[tuple[str, ...]] = ("sentences",)
    test_sets_count: ClassVar[str] = "sentences"

    tokens: Annotated[int, Interval(ge=258, le=1_000_000)] = 2048
    """Size of the vocabulary, as in the task `language`."""
    tokenizer_file: str = ""
    """A tokenizer.json to use instead of a tokenizer trained on the standard library."""
    length: Annotated[int, Interval(ge=1024, le=MOST)] = 1024
    """Number of tokens of the longest prompt; longer prompts are drawn again."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer())

    @property
    def training_length(self) -> int:
        """The number of tokens of the longest prompt."""
        return self.length

    @property
    def test_sets(self) -> tuple[str, ...]:
        """The possible numbers of sentences."""
        return ("2", "4", "8")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level BPE, or the tokenizer of `tokenizer_file`."""
        return corpus("", self.tokens, self.tokenizer_file).tokenizer

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Prompts of two sentences."""
        return self.sample(generator, size, self.default_test_set)

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Prompts with the number of sentences of a test set; the answer is the target."""
        self._require_test_set(test_set)
        prompts = [self._drawn(generator, int(test_set)) for _ in range(size)]
        tokens = np.full((size, max(len(prompt.tokens) for prompt in prompts)), PAD)
        targets = np.zeros(tokens.shape, dtype=bool)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
            targets[row, list(prompt.generated)] = True
        return Batch(tokens, targets)

    def _drawn(self, generator: np.random.Generator, sentences: int) -> Prompt:
        texts, places = _places(sentences)
        while True:
            word = list(places)[generator.integers(len(places))]
            value = int(generator.integers(LARGEST + 1))
            start = generator.choice(places[word][value])
            prompt = self._marked(" ".join(texts[start : start + sentences]), word, value)
            if len(prompt.tokens) <= self.length:
                return prompt

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with its spans, its answer and its number of sentences."""
        text = str(self.tokenizer().decode(list(tokens), skip_special_tokens=True))
        found = _PROMPT.fullmatch(text)
        prompt = None if found is None else self._marked(found[1], found[2], int(found[3]))
        if prompt is None or prompt.tokens != tuple(tokens):
            raise InputError(
                "task word_count: this tokenizer does not give back the text that it encodes; use "
                "another tokenizer"
            )
        return prompt

    def _marked(self, context: str, word: str, value: int) -> Prompt:
        starts = [0, *(found.end() for found in SENTENCE_END.finditer(context))]
        places = [found.span() for found in _WORD.finditer(context) if _bare(found[0]) == word]
        counted = [place for place in places if place[1] > starts[-1]]
        edges = [starts[-1], *chain.from_iterable(counted), len(context)]
        asked = context + _QUESTION.format(word)
        spans = {
            "needle": counted,
            **{f"needle.{number}": [place] for number, place in enumerate(counted, start=1)},
            "distractor": places[: len(places) - len(counted)],
            "last": [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b],
            "query": [(len(context), len(asked))],
            GENERATED: [(len(asked), len(asked) + 1 + len(str(value)))],
        }
        characters = {name: tuple(given) for name, given in spans.items() if given}
        facts = {"sentences": len(starts), "value": value}
        return prompt_from_text(
            f"{asked} {value}", characters, self.tokenizer(), (str(value),), facts
        )


def _bare(word: str) -> str:
    return word.strip().lower()


@functools.cache
def _places(sentences: int) -> tuple[list[str], dict[str, list[list[int]]]]:
    """The sentences, and for each word the starts of runs of sentences by answer. Only words for
    which every answer occurs are included.
    """
    texts = essay().sentences(_WORDS)
    counts = [Counter(map(_bare, _WORD.findall(text))) for text in texts]
    found: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in range(LARGEST + 1)])
    for start in range(len(texts) - sentences):
        *earlier, last = counts[start : start + sentences]
        for word in set().union(*earlier):
            if last[word] <= LARGEST:
                found[word][last[word]].append(start)
    return texts, {word: found[word] for word in sorted(found) if all(found[word])}


SIZES = {"small": WordCount(), "paper": WordCount()}
