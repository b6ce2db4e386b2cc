"""The figures and tables of a paper, and our experiments that reproduce them.

PAPER/items.csv     a row per figure or table: item, content, our experiment, the prefixes of our figures' names, a note
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repo_interp.errors import InputError


@dataclass(frozen=True)
class Item:
    """A figure or table of a paper."""

    item: str
    """Kind and number: "figure 3a"."""
    shows: str
    experiment: str
    """Name of our experiment that reproduces it; empty if none does."""
    figure: str
    """Prefixes of the names of our figures, separated by spaces."""
    note: str
    """The difference of our version, or the reason why there is none."""

    def is_named(self, wanted: str) -> bool:
        """Whether `wanted` names this item, or the figure that contains it; a number is a figure."""
        kind = "figure " if wanted[:1].isdigit() else ""
        return re.match(rf"{re.escape(kind + wanted)}(?![0-9])", self.item, re.I) is not None


def read_items(file: Path) -> tuple[Item, ...]:
    """Read the figures and tables of a paper from the table beside its experiments."""
    with file.open(encoding="utf-8", newline="") as stream:
        return tuple(Item(**row) for row in csv.DictReader(stream))


def require_items(papers: Mapping[str, Sequence[Item]], wanted: Iterable[str]) -> None:
    """Refuse unknown names of figures and tables.

    Args:
        papers: Figures and tables of the papers, by name.
        wanted: Names of figures and tables: "3", "figure 3a", "table 1".

    Raises:
        InputError: No paper has an item of that name, or the item is not reproduced.
    """
    items = [(paper, item) for paper, own in papers.items() for item in own]
    for name in wanted:
        named = [(paper, item) for paper, item in items if item.is_named(name)]
        if not named:
            there = ", ".join(f"{item.item} of {paper}" for paper, item in items)
            raise InputError(f"there is no {name!r} in the papers; there are {there}")
        if not any(item.experiment for _, item in named):
            paper, item = named[0]
            raise InputError(f"{item.item} of {paper} is not made here: {item.note}")


def items_of(paper: str) -> tuple[Item, ...]:
    """Read the figures and tables of a paper by its name, without its experiments."""
    return read_items(Path(__file__).parent / paper.replace("-", "_") / "items.csv")


def files_of(item: Item, items: Iterable[Item], names: Iterable[str]) -> list[str]:
    """Choose our figures of `item` from `names`: the longest matching prefix among all items is one
    of this item.
    """
    known = {beginning for each in items for beginning in each.figure.split()}
    return [
        name
        for name in names
        if max((own for own in known if name.startswith(own)), key=len, default="")
        in item.figure.split()
    ]
