"""A corpus as tokens: the documents, split into training and held-out ones, and the tokenizer,
which is a byte-level BPE trained on them or the tokenizer of a checkpoint.

Every document begins with one token: the tokenizer's token for the beginning of a text, or for the
end of a text if it has none for the beginning. Documents are read in the order of their names, so
the same files give the same tokenizer and the same tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import Int

from position_papers.tasks.texts import installed_texts, pinned_texts
from repo_interp.checkpoint_files.tokenizer_files import read_tokenizer
from repo_interp.errors import InputError
from repo_interp.storage.files import regular
from repo_interp.storage.records import require_no_code
from repo_interp.tasks.essay import standard_library_sources
from repo_interp.tasks.pinned import PINNED, packages
from repo_interp.tasks.vocabulary import BOS, PAD

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

HELD_OUT = 20
"""Every 20th document is held out."""
NAMED: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "installed": installed_texts,
    **{name: functools.partial(pinned_texts, name) for name in PINNED},
}
"""Corpora by name: one of the installed packages, and those of pinned packages."""
SUFFIXES = (".txt", ".md", ".py")
_LONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Corpus:
    """Documents as token ids, each preceded by the token `start`. They are tokenized on first use."""

    def __init__(self, documents: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises InputError for a tokenizer with no token for the beginning or end of a text."""
        self._documents = documents
        self._backend = tokenizer.backend_tokenizer
        self.tokenizer = tokenizer
        known = [
            token
            for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
            if isinstance(token, int)
        ]
        if not known:
            raise InputError(
                "the tokenizer names neither a beginning nor an end of text, so documents "
                "cannot be told apart; "
                "put its tokenizer_config.json, which names one, beside its tokenizer.json"
            )
        self.start = known[0]

    @cached_property
    def training(self) -> Int[np.ndarray, " token"]:
        """The documents that are not held out, concatenated."""
        return self._encoded(
            [text for index, text in enumerate(self._documents) if index % HELD_OUT != HELD_OUT - 1]
        )

    @cached_property
    def held_out(self) -> Int[np.ndarray, " token"]:
        """The held-out documents, concatenated."""
        return self._encoded(self._documents[HELD_OUT - 1 :: HELD_OUT])

    def held_out_starts(self, length: int) -> Int[np.ndarray, " start"]:
        """Every index in `held_out` at which `length` tokens of a single document begin, not
        counting its token `start`.
        """
        edges = np.append(np.flatnonzero(self.held_out == self.start), len(self.held_out))
        spaces = [np.arange(start + 1, stop - length + 1) for start, stop in pairwise(edges)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *spaces])

    @cached_property
    def text(self) -> tuple[str, ...]:
        """The text of every token id. A token that is only a part of a character has replacement
        characters instead.
        """
        return tuple(
            self._backend.decode([index], skip_special_tokens=False)
            for index in range(len(self.tokenizer))
        )

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """The number of bytes of text that every token id stands for; 0 for special tokens."""
        special, byte_level = set(self.tokenizer.all_special_ids), _is_byte_level(self._backend)
        symbols = [self._backend.id_to_token(index) or "" for index in range(len(self.tokenizer))]
        return tuple(
            0 if index in special else _bytes_of(symbol, byte_level)
            for index, symbol in enumerate(symbols)
        )

    def _encoded(self, documents: Sequence[str]) -> Int[np.ndarray, " token"]:
        plain = type(self._backend).from_str(self._backend.to_str())
        plain.encode_special_tokens = True  # "<pad>" in a document is text like any other
        encodings = plain.encode_batch_fast(list(documents), add_special_tokens=False)
        return np.concatenate(
            [
                np.zeros(0, dtype=np.int64),
                *(np.array([self.start, *encoding.ids]) for encoding in encodings),
            ]
        )


@functools.lru_cache(maxsize=4)
def corpus(path: str, vocabulary: int, tokenizer_file: str) -> Corpus:
    """Read a corpus and train or read its tokenizer. Results are kept for the whole process.

    Raises InputError when nothing can be read, when there is too little text, and when the
    tokenizer file is missing or its tokenizer cannot separate documents.
    """
    documents = _documents(path)
    if len(documents) < HELD_OUT:  # too few to hold one out: join them and cut the text into pieces
        documents = _pieces("\n".join(documents))
    return Corpus(
        documents,
        _read_tokenizer(Path(tokenizer_file))
        if tokenizer_file
        else _wrapped(_train(documents, vocabulary)),
    )


def text_record(path: str) -> dict[str, str]:
    """A description of a named corpus: its packages if they are pinned, its size, and the SHA-256
    of all its documents in hexadecimal. Empty for files and folders.
    """
    if path not in NAMED:
        return {}
    texts = NAMED[path]()
    return {
        **({"corpus": f"{path}: {packages(path)}"} if path in PINNED else {}),
        "corpus_documents": str(len(texts)),
        "corpus_characters": str(sum(map(len, texts))),
        "corpus_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
    }


def _documents(path: str) -> Sequence[str]:
    if path in NAMED:
        return NAMED[path]()
    if not path:
        files: Iterable[Path] = standard_library_sources(Path(sysconfig.get_paths()["stdlib"]))
    elif Path(path).is_dir():
        files = sorted(
            file for file in Path(path).rglob("*") if file.suffix in SUFFIXES and file.is_file()
        )
    else:
        files = [Path(path)]
    texts = []
    for file in files:
        try:
            text = regular(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if not path:
                continue  # a source file in another encoding
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(
                f"{file}: wanted text for the corpus, but {reason}; name UTF-8 text files"
            ) from error
        if text.strip():
            texts.append(text)
    if sum(map(len, texts)) < 10_000:
        where = path or "the standard library"
        wanted = f"wanted a corpus of at least 10,000 characters in {', '.join(SUFFIXES)} files"
        raise InputError(
            f"{where}: {wanted}, got {sum(map(len, texts))}; name a file or folder with more text"
        )
    return texts


def _pieces(text: str) -> list[str]:
    """Cut a text into at most 2 x HELD_OUT pieces of equal length; the last may be shorter."""
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
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return backend


def _read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Read a tokenizer.json. A tokenizer with our special tokens <pad> and <bos> needs no other
    file; any other needs the tokenizer_config.json in the same folder, which names its special
    tokens.
    """
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the reader raises no more specific exception
        raise InputError(
            f"{file}: wanted a tokenizer.json, but {' '.join(str(error).split())}; name "
            "another file"
        ) from error
    if backend.id_to_token(PAD) == "<pad>" and backend.id_to_token(BOS) == "<bos>":
        return _wrapped(backend)
    if file.name == "tokenizer.json" and (file.parent / "tokenizer_config.json").is_file():
        require_no_code(file.parent)
        return cast("PreTrainedTokenizerFast", read_tokenizer(file.parent))
    raise InputError(
        f"{file}: wanted a tokenizer.json with its tokenizer_config.json beside it, which "
        "says how texts begin"
    )


def _is_byte_level(backend: Tokenizer) -> bool:
    """Whether symbols of the vocabulary have one character per byte, as in GPT-2."""
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])


def _bytes_of(symbol: str, byte_level: bool) -> int:
    """The number of bytes of text that a symbol stands for: its number of characters in a
    byte-level vocabulary, otherwise the size in UTF-8 of a symbol of SentencePiece, which writes a
    mark for a space and <0xE4> for a single byte.
    """
    if byte_level or _LONE_BYTE.fullmatch(symbol):
        return len(symbol) if byte_level else 1
    return len(symbol.replace("\u2581", " ").encode())


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )
