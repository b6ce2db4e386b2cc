"""Texts of figures as the fonts that come with matplotlib can draw them: a character that none of these has is written as its code.

    "模型" -> "\\u6a21\\u578b"

Only fonts that every matplotlib brings along are asked, not those of the machine: the same figure has the same bytes everywhere. Knows
texts, axes and figures; knows nothing about what they say.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import product

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

FONTS = ("DejaVu Sans", "STIXGeneral")
"""Fonts of every figure, the first of which has a character draws it."""


def legible(text: str) -> str:
    """`text` with every character that no font has, or that is none to see, as its code; ends of lines stay."""
    return "".join(character if character == "\n" or is_drawable(character) else code_of(character) for character in text)


@cache
def is_drawable(character: str) -> bool:
    """Whether one of `FONTS` has `character`; control characters and halves of surrogate pairs are not drawn whatever fonts have."""
    return unicodedata.category(character) not in ("Cc", "Cs") and any(
        get_font(findfont(FontProperties(family=[name]))).get_char_index(ord(character)) for name in FONTS
    )


def code_of(character: str) -> str:
    """A character as Python writes its code: "\\\\x00", "\\\\u6a21", "\\\\U1f642"."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:x}"


def make_legible(figure: Figure) -> None:
    """Write every text of `figure`, labels of ticks among them, as `legible` does."""
    for ax, minor in product(figure.axes, (False, True)):
        for axis in (ax.xaxis, ax.yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels(minor=minor)]
            # Labels of ticks belong to the axis, which writes them anew whenever it is drawn.
            if (shown := [legible(label) for label in labels]) != labels:
                axis.set_ticks(axis.get_ticklocs(minor=minor), shown, minor=minor)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if (shown := legible(text.get_text())) != text.get_text():
            text.set_text(shown)
