"""A prompt: tokens with named spans, and the tokens that were generated after it.

A span is a set of places of a prompt - characters of its text, or tokens. Top-level spans
(`needle`, `query`, ...) and the generated places are disjoint: every token is in at most one of
them, or in the rest. A dotted name is a part of its parent (`needle.1.key` of `needle.1` of
`needle`), inside it; parts may overlap.

This file knows nothing about tokenizers, files or tasks. Prompts are made from text by `text`, read
and written by `jsonl`, and divided into sentences, lines and blocks by `structure`.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from repo_interp.errors import InputError, quoted

Intervals = tuple[tuple[int, int], ...]
"""Half-open ranges of characters."""

Places = Sequence[int] | np.ndarray
"""Indices of tokens or of characters."""

SPECIAL = re.compile(r"<\|?\w+\|?>")
"""How special tokens are written."""
GENERATED = "generated"
REST = "rest"
NEXT = "the token that the answer copies next"
"""Name of the needle if every token of an answer has a separate needle (`copies_next`)."""


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt and its generated answer, with the tokens of every named span.

    Raises InputError when the spans do not fit together (see `check_spans`).
    """

    tokens: tuple[int, ...]
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Token indices by name; top-level spans are disjoint, a dotted name is a part of its parent.

    The prompt is about the first named span, unless it has a needle: heads are ranked by the
    attention that they send there.
    """
    generated: tuple[int, ...] = ()
    """Indices of generated tokens; for teacher-forced prompts, of the reference answer."""
    token_text: tuple[str, ...] | None = None
    text: str | None = None
    """The encoded text; without one, the tokens as readable text, whose encoding may differ."""
    characters: Mapping[str, Intervals] | None = None
    """Character ranges of the spans and of "generated" in the text that the prompt was made from;
    None if it was made from tokens.
    """
    answers: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the prompt from its task (plain JSON values): length, depth, variant, ..."""
    position_ids: tuple[int, ...] | tuple[tuple[int, int, int], ...] | None = None
    """Position ids for the model, one per token, as for packed documents, or (time, height, width)
    per token for a prompt with an image (mRoPE); None: the token index. Ids equal to the index
    become None.
    """
    documents: int | None = None
    """Number of documents that position ids separate: 1, or one more than the jumps (ids that do
    not increase by 1). None: documents begin at each jump if all jumps lead back to 0 or to the
    first position, else it is one text. A number that equals this default becomes None.
    """

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError("the prompt is empty: give it at least one token")
        try:
            # numbers of numpy and torch as Python's, which files hold; floats are refused
            tokens = _whole(self.tokens)
        except TypeError:
            tokens = (-1,)
        if min(tokens) < 0:
            raise InputError(
                f"tokens of a prompt are {str(self.tokens)[:60]}; wanted whole numbers from 0"
            )
        object.__setattr__(self, "tokens", tokens)
        if self.token_text is not None and len(self.token_text) != len(self.tokens):
            raise InputError(
                f"wanted one token_text per token, got {len(self.token_text)} for "
                f"{len(self.tokens)} tokens; fix it or drop it"
            )
        if self.text is None and self.characters is not None:
            raise InputError(
                "text and characters of a prompt come together; use prompt_from_text, or "
                "leave both out"
            )
        if self.text is None and self.token_text is not None:
            # The class is frozen: normalized fields are set around it
            object.__setattr__(self, "text", _written(self.token_text))
        check_spans(self.spans, self.generated, len(self.tokens), "token")
        object.__setattr__(self, "generated", _whole(self.generated))
        object.__setattr__(
            self, "spans", {name: _whole(places) for name, places in self.spans.items()}
        )
        if self.position_ids is not None:
            object.__setattr__(self, "position_ids", self._checked_ids(self.position_ids))
        object.__setattr__(self, "documents", self._checked_documents())
        for place in self.sources or ():
            if not 0 <= place < len(self.tokens):
                raise InputError(
                    f'the attribute "source" holds token {place}, but the prompt has the '
                    f"tokens 0 to {len(self.tokens) - 1}; fix it"
                )

    def _checked_ids(self, given: Any) -> tuple[int, ...] | tuple[tuple[int, int, int], ...] | None:
        # Arrays and tensors of other libraries
        given = given.tolist() if hasattr(given, "tolist") else given
        places: Any = given if isinstance(given, Sequence) else [None]
        # mRoPE: (time, height, width) per token
        by_axis = all(isinstance(place, Sequence) and len(place) == 3 for place in places)
        if not all(
            hasattr(number, "__index__") and 0 <= number < 1 << 31
            for number in (chain.from_iterable(places) if by_axis else places)
        ):
            raise InputError(
                f"position ids of a prompt are {str(given)[:60]}; wanted whole numbers from 0, "
                "one per token, or [time, height, width] per token"
            )
        if len(given) != len(self.tokens):
            raise InputError(
                f"wanted one position id per token, got {len(given)} for {len(self.tokens)} "
                "tokens; fix them or drop them"
            )
        if by_axis:
            return tuple(map(_whole, given))  # pyright: ignore[reportReturnType]
        ids = _whole(given)
        # The index needs no special treatment, and `require_index` is not to refuse the prompt
        return None if ids == tuple(range(len(ids))) else ids

    def _checked_documents(self) -> int | None:
        given, most = self.documents, 1 + len(self.jumps)
        default = _documents_of(self.position_ids, self.jumps)
        if given is None and default is None:
            raise InputError(
                "position ids of a prompt begin again, as where documents are packed, and jump "
                "elsewhere too; say documents=1 where it is one text, or "
                f"documents={most} where each jump begins one"
            )
        if given is not None and (isinstance(given, bool) or given not in (1, most)):
            raise InputError(
                f"documents are {quoted(given)}; with these position ids wanted is 1"
                + (f", or {most} where each jump begins one" if most > 1 else "")
            )
        return None if given == default else given

    @property
    def jumps(self) -> tuple[int, ...]:
        """Tokens whose position is not the previous token's position + 1.

        Positions by axis belong to one text with images, and have no jumps.
        """
        ids: Any = self.position_ids
        if ids is None or not isinstance(ids[0], int):
            return ()
        return tuple(t for t in range(1, len(ids)) if ids[t] != ids[t - 1] + 1)

    @property
    def document_count(self) -> int:
        """Number of documents in the prompt; a document attends only to itself."""
        if self.position_ids is None:
            return 1
        return self.documents or _documents_of(self.position_ids, self.jumps) or 1

    @property
    def sources(self) -> tuple[int, ...] | None:
        """Token that every generated one copies, by the attribute "source"; None without it."""
        source = self.attributes.get("source")
        if not isinstance(source, list | tuple) or not len(source) == len(self.generated) > 0:
            return None
        # An attribute is any JSON, so another list called "source" is not an error
        whole = all(hasattr(place, "__index__") and not isinstance(place, bool) for place in source)
        return _whole(source) if whole else None

    def all_spans(self) -> dict[str, tuple[int, ...]]:
        """Complete the named spans.

        Returns:
            The named spans, then `rest` (in no named span and not generated) and `generated`,
            where not empty.
        """
        spans = dict(self.spans)
        named = {*chain.from_iterable(spans.values()), *self.generated}
        spans[REST] = tuple([at for at in range(len(self.tokens)) if at not in named])
        spans[GENERATED] = self.generated
        return {name: places for name, places in spans.items() if places}


def _documents_of(ids: Any, jumps: Sequence[int]) -> int | None:
    """Number of documents that position ids separate; None if that may be one or several."""
    if not jumps:
        return 1
    begins = {ids[t] for t in jumps}
    # Positions that are all equal, or count backwards, do not mean documents of one token
    if len(begins) == 1 and begins <= {0, ids[0]} and len(jumps) < len(ids) - 1:
        return 1 + len(jumps)
    again = any(t > 1 and ids[0] == ids[t] < ids[t - 1] > ids[t - 2] for t in jumps)
    return None if again else 1


def _whole(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, numbers))


def main_span(prompts: Sequence[Prompt]) -> str | None:
    """Choose the main span of prompts.

    Args:
        prompts: Prompts.

    Returns:
        The needle if a prompt or a token of an answer has one (`copies_next`), else the first
        named span; None without any.
    """
    named = [
        name
        for prompt in prompts
        for name in prompt.spans
        if "." not in name and name not in (REST, GENERATED)
    ]
    if "needle" in named or copies_next(prompts):
        return "needle"
    return next(iter(named), None)


def copies_next(prompts: Sequence[Prompt]) -> bool:
    """Return whether every token of an answer has a separate needle: the token that it copies.

    Args:
        prompts: Prompts.

    Returns:
        True if a prompt has `sources`, and none names a needle or a query.
    """
    own = any({"needle", "query"} & prompt.spans.keys() for prompt in prompts)
    return not own and any(prompt.sources is not None for prompt in prompts)


def _written(pieces: Sequence[str]) -> str:
    """The texts of tokens as one text, without the special tokens at its begin."""
    first = 0
    while first < len(pieces) - 1 and SPECIAL.fullmatch(pieces[first]):
        first += 1
    # Pieces without any space are words of a synthetic task
    apart = "" if any(character.isspace() for piece in pieces for character in piece) else " "
    return apart.join(pieces[first:])


def require_index(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts with position ids if the token index is required.

    Args:
        prompts: Prompts.

    Raises:
        InputError: A prompt has position ids.
    """
    for number, prompt in enumerate(prompts):
        if prompt.position_ids is not None:
            raise InputError(
                f"prompt {number} has position ids, which only the measures of analyze take: "
                "experiments, scores and the explorer know the token index alone; leave "
                "position_ids out"
            )


def digest(prompts: Sequence[Prompt]) -> str:
    """Compute SHA-256 over tokens, spans, generated indices and position ids, in order.

    Args:
        prompts: Prompts.

    Returns:
        Hexadecimal digest.
    """
    content = hashlib.sha256()
    encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
    for prompt in prompts:
        spans = {name: list(places) for name, places in prompt.spans.items()}
        record = [list(prompt.tokens), spans, list(prompt.generated)]
        # Appended only where given: digests of older prompts stay as they were
        record += [] if prompt.position_ids is None else [list(prompt.position_ids)]
        record += [] if prompt.documents is None else [prompt.documents]
        content.update(encoder.encode(record).encode() + b"\n")
    return content.hexdigest()


def check_spans(spans: Mapping[str, Places], generated: Places, length: int, unit: str) -> None:
    """Check that spans and generated places fit together.

    Args:
        spans: Places, from 0, by name.
        generated: Generated places.
        length: Number of places of the prompt.
        unit: "token" or "character", for messages.

    Raises:
        InputError: Places are empty, doubled or out of range, top-level spans overlap, or a part
            leaves its parent.
    """
    for name in spans:
        _check_name(name)
    # One owner per place: overlaps of all spans in one pass
    owner: dict[int, str] = {}
    names = [name for name in spans if "." not in name]
    for name, given in [*((name, spans[name]) for name in names), (GENERATED, generated)]:
        if name == GENERATED and not len(given):
            continue
        places = _places(name, given, length, unit)
        if not owner.keys().isdisjoint(places):
            taken = next(place for place in places if place in owner)
            advice = (
                "generated places are a span of their own, leave them out of the others"
                if name == GENERATED
                else "top-level spans are disjoint, name a part of one like needle.1"
            )
            raise InputError(
                f'the spans "{owner[taken]}" and "{name}" share {unit} {taken}; {advice}'
            )
        owner |= dict.fromkeys(places, name)
    for name in spans:
        if "." in name:
            _check_part(name, spans, length, unit)


def _places(name: str, given: Places, length: int, unit: str) -> Sequence[int]:
    if not len(given):
        raise InputError(
            f'the span "{name}" is empty: give it at least one {unit}, or leave it out'
        )
    places: Any = given
    # Python's own numbers, which need no array: one per prompt would take most of the time
    if {*map(type, given)} != {int}:
        numbers = np.asarray(given)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            raise InputError(
                f'the span "{name}" holds {str(given)[:60]}; wanted whole numbers, {unit} '
                f"indices from 0 to {length - 1}"
            )
        places = numbers.tolist()
    if min(places) < 0 or max(places) >= length:
        outside = next(place for place in places if not 0 <= place < length)
        raise InputError(
            f'the span "{name}" holds {unit} {outside}, but the prompt has the {unit}s 0 '
            f"to {length - 1}; fix the span"
        )
    if len({*places}) < len(places):
        twice = min(place for place, count in Counter(places).items() if count > 1)
        raise InputError(f'the span "{name}" holds {unit} {twice} twice; name it once')
    return places


@lru_cache(maxsize=256)
def _check_name(name: str) -> None:
    # Prompts of a task have the same names
    if not isinstance(name, str) or not all(name.split(".")) or not name.isprintable():
        raise InputError(
            f'"{str(name)[:80]}" is not a name for a span: wanted a word, or words joined by '
            "dots like needle.1.key"
        )
    if name.split(".")[0] == REST:
        raise InputError(
            f'"{name}" is not a name for a span: the rest is every token outside of other spans; '
            "choose another name"
        )
    if name.split(".")[0] == GENERATED:
        raise InputError(
            f'"{name}" is not a name for a span: generated places have their own field, "generated"'
        )


def _check_part(name: str, spans: Mapping[str, Places], length: int, unit: str) -> None:
    parent = name.rpartition(".")[0]
    if parent not in spans:
        raise InputError(
            f'the span "{name}" is a part of "{parent}", which is not there; add it or '
            "rename the part"
        )
    outside = {*_places(name, spans[name], length, unit)}.difference(
        _places(parent, spans[parent], length, unit)
    )
    if outside:
        raise InputError(
            f'the span "{name}" holds {unit} {min(outside)}, which is not in "{parent}"; a '
            "part lies inside its parent"
        )
