"""Tokenizers of three families, trained in a moment on a little text, for the tests of tasks."""

from __future__ import annotations

import functools

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = """
One of the special magic numbers for brave-apple is: 7654321. One of the special magic words for calm-river
is: keen-violin. A special magic number is hidden within the following text. Make sure to memorize it. I will
quiz you about the number afterwards. Some special magic numbers are hidden. What are all the special magic
uuids mentioned in the provided text? The grass is green. The sky is blue. The sun is yellow. Here we go.
There and back again. 0123456789 abcdef- Die Straße führt über die Brücke; le cœur a ses raisons; 東京は大きい。
Привет, мир! naïve café 🙂 """.strip().split("\n")

FAMILIES = (
    "byte_level_bpe",
    "byte_level_bpe_trimmed",
    "metaspace_unigram",
    "metaspace_bpe",
    "words",
)


@functools.cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a family, with a BOS in front."""
    backend = _BUILD[family]()
    backend.add_special_tokens(["<bos>"])
    bos = backend.token_to_id("<bos>")
    bos_first = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    if family == "byte_level_bpe_trimmed":
        backend.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=True), bos_first]
        )
    else:
        backend.post_processor = bos_first
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT[:4],
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def _metaspace_bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return backend


def _words() -> Tokenizer:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    return backend


_BUILD = {
    "byte_level_bpe": _byte_level,
    "byte_level_bpe_trimmed": _byte_level,
    "metaspace_unigram": _unigram,
    "metaspace_bpe": _metaspace_bpe,
    "words": _words,
}


def word_tokenizer(words=("grass", "sky"), **special):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*special.values(), *words]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "bos_token" in special:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokens.index("<bos>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
