"""Random tokens after BOS (HoPE, sec. 3.1): sequences without content show position alone.

    <bos> t_1 t_2 ... t_{n-1}          t_i uniform over the ordinary tokens of a vocabulary

The paper takes 5,000 sequences of lengths L and 2 L, where L is the training length. As a task, the
best possible score is known: a log perplexity of ln(vocabulary) for every token. Every token but
the first is a target; nothing is generated, and there are no spans. Score: log perplexity, in nats
per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from repo_interp.errors import InputError
from repo_interp.tasks.copying import beginning, ordinary_tokens
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, PlainText, Words, WordTask, whole_number
from repo_interp.tasks.vocabulary import BOS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["independent", "repeated"]
"""Kinds of draws: every token of a sequence independently, or one token for all places."""


@dataclass(frozen=True)
class RandomTokens(PlainText, WordTask):
    """Random tokens. Test sets are named by the length in tokens."""

    name: ClassVar[str] = "random_tokens"
    axes: ClassVar[tuple[str, ...]] = ("length",)

    symbols: Words = 256
    length: Annotated[int, Interval(ge=2, le=65_536)] = 256

    def task_words(self) -> tuple[str, ...]:
        """The symbols."""
        return tuple(f"s{index}" for index in range(self.symbols))

    @property
    def training_length(self) -> int:
        """Tokens of a sequence."""
        return self.length

    @property
    def test_sets(self) -> tuple[str, ...]:
        """L and 2 L."""
        return (str(self.length), str(2 * self.length))

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Make sequences of the training length; there is no curriculum."""
        return self.sample(generator, size, str(self.length))

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Make sequences of one length."""
        length = whole_number(test_set, "the number of tokens")
        first = self.vocabulary["s0"]
        tokens = generator.integers(first, first + self.symbols, (size, length))
        tokens[:, 0] = BOS
        targets = np.ones(tokens.shape, dtype=bool)
        # <bos> has no earlier tokens that could predict it.
        targets[:, 0] = False
        return Batch(tokens, targets)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Return the tokens as a prompt without spans."""
        return Prompt(
            tokens=tuple(tokens),
            token_text=self.vocabulary.text(tokens),
            attributes={"length": len(tokens)},
        )


def drawn(
    ids: Sequence[int] | np.ndarray, length: int, seed: Sequence[int], kind: Kind
) -> list[int]:
    """Draw token ids.

    Args:
        ids: Ids to draw from.
        length: Number of tokens.
        seed: Seed of the draws.
        kind: "independent", or "repeated": one id, `length` times.

    Returns:
        Token ids.
    """
    choice = (
        np.random.default_rng(list(seed)).choice(ids, 1 if kind == "repeated" else length).tolist()
    )
    return choice * length if kind == "repeated" else choice


def random_token_prompts(
    tokenizer: PreTrainedTokenizerBase,
    length: int = 512,
    count: int = 20,
    seed: int = 0,
    kind: Kind = "independent",
) -> list[Prompt]:
    """Make prompts of random ordinary tokens for a pre-trained model.

    Args:
        tokenizer: Tokenizer of the model; prompts begin with its BOS if it has one.
        length: Tokens of a prompt, including BOS.
        count: Number of prompts.
        seed: Seed of the tokens.
        kind: Draw every token, or repeat one.

    Returns:
        Prompts without spans.

    Raises:
        InputError: A number is below 1, or the vocabulary has too few ordinary tokens.
    """
    for name, number in (("tokens", length), ("prompts", count)):
        if number < 1:
            raise InputError(f"wanted at least one of {name}, got {number}")
    ids = ordinary_tokens(tokenizer)
    prompts = []
    for index in range(count):
        tokens = drawn(ids, length, [seed, index, length], kind)
        # The length includes BOS, so prompts with and without BOS have equal lengths.
        tokens = [*beginning(tokenizer), *tokens][:length]
        text = tuple(str(tokenizer.decode([token])) for token in tokens)
        attributes = {"task": "random_tokens", "length": length, "seed": seed, "index": index}
        prompts.append(Prompt(tokens=tuple(tokens), token_text=text, attributes=attributes))
    return prompts


SIZES = {"small": RandomTokens(), "paper": RandomTokens(symbols=50_000, length=512)}
