"""Text reversal (RePo, app. C): write the words of a text in reverse order.

    <bos> Reverse the following words: w_1 ... w_L Answer: w_L ... w_1

The w_i are drawn with replacement from a fixed list, so a model must use their places; the answer
is w_L ... w_1. Training uses lengths 2-20, tests use 2-30 (Kazemnejad et al. 2023). A batch mixes
all lengths up to a limit, which the curriculum grows from `first_longest` to `longest`.

Spans: `instruction` (up to "words:"), `words`, `separator` ("Answer:"); the answer is generated.
attributes["source"] has, for every generated token in order, the index of the token that it copies:
the mirror effect (fig. 6). So every row that produces a word has a separate needle and query
(`measures.attention_mass`): the next word at its place in the text, and the previous word of the
answer, or "Answer:" before the first word. `reversal_prompts` makes prompts for a pre-trained
model in its tokens; a word of several tokens is copied as a whole, with its tokens in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Int

from repo_interp.errors import InputError
from repo_interp.tasks.copying import beginning
from repo_interp.tasks.prompt import GENERATED, Prompt
from repo_interp.tasks.prompt.text import MarkedText, encode, prompt_from_text
from repo_interp.tasks.task import (
    Batch,
    Number,
    Words,
    WordTask,
    grown,
    require_drawable,
    whole_number,
)
from repo_interp.tasks.vocabulary import BOS, NOUNS, PAD
from repo_interp.values import checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = ("Reverse", "the", "following", "words:")
SEPARATOR = "Answer:"


@dataclass(frozen=True)
class Reversal(WordTask):
    """Text reversal; lengths are numbers of words.

    Test sets are named by the length: "2" ... "30", or any other.
    """

    name: ClassVar[str] = "reversal"
    does: ClassVar[str] = "says {length} words backwards"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    test_sets_count: ClassVar[str] = "words"

    words: Words = 32
    """Number of words to draw from."""
    shortest: Number = 2
    longest: Number = 20
    """Longest text to train on."""
    first_longest: Number = 6
    """Longest text at the beginning of the curriculum."""
    longest_test: Number = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            2 <= self.words <= len(NOUNS), f"wanted 2 to {len(NOUNS)} words, got {self.words}"
        )
        self._require_ascending(1, "shortest", "first_longest", "longest", "longest_test")

    def task_words(self) -> tuple[str, ...]:
        """Instruction, separator, then the list of words."""
        return (*INSTRUCTION, SEPARATOR, *NOUNS[: self.words])

    @property
    def training_length(self) -> int:
        """Tokens of the longest text to train on."""
        return self._tokens(self.longest)

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Every length, training lengths first."""
        return tuple(str(length) for length in range(self.shortest, self.longest_test + 1))

    @property
    def default_test_set(self) -> str:
        """The longest text trained on."""
        return str(self.longest)

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Make texts with uniform lengths from `shortest` to a limit that the curriculum raises."""
        limit = grown(self.first_longest, self.longest, progress)
        # Lengths are mixed within a batch, so short texts are not forgotten; rows are padded
        return self._sequences(generator, generator.integers(self.shortest, limit + 1, size))

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Make texts of one length."""
        return self._sequences(
            generator, np.full(size, whole_number(test_set, "the number of words"))
        )

    def _tokens(self, length: int) -> int:
        # <bos>, instruction, words, separator, words
        return 1 + len(INSTRUCTION) + length + 1 + length

    def _sequences(
        self, generator: np.random.Generator, lengths: Int[np.ndarray, " sequence"]
    ) -> Batch:
        size, longest = len(lengths), int(lengths.max())
        first = 1 + len(INSTRUCTION)
        listed = self.vocabulary.ids(NOUNS[: self.words])
        # All rows get the same number of words; short rows use the first ones.
        drawn = np.array(listed)[generator.integers(0, self.words, (size, longest))]
        tokens = np.full((size, self._tokens(longest)), PAD)
        tokens[:, :first] = [BOS, *self.vocabulary.ids(INSTRUCTION)]
        # Relative to the first word: words at 0 .. L-1, the separator at L, copies at L+1 .. 2L
        place = np.arange(tokens.shape[1]) - first
        ends = lengths[:, None]
        word, separator = (place >= 0) & (place < ends), place == ends
        copy = (place > ends) & (place <= 2 * ends)
        row = np.broadcast_to(np.arange(size)[:, None], tokens.shape)
        tokens[word] = drawn[row[word], np.broadcast_to(place, tokens.shape)[word]]
        tokens[separator] = self.vocabulary[SEPARATOR]
        # The copy at place L + 1 + k is word L - 1 - k
        tokens[copy] = drawn[row[copy], (2 * ends - place)[copy]]
        return Batch(tokens, copy)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Spans and the source of every generated word."""
        first, separator = 1 + len(INSTRUCTION), list(tokens).index(self.vocabulary[SEPARATOR])
        words, generated = range(first, separator), range(separator + 1, len(tokens))
        text = self.vocabulary.text(tokens)
        return Prompt(
            tokens=tuple(tokens),
            spans={
                "words": tuple(words),
                "instruction": tuple(range(1, first)),
                "separator": (separator,),
            },
            generated=tuple(generated),
            token_text=text,
            answers=(" ".join(text[separator + 1 :]),),
            attributes={"length": len(words), "source": list(reversed(words))},
        )


SIZES = {"small": Reversal(), "paper": Reversal()}


def reversal_prompts(
    tokenizer: PreTrainedTokenizerBase, words: int = 20, count: int = 20, seed: int = 0
) -> list[Prompt]:
    """Make reversal prompts for a pre-trained model, in its tokens.

    Prompts begin with BOS if the tokenizer has one, so that the token that acts as a sink is not
    part of the instruction. Every word has a span, `words.1`, `words.2`, ...

    Args:
        tokenizer: Tokenizer of the model.
        words: Words of a text.
        count: Number of prompts.
        seed: Seed; prompt i depends only on the seed, the number of words and i.

    Returns:
        Prompts with spans and sources.

    Raises:
        InputError: A number is below 1, or the tokenizer has no offsets or splits a word
            differently before and after "Answer:".
    """
    require_drawable(count, seed)
    words = checked(words, Words, "words")
    listed, opening = NOUNS[: SIZES["paper"].words], _opening(tokenizer)
    prompts = []
    for index in range(count):
        drawn = [
            listed[at]
            for at in np.random.default_rng([seed, index, words]).integers(0, len(listed), words)
        ]
        prompts.append(_in_tokens(tokenizer, opening, drawn))
    return prompts


def _opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the BOS, if a tokenizer has one but does not prepend it to texts."""
    start = beginning(tokenizer)
    return (
        str(tokenizer.bos_token)
        if start and list(encode(SEPARATOR, tokenizer).tokens[:1]) != start
        else ""
    )


def _in_tokens(tokenizer: PreTrainedTokenizerBase, opening: str, words: Sequence[str]) -> Prompt:
    backwards = " ".join(reversed(words))
    text = MarkedText()
    text.add(opening)
    text.add(" ".join(INSTRUCTION), "instruction")
    for number, word in enumerate(words, start=1):
        text.add(f" {word}", f"words.{number}")
    text.add(f" {SEPARATOR}", "separator")
    text.add(f" {backwards}", GENERATED)
    prompt = prompt_from_text(text.text, text.characters, tokenizer, (backwards,))
    # Words in reverse order, but the tokens of a word in order
    source = [at for number in range(len(words), 0, -1) for at in prompt.spans[f"words.{number}"]]
    # A tokenizer may merge a word with its neighbors, which differ in the two places
    if [prompt.tokens[at] for at in source] != [prompt.tokens[at] for at in prompt.generated]:
        raise InputError(
            f"the tokenizer splits the words {backwards!r} differently after {SEPARATOR!r} than "
            "before it, so no token has a source; use another tokenizer"
        )
    return replace(
        prompt, attributes={"task": Reversal.name, "length": len(words), "source": source}
    )
