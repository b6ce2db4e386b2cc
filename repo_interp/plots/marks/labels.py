"""How a token is written as a label: what cannot be seen is made visible, and of too many labels the telling ones are kept.

    " the" -> "␣the"   newline -> "↵"   tab -> "⇥"   nothing -> "∅"   invisible or missing glyph -> "\\u200b"

Knows nothing about figures beyond the fonts that are set.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.font_manager import FontProperties, findfont, get_font

LONGEST = 14
"""Characters of a label; longer tokens end in an ellipsis."""
_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def token_label(text: str, longest: int = LONGEST) -> str:
    """`text` as a label for a figure: one line, every character visible in the current fonts, at most `longest` characters."""
    label = "".join(_visible(character) for character in text) or "∅"
    return label if len(label) <= longest else label[: longest - 1] + "…"


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    kind = unicodedata.category(character)
    if kind[0] in "CZ" or not _drawable(character):
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:x}"
    return "◌" + character if kind == "Mn" else character


def _drawable(character: str) -> bool:
    families = mpl.rcParams["font.family"]
    return any(get_font(findfont(FontProperties(family=[name]))).get_char_index(ord(character)) for name in families)


def thin(candidates: Iterable[int], gap: float) -> list[int]:
    """Of `candidates`, the most telling first, those that stay at least `gap` apart from all kept before. Ascending."""
    kept: list[int] = []
    for candidate in candidates:
        if all(abs(candidate - other) >= gap for other in kept):
            kept.append(candidate)
    return sorted(kept)


def contiguous(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of neighbouring indices as (first, last), both inside: (3, 4, 5, 9) -> (3, 5), (9, 9)."""
    stretches: list[tuple[int, int]] = []
    for index in sorted(indices):
        if stretches and index == stretches[-1][1] + 1:
            stretches[-1] = (stretches[-1][0], index)
        else:
            stretches.append((index, index))
    return stretches
