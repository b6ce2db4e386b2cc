"""A corpus as tokens: documents, a byte-level BPE tokenizer trained on them, and which documents are held out.

Documents are read in the order of their names, so the same files give the same tokenizer and the same tokens. Knows nothing about
windows or models.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from repo_interp.errors import InputError
from repo_interp.tasks.essay import standard_library_sources
from repo_interp.tasks.vocabulary import BOS, PAD

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

HELD_OUT = 20
"""Every 20th document is held out."""
SUFFIXES = (".txt", ".md", ".py")


class Corpus:
    """Documents as token ids, each behind a <bos>; tokenized when first asked for."""

    def __init__(self, documents: Sequence[str], backend: Tokenizer) -> None:
        self._documents = documents
        self._backend = backend
        self.tokenizer = _wrapped(backend)

    @cached_property
    def training(self) -> Int[np.ndarray, " token"]:
        """Documents that are not held out, joined."""
        return self._encoded([text for index, text in enumerate(self._documents) if index % HELD_OUT != HELD_OUT - 1])

    @cached_property
    def held_out(self) -> Int[np.ndarray, " token"]:
        """Held-out documents, joined."""
        return self._encoded(self._documents[HELD_OUT - 1 :: HELD_OUT])

    def held_out_starts(self, length: int) -> Int[np.ndarray, " start"]:
        """Where `length` tokens of one held-out document begin, <bos> left out."""
        edges = np.append(np.flatnonzero(self.held_out == BOS), len(self.held_out))
        spaces = [np.arange(start + 1, stop - length + 1) for start, stop in pairwise(edges)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *spaces])

    @cached_property
    def text(self) -> tuple[str, ...]:
        """The text of every token id; replacement characters where a token is a part of a character."""
        return tuple(self._backend.decode([index], skip_special_tokens=False) for index in range(len(self.tokenizer)))

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """Bytes of text that every token id stands for; 0 for special ones."""
        symbols = [self._backend.id_to_token(index) or "" for index in range(len(self.tokenizer))]
        return tuple(0 if index in (PAD, BOS) else len(symbol) for index, symbol in enumerate(symbols))

    def _encoded(self, documents: Sequence[str]) -> Int[np.ndarray, " token"]:
        plain = type(self._backend).from_str(self._backend.to_str())
        plain.encode_special_tokens = True  # "<pad>" in a document is text like any other
        encodings = plain.encode_batch_fast(list(documents), add_special_tokens=False)
        return np.concatenate([np.zeros(0, dtype=np.int64), *(np.array([BOS, *encoding.ids]) for encoding in encodings)])


@functools.lru_cache(maxsize=4)
def corpus(path: str, vocabulary: int, tokenizer_file: str) -> Corpus:
    """Read a corpus and train, or read, its tokenizer; once a process.

    Raises InputError: nothing readable, too little text, a tokenizer of another kind.
    """
    documents = _documents(path)
    if len(documents) < HELD_OUT:  # too few to hold one out: pieces of all of them
        documents = _pieces("\n".join(documents))
    return Corpus(documents, _read_tokenizer(tokenizer_file) if tokenizer_file else _train(documents, vocabulary))


def _documents(path: str) -> list[str]:
    if not path:
        files: Iterable[Path] = standard_library_sources(Path(sysconfig.get_paths()["stdlib"]))
    elif Path(path).is_dir():
        files = sorted(file for file in Path(path).rglob("*") if file.suffix in SUFFIXES and file.is_file())
    else:
        files = [Path(path)]
    texts = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if not path:
                continue  # sources in another encoding
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"{file}: wanted text for the corpus, but {reason}; name UTF-8 text files") from error
        if text.strip():
            texts.append(text)
    if sum(map(len, texts)) < 10_000:
        where = path or "the standard library"
        wanted = f"wanted a corpus of at least 10,000 characters in {', '.join(SUFFIXES)} files"
        raise InputError(f"{where}: {wanted}, got {sum(map(len, texts))}; name a file or folder with more text")
    return texts


def _pieces(text: str) -> list[str]:
    """A text in 2 x HELD_OUT pieces of the same number of characters, or a little less."""
    size = -(-len(text) // (2 * HELD_OUT))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _train(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return backend


def _read_tokenizer(path: str) -> Tokenizer:
    from tokenizers import Tokenizer, pre_tokenizers

    try:
        backend = Tokenizer.from_file(path)
    except Exception as error:  # the reader raises nothing narrower
        raise InputError(f"{path}: wanted a tokenizer.json, but {' '.join(str(error).split())}; name another file") from error
    fits = backend.id_to_token(PAD) == "<pad>" and backend.id_to_token(BOS) == "<bos>"
    if not fits or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise InputError(
            f"{path}: wanted a byte-level tokenizer with <pad> as id {PAD} and <bos> as {BOS}; name a language checkpoint's"
        )
    return backend


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", clean_up_tokenization_spaces=False
    )
