"""Bands of tokens in figures: their names and colors."""

from __future__ import annotations

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def band_name(band: str) -> str:
    """Write a band in words.

    Args:
        band: Label of the axis `band`: "answer", or a range of tokens.

    Returns:
        The text.
    """
    return band if band == "answer" else f"tokens {band}"


def band_colour(place: int) -> str:
    """Choose the color of a band; after the last color the first one follows.

    Args:
        place: Index of the band.

    Returns:
        The color.
    """
    return _COLOURS[place % len(_COLOURS)]
