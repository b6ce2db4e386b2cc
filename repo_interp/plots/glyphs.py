r"""Characters that the fonts of a figure can draw; others are written as their codes.

"模型" -> "\u6a21\u578b"
"""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import product

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

FONTS = ("DejaVu Sans", "STIXGeneral")
"""Fonts of every figure, the first of which has a character draws it.

They are part of matplotlib, so that every machine gives the same bytes.
"""


def legible(text: str) -> str:
    """Replace the characters that no font can draw by their codes.

    Args:
        text: Text; ends of lines stay.

    Returns:
        Text that the fonts can draw.
    """
    return "".join(
        character if character == "\n" or is_drawable(character) else code_of(character)
        for character in text
    )


def is_drawable(character: str) -> bool:
    """Tell whether one of the current fonts has a character.

    Args:
        character: A single character.

    Returns:
        False for control characters and halves of surrogate pairs, even if a font has a glyph.
    """
    return _is_in(character, tuple(dict.fromkeys([*mpl.rcParams["font.family"], *FONTS])))


# Called for every character of every text, most of which repeat.
@cache
def _is_in(character: str, families: tuple[str, ...]) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs") and any(
        file is not None and get_font(file).get_char_index(ord(character))
        for file in map(_file_of, families)
    )


@cache
def _file_of(family: str) -> str | None:
    """The file of a font; None if it is not installed."""
    try:
        # By default findfont answers DejaVu Sans for a missing font, and every character seems
        # drawable.
        return str(findfont(FontProperties(family=[family]), fallback_to_default=False))
    except ValueError:
        return None


def code_of(character: str) -> str:
    """Write the code of a character as Python does, such as U+6A21 as backslash u6a21.

    Args:
        character: A single character.

    Returns:
        The code.
    """
    return character.encode("unicode_escape").decode("ascii")


def make_legible(figure: Figure) -> None:
    """Write every text of a figure, labels of ticks among them, as `legible` does.

    Args:
        figure: Figure with the texts to replace.
    """
    for axis, minor in product(
        [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)], (False, True)
    ):
        labels = [label.get_text() for label in axis.get_ticklabels(minor=minor)]
        # Labels of ticks belong to the axis, which writes them again whenever it is drawn.
        if (shown := [legible(label) for label in labels]) != labels:
            axis.set_ticks(axis.get_ticklocs(minor=minor), shown, minor=minor)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if (shown := legible(text.get_text())) != text.get_text():
            text.set_text(shown)
