r"""The parts of a prompt as segments of tokens: examples, sections, lines, blocks and others.

    segment kind K:  spans K.1, K.2, ... of the prompt, if it has them, else from the texts of its
                     tokens
    separator:       the span `separator` of the prompt, if it has one, else a token that contains a
                     line break, ends a sentence, or begins a section or a block

In text, a line begins after a line break; blank lines belong to the line before. A paragraph begins
after a blank line. A sentence begins with a paragraph, or after . ! ? ... and closing brackets or
quotes before white space (。！？ need no white space); there is no list of abbreviations. A block
begins with a line `def f(`, `class C:`, `fn f(` ..., or the decorators above it. A section begins
with a heading: `= = Title = =`, or `# Title` in a text without blocks, since that is a comment in
code. Few-shot examples come only from spans. The token with the first character of a segment begins
it, unless it only has white space of the segment: "\n    " ends a line. Token texts without any
space are words, and are joined by spaces.

This module knows nothing about tokenizers, models or measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from repo_interp.errors import InputError, quoted

SEPARATOR = "separator"
INSIDE = "segments."
"""Span `segments.lines`: tokens that lie in a line, and `segments.lines.starts`: their first
tokens.
"""
STARTS = ".starts"

_CLOSERS = "\"'”’»)\\]}"
_SENTENCE = re.compile(rf"(?:[.!?…]+[{_CLOSERS}]*(?=\s)|[。！？][{_CLOSERS}」』]*)")
# [^\S\n] is white space within a line. A break before a visible line: blank lines begin nothing
_LINE = re.compile(r"\n(?=[^\S\n]*\S)")
_LINE_ENDS = re.compile(r"(?:[^\S\n]*\n)*")
# Lazy, so that a paragraph begins with its line's indentation, not behind it
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*?(?=[^\S\n]*\S)")
_BLOCK = re.compile(
    r"^[ \t]*(?:@[\w.]+|(?:async[ \t]+)?(?:def|class|function|func|fn)[ \t]+\w+[ \t]*[(:{<\[])",
    re.MULTILINE,
)
_TITLE = re.compile(r"^[ \t]*(=[ \t]?){1,6}[^=\n]+(=[ \t]?){1,6}[ \t]*$", re.MULTILINE)
_MARKDOWN = re.compile(r"^#{1,6} \S", re.MULTILINE)


def prompt_structure(
    kinds: Collection[str],
    count: int,
    spans: Mapping[str, Sequence[int]],
    texts: Sequence[str] | None,
) -> dict[str, tuple[int, ...]]:
    """Find separators and segments of a prompt.

    Raises InputError for an unknown kind.

    Args:
        kinds: Kinds of segments.
        count: Tokens of the prompt.
        spans: Spans of the prompt.
        texts: Texts of its tokens, or None.

    Returns:
        Token indices of `separator` and, for every kind K, of `segments.K` and `segments.K.starts`;
        empty ones are left out.
    """
    places = {SEPARATOR: separators(count, spans, texts)}
    for kind in kinds:
        labels = segments(kind, count, spans, texts)
        places[INSIDE + kind] = tuple(np.flatnonzero(labels >= 0).tolist())
        places[INSIDE + kind + STARTS] = tuple(
            # Positions where the number changes, since segments may be adjacent
            np.flatnonzero((labels >= 0) & (np.diff(labels, prepend=-1) != 0)).tolist()
        )
    return {name: tokens for name, tokens in places.items() if tokens}


def segments(
    kind: str, count: int, spans: Mapping[str, Sequence[int]], texts: Sequence[str] | None
) -> Int[np.ndarray, " token"]:
    """Number the segments of one kind.

    Args:
        kind: One of `KINDS`.
        count: Tokens of the prompt.
        spans: Spans of the prompt.
        texts: Texts of its tokens, or None.

    Returns:
        The segment of every token, from 0 in the order of the prompt; -1 for none.

    Raises:
        InputError: The kind is unknown.
    """
    if kind not in KINDS:
        raise InputError(
            f"there is no kind of segment {quoted(kind)}; there are {', '.join(KINDS)}"
        )
    labels = np.full(count, -1)
    named = [name for name in spans if re.fullmatch(rf"{kind}\.\d+", name)]
    if named:
        # By their places: K.10 would come before K.2 by name
        for label, name in enumerate(sorted(named, key=lambda name: min(spans[name]))):
            labels[list(spans[name])] = label
        return labels
    find = _BEGINNINGS[kind]
    if find is None or texts is None or not any(texts):
        return labels
    text, starts = _joined(texts)
    begin = np.zeros(count, dtype=np.int64)
    # Token 0 begins segment 0 anyway
    begin[[token for token in _tokens_from(find(text), text, starts) if token > 0]] = 1
    return begin.cumsum()


def separators(
    count: int, spans: Mapping[str, Sequence[int]], texts: Sequence[str] | None
) -> tuple[int, ...]:
    """Find the tokens that separate: the span `separator`, else by the text.

    Args:
        count: Tokens of the prompt.
        spans: Spans of the prompt.
        texts: Texts of its tokens, or None.

    Returns:
        Token indices, ascending.
    """
    if SEPARATOR in spans:
        return tuple(sorted(spans[SEPARATOR]))
    if texts is None or not any(texts):
        return ()
    text, starts = _joined(texts)
    breaks = [token for token, piece in enumerate(texts) if "\n" in piece]
    ends = [_holder(match.end() - 1, starts) for match in _SENTENCE.finditer(text)]
    begins = [
        _holder(_first_visible(at, text), starts) for at in (*_blocks(text), *_sections(text))
    ]
    return tuple(sorted({*breaks, *ends, *begins}))


def _joined(texts: Sequence[str]) -> tuple[str, Int[np.ndarray, " token"]]:
    """The text of the prompt and the places in it where tokens begin."""
    # A synthetic task's tokens are words, which its text puts spaces between
    words = not any(" " in piece for piece in texts)
    parts = [f"{piece} " for piece in texts] if words else list(texts)
    return "".join(parts), np.cumsum([0, *map(len, parts[:-1])])


def _holder(character: int, starts: Int[np.ndarray, " token"]) -> int:
    """The token that holds a character; of tokens without text none does."""
    return int(np.searchsorted(starts, character, side="right")) - 1


def _tokens_from(
    characters: Iterable[int], text: str, starts: Int[np.ndarray, " token"]
) -> Iterator[int]:
    ends = np.append(starts[1:], len(text))
    for character in characters:
        token = _holder(character, starts)
        # A token such as "\n    " ends in the next line's indentation: the token after it begins
        begun = starts[token] < character and not text[character : ends[token]].strip()
        following = token + 1 if begun else token
        if following < len(starts):
            yield following


def _first_visible(character: int, text: str) -> int:
    return character + len(text[character:]) - len(text[character:].lstrip())


def _lines(text: str) -> list[int]:
    return [match.end() for match in _LINE.finditer(text)]


def _paragraphs(text: str) -> list[int]:
    return [match.end() for match in _PARAGRAPH.finditer(text)]


def _sentences(text: str) -> list[int]:
    ends = [_LINE_ENDS.match(text, match.end()) for match in _SENTENCE.finditer(text)]
    # A sentence end at the end of the text begins nothing
    last = len(text.rstrip())
    return sorted(
        {*(end.end() for end in ends if end is not None and end.end() < last), *_paragraphs(text)}
    )


def _blocks(text: str) -> list[int]:
    """Beginnings of the lines that begin a block: of a decorated one the first decorator's."""
    starts = [match.start() for match in _BLOCK.finditer(text)]
    decorated = {
        later
        for at, later in pairwise(starts)
        # A decorator and, on the next line, another match: both are one block
        if text[at:later].lstrip().startswith("@") and "\n" not in text[at:later].rstrip()
    }
    return [at for at in starts if at not in decorated]


def _sections(text: str) -> list[int]:
    headings = [match.start() for match in _TITLE.finditer(text)]
    # In code, a # begins a comment.
    if not _BLOCK.search(text):
        headings += [match.start() for match in _MARKDOWN.finditer(text)]
    return sorted(headings)


_BEGINNINGS: dict[str, Callable[[str], list[int]] | None] = {
    "examples": None,
    "sections": _sections,
    "paragraphs": _paragraphs,
    "lines": _lines,
    "sentences": _sentences,
    "blocks": _blocks,
}
KINDS = tuple(_BEGINNINGS)
"""Every kind of segment."""
