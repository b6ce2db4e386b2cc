"""The tokenizer that a GGUF file describes, as llama.cpp reads it.

    tokenizer.ggml.{model, pre, tokens, token_type, merges, scores, ...} -> tokenizer.json

    gpt2     byte-level BPE: the text is split by the rule of `pre`, then merged
    llama    SentencePiece: pairs are merged by the score of their token; a character that is no
             token becomes its bytes

Missing keys have llama.cpp's defaults (src/llama-vocab.cpp, commit 00ad355e). Other models, other
names of `pre` and unknown keys are refused by name, since they might change the tokens of a text.
Loads no torch and, before a tokenizer is built, no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from repo_interp.errors import InputError, nearest, one_line
from repo_interp.plugins.gguf.header import Header
from repo_interp.plugins.gguf.splits import SPLIT_RULES, SplitRule
from repo_interp.values import shortened

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_KEY = "tokenizer.ggml."
_BYTE_LEVEL, _PIECES = "gpt2", "llama"
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    # As llama.cpp and the package gguf spell it
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
}
"""transformers' names of special tokens, with GGUF's."""
_PIECES_BY_DEFAULT = {"unk": 0, "bos": 1, "eos": 2}
_ENDS = ("eot", "eom")
"""Tokens that end a turn or a message, and therefore a generated text."""
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_HARMLESS = (
    *("model", "pre", "tokens", "token_type", "merges", "scores", *_FLAGS),
    # llama.cpp reads these keys only for other tokenizers.
    *("token_type_count", "add_sep_token", "normalizer.lowercase", "normalizer.strip_accents"),
)
"""Names of keys that this module reads, or that change nothing."""
# Types of tokens, by number
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_WHOLE = (_UNKNOWN, _CONTROL, _USER_DEFINED)
"""Types of tokens that are found in a text before it is split."""
_ESCAPED_SPACE = "\u2581"


def split_rule(header: Header) -> SplitRule | None:
    """Check that the tokenizer is known, and return its rule for splitting a text before merges.

    Args:
        header: Header of a GGUF file.

    Returns:
        The rule; None for SentencePiece, which splits nothing.

    Raises:
        InputError: The model, the rule or a key is unknown.
    """
    file, metadata = header.file, header.metadata
    model = metadata.get(f"{_KEY}model")
    if model not in (_BYTE_LEVEL, _PIECES):
        raise InputError(
            f"{file} says {_KEY}model = {shortened(repr(model))}; wanted a tokenizer that is "
            f"known: {_BYTE_LEVEL} or {_PIECES}"
        )
    if f"{_KEY}tokens" not in header.lists:
        raise InputError(f"{file} lacks {_KEY}tokens; wanted a model with its vocabulary")
    for key, value in metadata.items():
        name = key.removeprefix(_KEY)
        known = name == key or name in _HARMLESS or name.endswith("_token_id")
        # 0, false or empty: an option that is off.
        if not known and value:
            raise InputError(
                f"{file} says {key} = {shortened(str(value))}, which might say which tokens a "
                "text becomes and is not known; refused"
            )
    if model == _PIECES:
        return None
    # llama.cpp's name for the rule of older files, which lack the key
    name = metadata.get(f"{_KEY}pre", "default")
    if name not in SPLIT_RULES:
        raise InputError(
            f"{file} says {_KEY}pre = {shortened(repr(name))}, a rule for splitting text that is "
            f"not known; {nearest(str(name), SPLIT_RULES)}wanted one of {len(SPLIT_RULES)} names "
            "of llama.cpp, such as gpt-2, llama-bpe, qwen2 or smollm"
        )
    return SPLIT_RULES[name]


def special_ids(header: Header) -> dict[str, int]:
    """Read the ids of special tokens.

    Args:
        header: Header of a GGUF file.

    Returns:
        Ids by transformers' names: bos, eos, unk, sep, pad, mask, if they exist.

    Raises:
        InputError: An id is none of the vocabulary.
    """
    defaults = _PIECES_BY_DEFAULT if header.metadata.get(f"{_KEY}model") == _PIECES else {}
    found = {name: _id(header, key, defaults.get(name)) for name, key in _SPECIAL.items()}
    return {name: number for name, number in found.items() if number is not None}


def end_ids(header: Header) -> list[int]:
    """Read the ids of tokens at which a generated text ends.

    Args:
        header: Header of a GGUF file.

    Returns:
        EOS first, then the ends of a turn and of a message that the file names.

    Raises:
        InputError: An id is none of the vocabulary.
    """
    found = [special_ids(header).get("eos"), *(_id(header, key, None) for key in _ENDS)]
    return list(dict.fromkeys(number for number in found if number is not None))


def tokenizer_of(header: Header) -> PreTrainedTokenizerFast:
    """Build the tokenizer.

    Args:
        header: Header of a GGUF file.

    Returns:
        The tokenizer, with its chat template as text.

    Raises:
        InputError: The tokenizer is unknown, or its lists do not fit each other.
    """
    from transformers import PreTrainedTokenizerFast

    rule, file = split_rule(header), header.file
    # llama.cpp's name for a token without text
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(_texts(header, "tokens"))]
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if vocabulary.setdefault(token, number) != number:
            raise InputError(
                f"{file}: {_KEY}tokens has {one_line(repr(token), 100)} twice, as "
                f"{vocabulary[token]} and {number}"
            )
    types = _numbers(header, "token_type", tokens) or [_NORMAL] * len(tokens)
    special = special_ids(header)
    backend = (
        _pieces(header, vocabulary, types, special)
        if rule is None
        else _byte_level(header, vocabulary, rule)
    )
    _add_whole_tokens(backend, tokens, types)
    # Files of Gemma do not name it, and Gemma's tokenizer does.
    if "<mask>" in vocabulary and types[vocabulary["<mask>"]] == _CONTROL:
        special.setdefault("mask", vocabulary["<mask>"])
    named = {f"{name}_token": tokens[number] for name, number in special.items()}
    adds = {
        "add_bos_token": _flag(header, "add_bos_token", rule is None or rule.add_bos),
        "add_eos_token": _flag(header, "add_eos_token", False),
    }
    for flag, added in adds.items():
        name = flag.removeprefix("add_").removesuffix("_token")
        if added and name not in special:
            raise InputError(
                f"{file}: texts get a token {name.upper()} by {_KEY}{flag} or by its default, "
                f"and {_KEY}{name}_token_id names none"
            )
    template = header.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **named,
        **adds,
        **({} if template is None else {"chat_template": str(template)}),
        # As transformers' tokenizers of either kind
        padding_side="left" if rule is None else "right",
        clean_up_tokenization_spaces=False,
    )


def _byte_level(header: Header, vocabulary: Mapping[str, int], rule: SplitRule) -> Tokenizer:
    """BPE of the bytes of pieces; `add_space_prefix` is not read, as in llama.cpp."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = []
    # Of equal merges the first counts.
    for merge in dict.fromkeys(_texts(header, "merges")):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise InputError(
                f"{header.file}: {_KEY}merges has {one_line(repr(merge), 100)}; wanted two tokens "
                "with a space between them that together are a third one"
            )
        merges.append((left, right))
    backend = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
            ignore_merges=rule.ignore_merges,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in rule.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(
    header: Header,
    vocabulary: Mapping[str, int],
    types: Sequence[int],
    special: Mapping[str, int],
) -> Tokenizer:
    """SentencePiece's BPE: merges follow from the scores, and other characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(header, "scores", vocabulary)
    if scores is None:
        raise InputError(f"{header.file} lacks {_KEY}scores, which say what is merged first")
    unknown = next(token for token, number in vocabulary.items() if number == special["unk"])
    backend = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=_merges_by_score(header, vocabulary, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A space before every text and after every special token, as llama.cpp has it
    prefixed = _flag(header, "add_space_prefix", True)
    escaped = normalizers.Replace(" ", _ESCAPED_SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_ESCAPED_SPACE), escaped])
        if prefixed
        else escaped
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_ESCAPED_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return backend


def _merges_by_score(
    header: Header,
    vocabulary: Mapping[str, int],
    types: Sequence[int],
    scores: Sequence[float],
) -> list[tuple[str, str]]:
    """All pairs of tokens that together are a token, sorted by score, the highest first."""
    scored: list[tuple[float, str]] = []
    pairs: dict[str, list[tuple[str, str]]] = {}
    for token, number in vocabulary.items():
        # Found whole before anything is merged, unless it is spelled with an escaped space.
        whole = types[number] in _WHOLE and _ESCAPED_SPACE not in token
        if whole or types[number] == _BYTE:
            continue
        parts = ((token[:place], token[place:]) for place in range(len(token) - 1, 0, -1))
        if found := [(a, b) for a, b in parts if a in vocabulary and b in vocabulary]:
            pairs[token] = found
            scored.append((scores[number], token))
    scored.sort(key=lambda pair: -pair[0])
    for (score, token), (following, other) in pairwise(scored):
        # llama.cpp merges the first one in the text then, for which a list of merges has no order.
        if score == following:
            raise InputError(
                f"{header.file}: {_KEY}scores has {score:g} for {one_line(repr(token), 40)} and "
                f"for {one_line(repr(other), 40)}, so that none is merged first; refused"
            )
    return [pair for _, token in scored for pair in pairs[token]]


def _add_whole_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add special and user-defined tokens that are found whole in a text before splitting."""
    from tokenizers import AddedToken

    whole = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=False)
        if kind in _WHOLE
    ]
    backend.add_special_tokens([token for token in whole if token.special])
    backend.add_tokens([token for token in whole if not token.special])


def _texts(header: Header, name: str) -> list[str]:
    """Return the list of texts `name`; raises InputError if it is missing or malformed."""
    key = f"{_KEY}{name}"
    found = header.items(key) if key in header.lists else []
    if not found or not all(isinstance(item, str) for item in found):
        raise InputError(
            f"{header.file} lacks {key}, or it is no list of texts; wanted a whole tokenizer as "
            "llama.cpp's converters write it"
        )
    return found


def _numbers(header: Header, name: str, tokens: Sequence[Any] | Mapping[str, int]) -> Any:
    """Return the list of numbers `name`, one for each token; None if it is missing."""
    key = f"{_KEY}{name}"
    if key not in header.metadata:
        return None
    found = header.items(key) if key in header.lists else []
    if len(found) < len(tokens) or any(isinstance(item, str) or item != item for item in found):
        raise InputError(
            f"{header.file}: {key} has {len(found)} numbers; wanted one for each of "
            f"{len(tokens)} tokens"
        )
    return found


def _flag(header: Header, name: str, default: bool) -> bool:
    value = header.metadata.get(f"{_KEY}{name}", default)
    if not isinstance(value, bool):
        raise InputError(
            f"{header.file} says {_KEY}{name} = {shortened(repr(value))}; wanted true or false"
        )
    return value


def _id(header: Header, name: str, default: int | None) -> int | None:
    key = f"{_KEY}{name}_token_id"
    value, tokens = header.metadata.get(key, default), header.metadata[f"{_KEY}tokens"]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise InputError(
            f"{header.file} says {key} = {shortened(repr(value))}; wanted the place of one of "
            f"{len(tokens)} tokens"
        )
    return value
