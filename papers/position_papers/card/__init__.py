"""The report card of a position scheme: train it by the recipes of the zoo, and compare it with the
records of the package.

    position_papers.card.card("mine", out="runs/card")     -> xarray.Dataset
    repo-interp card FILE.py:build --out DIR               the same on the command line
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from position_papers.card.report import card

__all__ = ["card"]


def __getattr__(name: str) -> Any:
    """Import `card` at its first use, so that the command's options are read without torch."""
    if name == "card":
        from position_papers.card.report import card

        return card
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
