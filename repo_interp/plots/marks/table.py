"""A table: a title, named columns, rows of text and numbers; who prints it - a terminal, a page, a notebook - decides how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import SupportsFloat

import numpy as np

from repo_interp.plots.marks.drawing import number

Cell = str | int | float | None
"""None: there is no such number."""


@dataclass(frozen=True)
class Table:
    """Rows with named columns. `note` explains what was averaged; numbers keep full precision until `formatted`."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    calls: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By row and column, the Python that explains a cell; the page shows it where the cell is clicked."""

    def formatted(self) -> list[tuple[str, ...]]:
        """Rows as text: three significant digits, a dash where there is no number."""
        return [tuple(format_cell(cell) for cell in row) for row in self.rows]

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        header = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in self.formatted())
        return f"<table><caption>{escape(self.title)}</caption><tr>{header}</tr>{rows}</table><p>{escape(self.note)}</p>"

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers: they are set flush right."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return tuple(not any(isinstance(cell, str) for cell in column) for column in columns)


def cells(values: Iterable[SupportsFloat]) -> tuple[Cell, ...]:
    """Numbers as cells; None for what is not finite."""
    return tuple(value if np.isfinite(value) else None for value in map(float, values))


def format_cell(cell: Cell) -> str:
    """A cell as text: text as it is, whole numbers with thousands separated, others with three significant digits."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else number(cell)
