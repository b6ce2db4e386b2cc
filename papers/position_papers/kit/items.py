"""The figures and tables of a paper, and the experiments of ours that make them again.

PAPER/items.csv     a row per figure or table: item, what it shows, our experiment, the beginnings of our figures' names, a note
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from repo_interp.errors import InputError

if TYPE_CHECKING:
    from position_papers.kit.experiment import Paper


@dataclass(frozen=True)
class Item:
    """A figure or table of a paper."""

    item: str
    """Kind and number: "figure 3a"."""
    shows: str
    experiment: str
    """Name of the experiment of ours that makes it again; empty where none does."""
    figure: str
    """Beginnings of the names of our figures, separated by spaces."""
    note: str
    """How ours differs, or why it is not made."""

    def is_named(self, wanted: str) -> bool:
        """Whether `wanted` names it, or a figure that it is a part of; a number names a figure."""
        kind = "figure " if wanted[:1].isdigit() else ""
        return re.match(rf"{re.escape(kind + wanted)}(?![0-9])", self.item, re.I) is not None


def read_items(file: Path) -> tuple[Item, ...]:
    """Read the figures and tables of a paper from the table beside its experiments."""
    with file.open(encoding="utf-8", newline="") as stream:
        return tuple(Item(**row) for row in csv.DictReader(stream))


def files_of(item: Item, items: Iterable[Item], names: Iterable[str]) -> list[str]:
    """Choose our figures of `item` out of `names`: those that begin with no longer beginning of
    another item.
    """
    known = {beginning for each in items for beginning in each.figure.split()}
    return [
        name
        for name in names
        if max((own for own in known if name.startswith(own)), key=len, default="")
        in item.figure.split()
    ]


def with_items(papers: Mapping[str, Paper], wanted: Sequence[str]) -> Mapping[str, Paper]:
    """Keep what makes some figures and tables again.

    Args:
        papers: The papers, by name.
        wanted: Names of figures and tables: "3", "figure 3a", "table 1"; empty for all.

    Returns:
        The papers with only these experiments and figures; without papers that have none of them.

    Raises:
        InputError: No paper has an item of that name, or it is not made here.
    """
    if not wanted:
        return papers
    for name in wanted:
        named = [
            (paper.name, item)
            for paper in papers.values()
            for item in paper.items
            if item.is_named(name)
        ]
        if not named:
            there = (
                f"{paper.name} has {', '.join(item.item for item in paper.items)}"
                for paper in papers.values()
            )
            raise InputError(f"there is no {name!r} in the papers: {'; '.join(there)}")
        if not any(item.experiment for _, item in named):
            paper, item = named[0]
            raise InputError(f"{item.item} of {paper} is not made here: {item.note}")
    chosen = {}
    for name, paper in papers.items():
        items = [item for item in paper.items if any(map(item.is_named, wanted))]
        names = {item.experiment for item in items}
        if names - {""}:
            experiments = tuple(each for each in paper.experiments if each.name in names)
            chosen[name] = replace(paper, experiments=experiments, drawn=tuple(items))
    return chosen
