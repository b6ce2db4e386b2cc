"""A corpus as tokens: documents, a byte-level BPE tokenizer trained on them, and which documents are held out.

Documents are read in the order of their names, so the same files give the same tokenizer and the same tokens. Knows nothing about
windows or models.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Corpus:
    """Token ids of training and held-out documents, each document behind a <bos>."""

    tokenizer: PreTrainedTokenizerFast
    training: Int[np.ndarray, " token"]
    held_out: Int[np.ndarray, " token"]
    text: tuple[str, ...]
    """The text of every token id; replacement characters where a token is a part of a character."""
    bytes: tuple[int, ...]
    """Bytes of text that every token id stands for; 0 for special ones."""

    def held_out_starts(self, length: int) -> Int[np.ndarray, " start"]:
        """Where `length` tokens of one held-out document begin, <bos> left out."""
        edges = np.append(np.flatnonzero(self.held_out == BOS), len(self.held_out))
        spaces = [np.arange(start + 1, stop - length + 1) for start, stop in zip(edges, edges[1:], strict=False)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *spaces])


@functools.lru_cache(maxsize=4)
def corpus(path: str, vocabulary: int, tokenizer_file: str) -> Corpus:
    """Read, train and tokenize; once a process. Raises InputError: nothing readable, too little text, a tokenizer of another
    kind.
    """
    documents = _documents(path)
    if len(documents) == 1:  # a single text is split, or nothing would be left to train on
        documents = _pieces(documents[0])
    backend = _read_tokenizer(tokenizer_file) if tokenizer_file else _train(documents, vocabulary)
    tokens = [
        np.array([BOS, *encoding.ids], dtype=np.int64) for encoding in backend.encode_batch(documents, add_special_tokens=False)
    ]
    held_out = [document for index, document in enumerate(tokens) if index % HELD_OUT == HELD_OUT - 1]
    training = [document for index, document in enumerate(tokens) if index % HELD_OUT != HELD_OUT - 1]
    tokenizer = _wrapped(backend)
    size = len(tokenizer)
    symbols = [backend.id_to_token(index) or "" for index in range(size)]
    return Corpus(
        tokenizer=tokenizer,
        training=np.concatenate(training),
        held_out=np.concatenate(held_out or [np.zeros(0, dtype=np.int64)]),
        text=tuple(tokenizer.decode([index]) for index in range(size)),
        bytes=tuple(0 if index in (PAD, BOS) else len(symbol) for index, symbol in enumerate(symbols)),
    )


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
                continue  # a source in another encoding
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
    """A text in 2 x HELD_OUT pieces of whole lines, of about the same size."""
    size = -(-len(text) // (2 * HELD_OUT))
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        pieces.append(text[start:end])
        start = end
    return pieces


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
