"""Named spans of a prompt: whether they fit together, and which tokens they are.

A span is a set of places of a prompt - characters of its text, or tokens. Top-level spans (`needle`, `query`,
...) and the generated places are disjoint. A dotted name is a part of its parent (`needle.1.key` of
`needle.1` of `needle`), inside it; parts may overlap.

From characters to tokens, token t covering the characters [start_t, end_t):

    span(t) = argmax over top-level spans s of |[start_t, end_t) n s|,  on a tie the one first in t

so a token that a tokenizer merges across a span's edge belongs to the span it overlaps, however little, and a
part has the tokens of its parent that it overlaps. Tokens of no width (BOS and other added tokens) belong to
no span. Where several tokens share one character (byte-level BPE on non-ASCII text) all of them belong.

Knows nothing about tokenizers, files or tasks: only offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from repo_interp.errors import InputError

Intervals = tuple[tuple[int, int], ...]
"""Half-open ranges of characters."""

Places = Sequence[int] | np.ndarray
"""Indices of tokens or of characters."""

GENERATED = "generated"
REST = "rest"


def check_spans(spans: Mapping[str, Places], generated: Places, length: int, unit: str) -> None:
    """Check that spans and generated places fit together.

    `spans` maps names to places (0-based, in `unit`: "token" or "character") of a prompt of `length` places.
    Raises InputError: empty, doubled or out-of-range places, top-level spans that overlap, a part that leaves
    its parent.
    """
    owner = np.full(length, -1)
    names = [name for name in spans if "." not in name]
    for label, (name, places) in enumerate([*((name, spans[name]) for name in names), (GENERATED, generated)]):
        if name == GENERATED and not len(places):
            continue
        indices = _places(name, places, length, unit)
        taken = indices[owner[indices] >= 0]
        if len(taken):
            other = names[owner[taken[0]]]
            advice = (
                "generated places are a span of their own, leave them out of the others"
                if name == GENERATED
                else "top-level spans are disjoint, name a part of one like needle.1"
            )
            raise InputError(f'the spans "{other}" and "{name}" share {unit} {taken[0]}; {advice}')
        owner[indices] = label
    for name in spans:
        _check_name(name)
        if "." in name:
            _check_part(name, spans, length, unit)


def _places(name: str, places: Places, length: int, unit: str) -> Int[np.ndarray, " place"]:
    if not len(places):
        raise InputError(f'the span "{name}" is empty: give it at least one {unit}, or leave it out')
    indices = np.asarray(places, dtype=np.int64)
    outside = indices[(indices < 0) | (indices >= length)]
    if len(outside):
        raise InputError(
            f'the span "{name}" holds {unit} {outside[0]}, but the prompt has the {unit}s 0 to {length - 1}; mend the span'
        )
    unique, counts = np.unique(indices, return_counts=True)
    if len(unique) < len(indices):
        raise InputError(f'the span "{name}" holds {unit} {unique[counts > 1][0]} twice; name it once')
    return indices


def _check_name(name: str) -> None:
    if not name or not all(name.split(".")):
        raise InputError(f'"{name}" is no name for a span: wanted a word, or words joined by dots like needle.1.key')
    if name.split(".")[0] == GENERATED:
        raise InputError(f'"{name}" is no name for a span: generated places have a field of their own, "generated"')


def _check_part(name: str, spans: Mapping[str, Places], length: int, unit: str) -> None:
    parent = name.rpartition(".")[0]
    if parent not in spans:
        raise InputError(f'the span "{name}" is a part of "{parent}", which is not there; add it or rename the part')
    outside = np.setdiff1d(_places(name, spans[name], length, unit), np.asarray(spans[parent]))
    if len(outside):
        raise InputError(
            f'the span "{name}" holds {unit} {outside[0]}, which is not in "{parent}"; a part lies inside its parent'
        )


def check_intervals(characters: Mapping[str, Intervals], length: int) -> None:
    """Check half-open character ranges against a text of `length` characters. Raises InputError: reversed,
    empty, out of range.
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
    """Every character of some half-open ranges, in their order."""
    return np.concatenate([np.arange(start, end) for start, end in intervals] or [np.arange(0)])


def token_spans(
    offsets: Sequence[tuple[int, int]], characters: Mapping[str, Intervals], length: int
) -> dict[str, tuple[int, ...]]:
    """Token indices of every span, from the character range [start, end) that each token covers in a text of
    `length` characters.

    `characters` are spans that fit together (`check_spans`), "generated" among them if there is one.
    Raises InputError for a span that gets no token.
    """
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    top = [name for name in characters if "." not in name]
    owner = np.full(length, -1)
    for label, name in enumerate(top):
        owner[characters_of(characters[name])] = label
    belongs = _largest_overlap(owner, starts, ends, len(top))

    tokens: dict[str, tuple[int, ...]] = {}
    for name in sorted(characters, key=lambda name: name.count(".")):
        if "." not in name:
            members = belongs == top.index(name)
        else:
            inside = np.zeros(length, dtype=bool)
            inside[characters_of(characters[name])] = True
            members = _overlap(inside, starts, ends) > 0
            parent = np.zeros(len(starts), dtype=bool)
            parent[list(tokens[name.rpartition(".")[0]])] = True
            members &= parent
        if not members.any():
            raise InputError(f'the span "{name}" covers no token of its own with this tokenizer; widen it or leave it out')
        tokens[name] = tuple(np.flatnonzero(members).tolist())
    return {name: tokens[name] for name in characters}


def _overlap(inside: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Int[np.ndarray, " token"]:
    """Number of characters of each token that are inside."""
    before = np.concatenate([[0], np.cumsum(inside)])
    return before[ends] - before[starts]


def _largest_overlap(owner: np.ndarray, starts: np.ndarray, ends: np.ndarray, labels: int) -> Int[np.ndarray, " token"]:
    """Label with the largest share of each token's characters, -1 for none; on a tie the one that comes first
    in the token.
    """
    if not labels:
        return np.full(len(starts), -1)
    shares = np.stack([_overlap(owner == label, starts, ends) for label in range(labels)])
    largest = shares.max(axis=0)
    belongs = np.where(largest > 0, shares.argmax(axis=0), -1)
    for token in np.flatnonzero((largest > 0) & ((shares == largest).sum(axis=0) > 1)):
        tied = np.flatnonzero(shares[:, token] == largest[token])
        inside = owner[starts[token] : ends[token]]
        belongs[token] = inside[np.isin(inside, tied)][0]
    return belongs
