"""In-context copying (HoPE, sec. 4.1, table 1): continue a sequence that was seen before.

    <bos> s_1 s_2 ... s_n  prefix(s_m)  suffix(s_m)          s_i = 8 tokens of prefix, 4 of suffix

The prefix in the question occurs once in the context, so the answer is determined. Test prompts
have n sequences (30 to 80 in the paper, trained at 512 tokens) and ask for the middle one, m = n //
2. Tokens are drawn uniformly: from `symbols` words, or, for a pre-trained model (`copying_prompts`,
as in the paper, whose models were trained on text), from the ordinary tokens of its vocabulary.

Training sequences have up to `sequences` sequences and ask for `questions` distinct ones, drawn
uniformly. With `fewest` above 0 both numbers vary by batch, so that all places in the context have
the answer equally often: a batch has from `fewest` to `sequences` sequences, and asks for 1 to all
of them, at most `questions`. With `separator` 1, the word | precedes every sequence and every
question; with 0 there is no separator. `filler` more separators per sequence and question are
scattered before them uniformly at random, so that copied tokens are at many distances from their
question: without filler all distances are multiples of one number, and a model that learns the most
frequent distances copies without comparing tokens. Targets are the suffixes of questions; in
training also the prefixes of questions from their second token on, which can be found in the same
way. Score: exact match of all 4 tokens.

Spans: `needle` (the sequence asked for; `needle.1.key` its prefix, `needle.1.value` its suffix),
`distractor` (the others), `query` (the prefix again); the suffix is generated. attributes:
sequences, length (tokens), source: for every generated token the index that it copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Int

from repo_interp.errors import InputError
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, WordTask, grown, whole_number
from repo_interp.tasks.vocabulary import BOS, PAD
from repo_interp.values import CountOrNone

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "|"
PREFIX, SUFFIX = 8, 4
WHOLE = PREFIX + SUFFIX


@dataclass(frozen=True)
class Copying(WordTask):
    """In-context copying. Test sets are named by the number of sequences."""

    name: ClassVar[str] = "copying"
    does: ClassVar[str] = "goes on with one of {sequences} sequences that stand in the text"
    axes: ClassVar[tuple[str, ...]] = ("sequences",)
    test_sets_count: ClassVar[str] = "sequences"

    symbols: Annotated[int, Interval(ge=2, le=1_000_000)] = 256
    sequences: Number = 20
    """Most sequences of a training context."""
    first_sequences: Number = 4
    """Most sequences at the beginning of the curriculum."""
    fewest: CountOrNone = 0
    """Fewest sequences of a training context; 0: half as many as the most, and always the same
    number of questions.
    """
    questions: Number = 4
    """Number of questions in training."""
    separator: Annotated[int, Interval(ge=0, le=1)] = 0
    """Words before every sequence."""
    filler: CountOrNone = 0
    """Average number of additional separators per sequence and question, scattered before them."""
    test_from: Number = 10
    test_to: Number = 40
    test_step: Number = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            1 <= self.first_sequences <= self.sequences
            # With `fewest`, the number of questions of a batch is cut to its sequences
            and self.questions <= (self.sequences if self.fewest else self.first_sequences),
            "wanted 1 <= questions <= first_sequences <= sequences, got "
            f"{self.questions}, {self.first_sequences}, {self.sequences}",
        )
        self._require_ascending("fewest", "first_sequences")
        self._require_ascending(1, "test_from", "test_to")

    def task_words(self) -> tuple[str, ...]:
        """The symbols, and the separator if it is used."""
        return (
            *(f"s{index}" for index in range(self.symbols)),
            # Last, so that its id follows the ids of all symbols
            *(SEPARATOR,) * bool(self.separator or self.filler),
        )

    @property
    def training_length(self) -> int:
        """Tokens of the longest sequence to train on."""
        return self.tokens(self.sequences, self.questions)

    def tokens(self, sequences: int, questions: int = 1) -> int:
        """Count the tokens of a context, including <bos>.

        Args:
            sequences: Sequences of the context.
            questions: Number of questions.

        Returns:
            Number of tokens.
        """
        # All sequences of a batch have this length, since only the places of the filler are random.
        return 1 + (WHOLE + self.separator + self.filler) * (sequences + questions)

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Numbers of sequences."""
        return tuple(
            str(count) for count in range(self.test_from, self.test_to + 1, self.test_step)
        )

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Make contexts of one number of sequences, up to a limit that the curriculum raises."""
        limit = grown(self.first_sequences, self.sequences, progress)
        if self.fewest:
            count = int(generator.integers(self.fewest, limit + 1))
            questions = int(generator.integers(1, min(count, self.questions) + 1))
        else:
            count, questions = (
                # At least as many sequences as questions
                int(generator.integers(max(self.questions, limit // 2), limit + 1)),
                self.questions,
            )
        # The first of a random order: distinct sequences per row, in random order
        asked = np.argsort(generator.random((size, count)))[:, :questions]
        # Prefixes are targets from their second token on; the first token selects the sequence.
        return self._contexts(generator, count, asked, first_target=1)

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Make contexts of one number of sequences, with a question about the middle one."""
        count = whole_number(test_set, "the number of sequences")
        return self._contexts(generator, count, np.full((size, 1), count // 2), first_target=PREFIX)

    def _contexts(
        self,
        generator: np.random.Generator,
        count: int,
        asked: Int[np.ndarray, "sequence question"],
        first_target: int,
    ) -> Batch:
        first = self.vocabulary["s0"]
        sequences = _contexts(
            generator, np.arange(first, first + self.symbols), count, asked
        ).reshape(len(asked), -1, WHOLE)
        places = sequences.shape[1]
        # [row, place]: number of separators before each sequence and question
        before = self.separator + _scattered(generator, len(asked), places, self.filler * places)
        starts = 1 + np.cumsum(before, axis=1) + WHOLE * np.arange(places)
        # [row, place, token]: indices of the tokens of a sequence
        at = starts[:, :, None] + np.arange(WHOLE)
        rows = np.arange(len(asked))[:, None, None]
        # Filled with the separator, whose id follows the ids of the symbols
        tokens = np.full((len(asked), self.tokens(count, asked.shape[1])), first + self.symbols)
        tokens[:, 0] = BOS
        tokens[rows, at] = sequences
        targets = np.zeros(tokens.shape, dtype=bool)
        # Places from `count` on are questions
        targets[rows, at[:, count:, first_target:]] = True
        return Batch(tokens, targets)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """Spans and the source of every generated token."""
        text = self.vocabulary.text(tokens)
        return _describe(tokens, 1, text, " ", self.vocabulary["s0"] + self.symbols)


def copying_prompts(
    tokenizer: PreTrainedTokenizerBase, sequences: int = 30, count: int = 20, seed: int = 0
) -> list[Prompt]:
    """Make copying prompts for a pre-trained model from the ordinary tokens of its vocabulary.

    Args:
        tokenizer: Tokenizer of the model; prompts begin with its BOS if it has one.
        sequences: Sequences of a context.
        count: Number of prompts.
        seed: Seed of the tokens.

    Returns:
        Prompts with spans and sources.

    Raises:
        InputError: A number is below 1, or the vocabulary has fewer than 2 ordinary tokens.
    """
    for name, number in (("sequences", sequences), ("prompts", count)):
        if number < 1:
            raise InputError(f"wanted at least one of {name}, got {number}")
    alphabet = ordinary_tokens(tokenizer)
    start = beginning(tokenizer)
    prompts = []
    for index in range(count):
        # The seed includes the number of sequences: contexts of two sizes share no tokens
        rng = np.random.default_rng([seed, index, sequences])
        drawn = _contexts(rng, alphabet, sequences, np.full((1, 1), sequences // 2))[0].tolist()
        tokens = [*start, *drawn]
        text = tuple(str(tokenizer.decode([token])) for token in tokens)
        prompts.append(_describe(tokens, len(start), text, ""))
    return prompts


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> Int[np.ndarray, " token"]:
    """List the ids of a vocabulary without special tokens.

    Args:
        tokenizer: Hugging Face tokenizer.

    Returns:
        Ids, ascending.

    Raises:
        InputError: Fewer than 2 ordinary tokens exist.
    """
    # unique: several texts may have one id
    ids = np.setdiff1d(np.unique(list(tokenizer.get_vocab().values())), tokenizer.all_special_ids)
    if len(ids) < 2:
        raise InputError(
            f"wanted a vocabulary of at least 2 ordinary tokens, got {len(ids)}; use another "
            "tokenizer"
        )
    return ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Find the BOS of a tokenizer.

    Args:
        tokenizer: Hugging Face tokenizer.

    Returns:
        The id of the BOS in a list; an empty list without a BOS.
    """
    bos = tokenizer.bos_token_id
    return [bos] if isinstance(bos, int) else []


def _contexts(
    generator: np.random.Generator,
    alphabet: Int[np.ndarray, " symbol"],
    count: int,
    asked: Int[np.ndarray, "row question"],
) -> Int[np.ndarray, "row token"]:
    """Draw sequences, questions and answers, again if a prefix is not unique."""
    size = len(asked)
    tokens = np.full((size, WHOLE * (count + asked.shape[1])), PAD)
    wanting = np.arange(size)
    # Only bad rows are drawn again; with enough symbols one round is almost always enough
    for _ in range(100):
        drawn = alphabet[generator.integers(0, len(alphabet), (len(wanting), count, WHOLE))]
        questions = np.take_along_axis(drawn, asked[wanting][:, :, None], axis=1)
        tokens[wanting] = np.concatenate([drawn, questions], axis=1).reshape(len(wanting), -1)
        wanting = wanting[~_determined(tokens[wanting], count)]
        if not len(wanting):
            return tokens
    raise InputError(
        f"{len(alphabet)} symbols are too few for {count} sequences with unique prefixes; "
        "take more symbols"
    )


def _determined(tokens: Int[np.ndarray, "row token"], count: int) -> Bool[np.ndarray, " row"]:
    """Whether all prefixes of a context differ, and prefixes of questions occur once in it."""
    context = tokens[:, : WHOLE * count]
    prefixes = np.ascontiguousarray(context.reshape(-1, count, WHOLE)[:, :, :PREFIX])
    # A set of bytes per row, O(count); comparing all pairs of prefixes would be O(count^2)
    once = np.array([len({prefix.tobytes() for prefix in row}) == count for row in prefixes])
    # A prefix may also occur across two sequences: all places of the context are searched
    windows = np.lib.stride_tricks.sliding_window_view(context, PREFIX, axis=1)
    for start in range(WHOLE * count, tokens.shape[1], WHOLE):
        prefix = tokens[:, None, start : start + PREFIX]
        once &= (windows == prefix).all(axis=-1).sum(axis=1) == 1
    return once


def _scattered(
    generator: np.random.Generator, rows: int, places: int, total: int
) -> Int[np.ndarray, "row place"]:
    """Distribute `total` items over `places`, per row, uniformly over all ways (stars and bars)."""
    if not total:
        return np.zeros((rows, places), dtype=int)
    # `places` - 1 bars among total + places - 1 items; gaps between bars are the shares.
    bars = np.sort(
        np.argsort(generator.random((rows, total + places - 1)), axis=1)[:, : places - 1], axis=1
    )
    return np.diff(bars, axis=1, prepend=-1, append=total + places - 1) - 1


def _describe(
    tokens: Sequence[int], first: int, token_text: tuple[str, ...], space: str, separator: int = PAD
) -> Prompt:
    """Read a context back; the last sequences that also occur before are questions."""
    starts = tuple(_starts(tokens, first, separator))
    places = [tuple(range(start, start + WHOLE)) for start in starts]
    sequences = [tuple(tokens[start : start + WHOLE]) for start in starts]
    # Prefixes are unique, so the first sequence that occurred before is the first question
    count = next(
        index for index in range(1, len(sequences)) if sequences[index] in sequences[:index]
    )
    asked = sorted(sequences[:count].index(sequence) for sequence in sequences[count:])
    source = [
        at for sequence in sequences[count:] for at in places[sequences.index(sequence)][PREFIX:]
    ]
    generated = [at for question in places[count:] for at in question[PREFIX:]]
    spans = {
        "needle": tuple(at for index in asked for at in places[index]),
        "query": tuple(at for question in places[count:] for at in question[:PREFIX]),
    }
    for number, index in enumerate(asked, start=1):
        spans[f"needle.{number}"] = places[index]
        spans[f"needle.{number}.key"] = places[index][:PREFIX]
        spans[f"needle.{number}.value"] = places[index][PREFIX:]
    others = tuple(at for index in range(count) if index not in asked for at in places[index])
    if others:
        spans["distractor"] = others
    return Prompt(
        tokens=tuple(tokens),
        spans=spans,
        generated=tuple(generated),
        token_text=token_text,
        answers=tuple(
            space.join(token_text[at] for at in question[PREFIX:]) for question in places[count:]
        ),
        attributes={"sequences": count, "length": len(tokens), "source": source},
    )


def _starts(tokens: Sequence[int], first: int, separator: int) -> Iterator[int]:
    """Yield the starts of sequences from `first` on, after any number of `separator` tokens."""
    at = first
    while at < len(tokens):
        if tokens[at] == separator:
            at += 1
        else:
            yield at
            at += WHOLE


SIZES = {
    "small": Copying(),
    "paper": Copying(sequences=38, first_sequences=4, test_from=30, test_to=80, test_step=10),
}
