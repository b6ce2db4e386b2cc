"""Language modelling on a corpus: a text file or folder that the user names, the sources of
Python's standard library, or a corpus of packages.

    <bos> t_2 ... t_n        a window of a document; every token but the first is a target

The tokenizer is a byte-level BPE trained on the corpus (2,048 ids), unless `tokenizer_file` names a
tokenizer.json, so that a checkpoint can be trained further and scored with its tokenizer. <bos> is
the tokenizer's token for the beginning of a text, or for the end of a text if it has none for the
beginning. Every 20th document is held out. Training windows are drawn uniformly from the other
documents, concatenated. Test windows are drawn uniformly from held-out documents that are long
enough, so each lies in one document. The same corpus gives the same data, but another Python
version has other sources.

Test sets are named by the length in tokens. Score: log perplexity, in nats per token.
attributes["bytes"] is the number of bytes of the targets' text, so bits per byte = nats per token *
targets / (bytes ln 2). Prompts have no spans, and nothing is generated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from position_papers.tasks.corpus import NAMED, Corpus, corpus, text_record
from repo_interp.errors import InputError
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Batch, Number, PlainText, Task, doublings, whole_number
from repo_interp.values import TokensOrNone

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Language(PlainText, Task):
    """Language modelling. Lengths in tokens."""

    name: ClassVar[str] = "language"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    named_texts: ClassVar[Mapping[str, Collection[str]]] = {"corpus": tuple(NAMED)}

    corpus: str = ""
    """A UTF-8 text file, or a folder of text files (.txt, .md, .py). Empty: the sources of the
    standard library without its tests. `installed`: prose and code of the standard library and the
    installed packages. `pinned-prose` and `pinned-code`: prose or code of pinned packages.
    """
    tokens: Annotated[int, Interval(ge=258, le=1_000_000)] = 2048
    """Size of the vocabulary."""
    tokenizer_file: str = ""
    """A tokenizer.json to use instead of a tokenizer trained on the corpus."""
    length: Number = 256
    grown_length: TokensOrNone = 0
    """Length of the windows at the end of training: `length` times a power of two; 0: `length`."""
    longest_test: Number = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_ascending(2, "length", "longest_test")
        times = self.training_length // self.length
        self._require(
            self.training_length == self.length * times and times & (times - 1) == 0,
            f"wanted a grown_length of {self.length} times a power of two, or 0, got "
            f"{self.grown_length}",
        )

    @cached_property
    def data(self) -> Corpus:
        """The corpus as tokens; it is read and tokenized once per process."""
        return corpus(self.corpus, self.tokens, self.tokenizer_file)

    @property
    def origin(self) -> str:
        """The task and the name of its corpus."""
        return f"the task language on {Path(self.corpus).name or 'the sources of Python'}"

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return len(self.data.tokenizer)

    @property
    def training_length(self) -> int:
        """The number of tokens of the longest training window."""
        return self.grown_length or self.length

    @property
    def test_sets(self) -> tuple[str, ...]:
        """`length` and its doublings up to `longest_test`."""
        return doublings(self.length, self.longest_test)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the corpus."""
        return self.data.tokenizer

    def sources(self) -> dict[str, str]:
        """A description and the digest of a named corpus."""
        return text_record(self.corpus)

    def batch(self, generator: np.random.Generator, size: int, progress: float = 1.0) -> Batch:
        """Windows of the training documents. Their length doubles after each of equal parts of the
        training while their number halves, down to one window.
        """
        doublings = (self.training_length // self.length).bit_length() - 1
        times = 1 << int(doublings * progress)
        stream, length = self.data.training, self.length * times
        starts = generator.integers(0, len(stream) - length + 2, max(1, size // times))
        return _windows(stream, starts, length, self.data.start)

    def sample(self, generator: np.random.Generator, size: int, test_set: str) -> Batch:
        """Windows of held-out documents. Raises InputError when no document is long enough."""
        length = whole_number(test_set, "the number of tokens")
        starts = self.data.held_out_starts(length - 1)
        if not len(starts):
            raise InputError(
                f"no held-out document has {length - 1} tokens; ask for a shorter length or "
                "give a longer corpus"
            )
        return _windows(self.data.held_out, generator.choice(starts, size), length, self.data.start)

    def describe(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with the text of its tokens and the number of bytes of its targets."""
        data = self.data
        return Prompt(
            tokens=tuple(tokens),
            token_text=tuple(data.text[token] for token in tokens),
            attributes={
                "length": len(tokens),
                "bytes": sum(data.bytes[token] for token in tokens[1:]),
            },
        )


def _windows(stream: np.ndarray, starts: np.ndarray, length: int, first: int) -> Batch:
    """For each start a window that begins with `first`, followed by `length` - 1 tokens."""
    tokens = np.full((len(starts), length), first, dtype=np.int64)
    tokens[:, 1:] = stream[starts[:, None] + np.arange(length - 1)]
    targets = np.ones(tokens.shape, dtype=bool)
    targets[:, 0] = False
    return Batch(tokens, targets)


SIZES = {"small": Language(), "paper": Language(length=512, longest_test=4096)}
