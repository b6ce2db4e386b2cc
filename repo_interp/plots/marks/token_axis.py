r"""An axis of tokens: their texts as labels, as many as have room, and spans that are shaded.

    " the" -> "␣the"   newline -> "↵"   tab -> "⇥"   nothing -> "∅"   invisible or missing glyph -> "\u200b"

This module knows axes and texts, and nothing about runs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from repo_interp.plots.glyphs import code_of, is_drawable
from repo_interp.plots.marks.drawing import contiguous
from repo_interp.plots.marks.reading import PromptTokens
from repo_interp.plots.style import span_colours

LONGEST = 14
"""Characters of a token label; longer tokens end in an ellipsis."""
_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
SHADE = 0.3
"""Opacity of a shaded span."""
RIBBON = 0.035
"""Height of the ribbon of parts, in axes."""


def shade_spans(ax: Axes, spans: Mapping[str, Sequence[int]], names: Sequence[str]) -> None:
    """Shade the tokens of every top-level span over the height of the axes.

    Args:
        ax: Axes to draw on.
        spans: Tokens of the spans by name, as indices.
        names: All span names of the figure; they fix the colors.
    """
    colours = span_colours(names)
    for name, tokens in spans.items():
        # Parts of a span are inside their parent and would darken its shade
        if "." in name:
            continue
        for first, last in contiguous(tokens):
            patch = ax.axvspan(
                first - 0.5, last + 0.5, facecolor=colours[name], alpha=SHADE, linewidth=0, zorder=0
            )
            # Ids in the SVG, by which tests find the parts of a figure
            patch.set_gid(f"span {name}")


def part_ribbon(ax: Axes, spans: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[str]:
    """Draw the deepest parts of spans ("needle.1.key") as a ribbon along the top.

    Parts have shades of the color of their parent.

    Args:
        ax: Axes to draw on.
        spans: Tokens of the spans by name, as indices.
        names: All span names of the figure; they fix the colors.

    Returns:
        Names of the parts that were drawn.
    """
    colours = span_colours(names)
    parts = [
        name
        for name in spans
        if "." in name and not any(other.startswith(name + ".") for other in spans)
    ]
    for name in parts:
        for first, last in contiguous(spans[name]):
            patch = Rectangle(
                (first - 0.5, 1 - RIBBON),
                last - first + 1,
                RIBBON,
                # x in tokens, y as a share of the axes: always at the top
                transform=ax.get_xaxis_transform(),
            )
            patch.set(facecolor=colours[name], linewidth=0, zorder=3, gid=f"part {name}")
            ax.add_patch(patch)
    return parts


def span_handles(spans: Iterable[str], names: Sequence[str]) -> list[Patch]:
    """Make legend entries of spans: shaded as on the axes, solid for parts.

    Args:
        spans: Names to list.
        names: All span names of the figure; they fix the colors.

    Returns:
        One patch per span.
    """
    colours = span_colours(names)
    return [
        Patch(facecolor=colours[name], alpha=1.0 if "." in name else SHADE, label=name)
        for name in spans
    ]


def label_tokens(
    ax: Axes,
    tokens: PromptTokens | None,
    ranked: Iterable[int],
    most: int,
    ink: Callable[[int], str] = lambda token: "#333333",
    shown: str = "token index and {}",
) -> None:
    """Label an axis of tokens with indices and upright texts.

    Args:
        ax: Axes to draw on.
        tokens: Texts of the tokens; None: the axis has only indices.
        ranked: Tokens to name, the most important first.
        most: Largest number of texts.
        ink: Color of the text of a token.
        shown: Label of the axis if it has texts; {} is replaced by the kind of texts.
    """
    ax.locator_params(axis="x", nbins=10, integer=True)
    ax.set_xlabel("token index")
    if tokens is None or tokens.texts is None:
        return
    ax.set_xlabel(shown.format(tokens.texts_are))
    # matplotlib would drop the minor ticks at the places of major ones.
    ax.xaxis.remove_overlapping_locs = False
    # Upright texts need a width each, and important tokens are placed first
    places = thin(ranked, max(1.0, tokens.count / most))
    ax.set_xticks(places, [token_label(tokens.text(token)) for token in places], minor=True)
    ax.tick_params(axis="x", which="minor", labelsize=4.6, labelrotation=90, pad=9.5, length=1.5)
    for token, label in zip(places, ax.get_xticklabels(minor=True), strict=True):
        label.set_color(ink(token))


def token_label(text: str) -> str:
    """Write the text of a token as a label for a figure.

    Args:
        text: Text of the token.

    Returns:
        One line, in which the current fonts can draw all characters.
    """
    label = "".join(_visible(character) for character in text) or "∅"
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    kind = unicodedata.category(character)
    # Control characters and other blanks are invisible, and a missing glyph is an empty box
    if kind[0] in "CZ" or not is_drawable(character):
        return code_of(character)
    # A combining mark would attach to the letter before it, so it gets a dotted circle
    return "◌" + character if kind == "Mn" else character


def thin(candidates: Iterable[int], gap: float) -> list[int]:
    """Choose candidates with a least distance from all earlier choices.

    Args:
        candidates: Indices, the most important first.
        gap: Smallest distance between two chosen indices.

    Returns:
        Ascending indices.
    """
    chosen: list[int] = []
    for candidate in candidates:
        if all(abs(candidate - other) >= gap for other in chosen):
            chosen.append(candidate)
    return sorted(chosen)
