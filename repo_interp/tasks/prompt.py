"""A prompt: tokens with named spans, and what was generated after it.

Every token is in at most one top-level span, or generated, or in the rest. Knows nothing about files, models
or how tasks make prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from repo_interp.errors import InputError
from repo_interp.tasks.encoding import encode
from repo_interp.tasks.spans import (
    GENERATED,
    REST,
    Intervals,
    characters_of,
    check_intervals,
    check_spans,
    token_spans,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt and of what was generated after it, with the tokens of every named span.

    Raises InputError when the spans do not fit together (see `spans.check_spans`).
    """

    tokens: tuple[int, ...]
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Token indices by name; top-level spans are disjoint, a dotted name is a part of its parent."""
    generated: tuple[int, ...] = ()
    """Indices of generated tokens: for teacher-forced prompts those of the reference answer."""
    token_text: tuple[str, ...] | None = None
    text: str | None = None
    """What the prompt was made from; else its tokens as text, to be read, which may be encoded otherwise."""
    characters: Mapping[str, Intervals] | None = None
    """Character ranges of the spans and of "generated" in the text that the prompt was made from; None where it was made from tokens."""
    answers: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """What the task knows about the prompt (plain JSON values): length, depth, variant, ..."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("the prompt is empty: give it at least one token")
        if self.token_text is not None and len(self.token_text) != len(self.tokens):
            raise InputError(
                f"wanted one token_text a token, got {len(self.token_text)} for {len(self.tokens)} tokens; mend it or drop it"
            )
        if self.text is None and self.characters is not None:
            raise InputError("text and characters of a prompt come together; use prompt_from_text, or leave both out")
        if self.text is None and self.token_text is not None:
            object.__setattr__(self, "text", _written(self.token_text))
        check_spans(self.spans, self.generated, len(self.tokens), "token")

    def all_spans(self) -> dict[str, tuple[int, ...]]:
        """The named spans, then `rest` (in no named span and not generated, unless given) and `generated`,
        where not empty.
        """
        spans = dict(self.spans)
        if REST not in spans:
            named = {index for places in (*spans.values(), self.generated) for index in places}
            spans[REST] = tuple(index for index in range(len(self.tokens)) if index not in named)
        spans[GENERATED] = self.generated
        return {name: places for name, places in spans.items() if places}


def _written(pieces: Sequence[str]) -> str:
    """The texts of tokens as one, words apart, without the special tokens that stand before it."""
    first = 0
    while first < len(pieces) - 1 and re.fullmatch(r"<\|?\w+\|?>", pieces[first]):
        first += 1
    apart = "" if any(character.isspace() for piece in pieces for character in piece) else " "
    return apart.join(pieces[first:])


def prompt_from_text(
    text: str,
    characters: Mapping[str, Intervals],
    tokenizer: PreTrainedTokenizerBase | None,
    answers: Iterable[str] = (),
    attributes: Mapping[str, Any] | None = None,
) -> Prompt:
    """Encode a text with character spans, "generated" among them if there is something generated.

    Raises InputError when the spans do not fit together, or get no token, or the tokenizer cannot tell
    offsets.
    """
    if not text:
        raise InputError("the text is empty: give it at least one character")
    check_intervals(characters, len(text))
    places = {name: characters_of(intervals) for name, intervals in characters.items()}
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
