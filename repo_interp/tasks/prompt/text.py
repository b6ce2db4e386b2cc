"""Prompts from text with named spans, encoded by any fast tokenizer of Hugging Face.

With token t covering the characters [start_t, end_t):

    span(t) = argmax over top-level spans s of |[start_t, end_t) n s|,  on a tie the one first in t

so a token that a tokenizer merges across a span's edge belongs to a span with any overlap, and a
part has the tokens of its parent that it overlaps. Tokens without width (BOS and other added
tokens) belong to no span. If several tokens share one character (byte-level BPE on non-ASCII text),
all of them belong to the span.

Special tokens that the tokenizer prepends (BOS) are kept, without width, unless the text already
begins with BOS. Special tokens that it appends (EOS, SEP) are dropped, because a decoder continues
the text where the prompt ends. This module knows nothing about tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from repo_interp.errors import InputError, as_input_errors, quoted
from repo_interp.runtime.interruptible import interruptible
from repo_interp.tasks.prompt import GENERATED, Intervals, Prompt, check_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LONG = 100_000
"""Characters of a text so long that tokenizing it would delay an interruption."""


class MarkedText:
    """A text and the character ranges of its spans; texts are appended."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def add(self, piece: str, *spans: str) -> None:
        """Write a piece at the end.

        Args:
            piece: Text.
            *spans: Spans of the piece; it belongs to their parents, too.
        """
        start, self._length = self._length, self._length + len(piece)
        self._pieces.append(piece)
        if not piece:
            return
        # needle.1.key, needle.1, needle: without duplicates, in order
        whole = {
            span.rsplit(".", depth)[0]: None
            for span in spans
            for depth in range(span.count("."), -1, -1)
        }
        for span in whole:
            ranges = self._spans.setdefault(span, [])
            # Pieces that touch are one range
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], self._length)
            else:
                ranges.append((start, self._length))

    @property
    def text(self) -> str:
        """Everything written so far."""
        return "".join(self._pieces)

    @property
    def characters(self) -> dict[str, Intervals]:
        """Half-open character ranges by span."""
        return {name: tuple(ranges) for name, ranges in self._spans.items()}


def prompt_from_text(
    text: str,
    characters: Mapping[str, Intervals],
    tokenizer: PreTrainedTokenizerBase | None,
    answers: Iterable[str] = (),
    attributes: Mapping[str, Any] | None = None,
) -> Prompt:
    """Encode a text with character spans.

    Args:
        text: Text of the prompt and of its generated answer.
        characters: Character ranges by name, "generated" for the answer.
        tokenizer: Fast tokenizer.
        answers: Reference answers.
        attributes: Attributes of the prompt.

    Returns:
        The prompt.

    Raises:
        InputError: The text is empty, spans do not fit together or get no token, or the tokenizer
            has no offsets.
    """
    if not text:
        raise InputError("the text is empty: give it at least one character")
    check_intervals(characters, len(text))
    places = {name: characters_of(intervals) for name, intervals in characters.items()}
    # As characters first, so that errors use the same units as the given spans
    check_spans(places, places.pop(GENERATED, ()), len(text), "character")
    encoded = encode(text, tokenizer)
    spans = token_spans(encoded.offsets, characters, len(text))
    generated = spans.pop(GENERATED, ())
    return Prompt(
        tokens=encoded.tokens,
        spans=spans,
        generated=generated,
        token_text=encoded.token_text,
        text=text,
        characters=dict(characters),
        answers=tuple(answers),
        attributes=dict(attributes or {}),
    )


def chat_text(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Write messages as the text that a model answers, or that ends with its answer.

    Uses the chat template of the tokenizer, else a line `role: content` per message, as inspect-ai
    writes it. Raises InputError if the template refuses the messages.

    Args:
        messages: Role and content of every message.
        tokenizer: Tokenizer, or None.

    Returns:
        One text.
    """
    if tokenizer is None or not tokenizer.chat_template:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    with as_input_errors("the chat template of the tokenizer does not take the messages"):
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                # Behind an answer no other one begins
                add_generation_prompt=messages[-1]["role"] != "assistant",
            )
        )


def is_chat(given: Any) -> bool:
    """Return whether something is a list of messages.

    Args:
        given: Anything.

    Returns:
        True for a nonempty sequence of only mappings.
    """
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes)
        and len(given) > 0
        and all(isinstance(message, Mapping) for message in given)
    )


def text_of_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase | None
) -> str:
    """Write messages as the model was trained to read them.

    Args:
        messages: Messages with "role" and "content", both texts.
        tokenizer: Tokenizer with a chat template.

    Returns:
        The text, special tokens in it.

    Raises:
        InputError: There is no template, it refuses the messages, or one is not a message.
    """
    for number, message in enumerate(messages):
        if not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise InputError(
                f"message {number} of the chat is {quoted(dict(message))}; wanted texts "
                'as {"role": "user", "content": "..."}'
            )
    if not getattr(tokenizer, "chat_template", None):
        name = "this model has no tokenizer" if tokenizer is None else "its tokenizer has none"
        raise InputError(
            f"a list of messages needs a chat template, and {name}; give the text as the model "
            "was trained to read it"
        )
    return chat_text([dict(message) for message in messages], tokenizer)


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a text.

    `offsets` are half-open character ranges in the text as it was given, before any normalization.
    """

    tokens: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    token_text: tuple[str, ...]
    """The piece of text that every token covers; of a token of no width its name, like <bos>."""


def encode(text: str, tokenizer: PreTrainedTokenizerBase | None) -> EncodedText:
    """Encode a text.

    Args:
        text: Text.
        tokenizer: Fast tokenizer.

    Returns:
        Tokens with their character ranges.

    Raises:
        InputError: There is no tokenizer, it has no offsets, or the text gives no tokens.
    """
    if tokenizer is None:
        raise InputError(
            "text needs a tokenizer, but there is none; give the prompt as token ids, or a model "
            "as ri.open_model returns it, from a checkpoint with a tokenizer.json"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"spans need character offsets, {type(tokenizer).__name__} has none; "
            "use a fast tokenizer (tokenizer.json), or give the prompts as token ids"
        )
    try:
        encoded = _tokenized(
            text,
            tokenizer,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"the tokenizer cannot encode the text ({reason}); use text made of its vocabulary"
        ) from error
    added = list(encoded["special_tokens_mask"])
    # a text that begins with the BOS, as chat templates write it, gets no second one
    twice = added[:1] == [1] and encoded["input_ids"][:2] == [tokenizer.bos_token_id] * 2
    first, length = int(twice), len(added)
    # EOS and SEP at the end: a decoder continues there
    while length and added[length - 1]:
        length -= 1
    if not length:
        raise InputError(
            f"the text {text[:40]!r} gives no tokens with this tokenizer; give it some words"
        )
    tokens = tuple(encoded["input_ids"][first:length])
    offsets = _over_gaps(encoded["offset_mapping"][first:length], added[first:length], len(text))
    names = tokenizer.convert_ids_to_tokens(list(tokens))
    pieces = tuple(
        text[start:end] if start < end else str(name)
        for (start, end), name in zip(offsets, names, strict=True)
    )
    return EncodedText(tokens, offsets, pieces)


def _over_gaps(
    offsets: Sequence[tuple[int, int]], added: Sequence[int], end: int
) -> tuple[tuple[int, int], ...]:
    """Give white-space tokens the gaps that they fill, since some tokenizers trim their offsets."""
    # following[t]: where the next token with a width begins
    following, after = [], end
    for start, stop in reversed(offsets):
        following.append(after)
        after = start if start < stop else after
    widened, before = [], 0
    for (start, stop), special, after in zip(offsets, added, reversed(following), strict=True):
        if start < stop:
            before = stop
        # Tokens that were added, such as BOS, keep no width
        elif not special:
            start, stop = before, max(before, after)
        widened.append((start, stop))
    return tuple(widened)


def count_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens of a text, added ones (BOS, EOS) included; faster than `encode`.

    Args:
        text: Text.
        tokenizer: Tokenizer.

    Returns:
        Number of tokens.
    """
    return len(_tokenized(text, tokenizer)["input_ids"])


def _tokenized(text: str, tokenizer: PreTrainedTokenizerBase, **wanted: Any) -> Any:
    """Tokenize a text."""

    def call() -> Any:
        return tokenizer(text, return_attention_mask=False, verbose=False, **wanted)

    # A second for a megabyte
    return call() if len(text) < _LONG else interruptible(call)


def largest_size(count: Callable[[int], int], budget: int) -> int:
    """Find the largest size whose count fits a budget.

    `count` grows about linearly, so false position, with at least one step per side, needs few
    calls.

    Args:
        count: Counts a size.
        budget: Largest count.

    Returns:
        The size; 0 where size 1 does not fit.
    """
    fits, fits_count = 1, count(1)
    if fits_count > budget:
        return 0
    # Tokens per unit from 32 units: seams would dominate a single one
    fails, rate = None, (count(33) - fits_count) / 32
    while fails is None or fails - fits > 1:
        # At least one step, and below a size that failed: so the bracket always narrows
        guess = fits + max(1, int((budget - fits_count) / max(rate, 1e-3)))
        if fails is not None:
            guess = min(guess, fails - 1)
        guess_count = count(guess)
        if guess > fits:
            # Of the latest step, since rates change along a text; 0 would make the next one endless
            rate = max((guess_count - fits_count) / (guess - fits), 0.1)
        if guess_count <= budget:
            fits, fits_count = guess, guess_count
        else:
            fails = guess
    return fits


def check_intervals(characters: Mapping[str, Intervals], length: int) -> None:
    """Check half-open character ranges against a text.

    Args:
        characters: Ranges by name.
        length: Characters of the text.

    Raises:
        InputError: A range is reversed, empty or out of range.
    """
    for name, intervals in characters.items():
        for start, end in intervals:
            if not 0 <= start < end <= length:
                fault = "reversed" if start > end else "empty" if start == end else "out of range"
                raise InputError(
                    f'the span "{name}" holds [{start}, {end}], which is {fault}; '
                    f"wanted 0 <= start < end <= {length}, the characters of the text"
                )


def characters_of(intervals: Intervals) -> Int[np.ndarray, " character"]:
    """List the characters of half-open ranges.

    Args:
        intervals: Ranges.

    Returns:
        Characters in the order of the ranges.
    """
    return np.concatenate([np.arange(start, end) for start, end in intervals] or [np.arange(0)])


def token_spans(
    offsets: Sequence[tuple[int, int]], characters: Mapping[str, Intervals], length: int
) -> dict[str, tuple[int, ...]]:
    """Turn spans of characters into spans of tokens.

    Args:
        offsets: Character range [start, end) of every token.
        characters: Character ranges by name, which fit together (`check_spans`).
        length: Characters of the text.

    Returns:
        Token indices by name.

    Raises:
        InputError: A span gets no token.
    """
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    top = [name for name in characters if "." not in name]
    owner = np.full(length, -1)
    for label, name in enumerate(top):
        owner[characters_of(characters[name])] = label
    belongs = _largest_overlap(owner, starts, ends, len(top))

    tokens: dict[str, tuple[int, ...]] = {}
    # Parents first: a part is cut to its parent's tokens
    for name in sorted(characters, key=lambda name: name.count(".")):
        if "." not in name:
            members = belongs == top.index(name)
        else:
            inside = np.zeros(length, dtype=bool)
            inside[characters_of(characters[name])] = True
            # A part takes all tokens that it touches; parts may overlap
            members = _overlap(inside, starts, ends) > 0
            parent = np.zeros(len(starts), dtype=bool)
            parent[list(tokens[name.rpartition(".")[0]])] = True
            members &= parent
        if not members.any():
            raise InputError(
                f'the span "{name}" covers no token of its own with this tokenizer; widen it '
                "or leave it out"
            )
        tokens[name] = tuple(np.flatnonzero(members).tolist())
    return {name: tokens[name] for name in characters}


def _overlap(inside: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Int[np.ndarray, " token"]:
    """Number of characters of every token that are inside."""
    # Running sums: characters inside a token are a difference of two
    before = np.concatenate([[0], np.cumsum(inside)])
    return before[ends] - before[starts]


def _largest_overlap(
    owner: np.ndarray, starts: np.ndarray, ends: np.ndarray, labels: int
) -> Int[np.ndarray, " token"]:
    """Label of most characters of every token, on a tie the first in the token; -1: none."""
    if not labels:
        return np.full(len(starts), -1)
    shares = np.stack([_overlap(owner == label, starts, ends) for label in range(labels)])
    largest = shares.max(axis=0)
    belongs = np.where(largest > 0, shares.argmax(axis=0), -1)
    # Only ties, which are rare, are handled one by one
    for token in np.flatnonzero((largest > 0) & ((shares == largest).sum(axis=0) > 1)):
        tied = np.flatnonzero(shares[:, token] == largest[token])
        inside = owner[starts[token] : ends[token]]
        belongs[token] = inside[np.isin(inside, tied)][0]
    return belongs
