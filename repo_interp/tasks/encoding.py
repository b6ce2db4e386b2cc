"""Text and character spans through a Hugging Face fast tokenizer: token ids, offsets, and the text of each token.

Special tokens that the tokenizer puts before a text (BOS) stay, with no width; those it puts behind (EOS,
SEP) are dropped, because a decoder goes on writing where the prompt ends. Knows nothing about spans, prompts
or tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repo_interp.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a text. `offsets` are half-open character ranges in the text as it was given, before any
    normalisation.
    """

    tokens: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    token_text: tuple[str, ...]
    """The piece of text that each token covers; a token of no width stands as its own name, like <bos>."""


def encode(text: str, tokenizer: PreTrainedTokenizerBase | None) -> EncodedText:
    """Encode `text`. Raises InputError without a tokenizer, with one that knows no offsets, or when it gives
    no tokens.
    """
    if tokenizer is None:
        raise InputError(
            "text needs a tokenizer, but there is none; give the prompt as token ids, or add a tokenizer.json to the checkpoint"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"spans need character offsets, {type(tokenizer).__name__} has none; "
            "use a fast tokenizer (tokenizer.json), or give the prompts as token ids"
        )
    try:
        encoded = tokenizer(
            text,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            verbose=False,
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the tokenizer cannot encode the text ({reason}); use text made of its vocabulary") from error
    added = list(encoded["special_tokens_mask"])
    length = len(added)
    while length and added[length - 1]:
        length -= 1
    if not length:
        raise InputError(f"the text {text[:40]!r} gives no tokens with this tokenizer; give it some words")
    tokens = tuple(encoded["input_ids"][:length])
    offsets = _over_gaps(encoded["offset_mapping"][:length], added[:length], len(text))
    names = tokenizer.convert_ids_to_tokens(list(tokens))
    pieces = tuple(text[start:end] if start < end else str(name) for (start, end), name in zip(offsets, names, strict=True))
    return EncodedText(tokens, offsets, pieces)


def _over_gaps(offsets: Sequence[tuple[int, int]], added: Sequence[int], end: int) -> tuple[tuple[int, int], ...]:
    """Give tokens of white space alone, whose offsets some tokenizers trim to nothing, the gap that they
    stand in.
    """
    following, after = [], end
    for start, stop in reversed(offsets):
        following.append(after)
        after = start if start < stop else after
    widened, before = [], 0
    for (start, stop), special, after in zip(offsets, added, reversed(following), strict=True):
        if start < stop:
            before = stop
        elif not special:
            start, stop = before, max(before, after)
        widened.append((start, stop))
    return tuple(widened)


def count_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of tokens of `text`, added ones (BOS, EOS) included. Faster than `encode`."""
    return len(tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
