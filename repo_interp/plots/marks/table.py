"""A table: a title, named columns, rows of text and numbers.

A terminal, a page or a notebook decides how to print it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, SupportsFloat

import numpy as np
import xarray as xr

from repo_interp.plots.marks.drawing import number
from repo_interp.plots.marks.reading import schemes
from repo_interp.plots.style import scheme_name

Cell = str | int | float | None
"""None: there is no such number."""


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    `note` names the axes that were averaged; numbers keep full precision until `formatted`.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    calls: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By row and column, the Python code that explains a cell; the page shows it when the cell is
    clicked.
    """

    def formatted(self) -> list[tuple[str, ...]]:
        """Write the rows as text.

        Returns:
            Numbers with three significant digits; a dash for missing ones.
        """
        return [tuple(format_cell(cell) for cell in row) for row in self.rows]

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        header = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
            for cells in self.formatted()
        )
        return f"<table><caption>{escape(self.title)}</caption><tr>{header}</tr>{rows}</table><p>{escape(self.note)}</p>"

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether a column has numbers, which are aligned on the right."""
        # zip of no rows gives no columns at all
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return tuple(not any(isinstance(cell, str) for cell in column) for column in columns)


def cells(values: Iterable[SupportsFloat]) -> tuple[Cell, ...]:
    """Turn numbers into cells.

    Args:
        values: Numbers.

    Returns:
        The cells; None for NaN and infinities.
    """
    return tuple(value if np.isfinite(value) else None for value in map(float, values))


def table_of(
    name: str,
    title: str,
    columns: Sequence[tuple[str, xr.DataArray]],
    note: str = "",
    names: Mapping[str, str] | None = None,
) -> Table:
    """Make a table with one row per label of the first array's axes.

    A row has the labels, the scheme of a layer, and the values. Rows without a number are left out.

    Args:
        name: Name of the table's file.
        title: Title of the table.
        columns: Heading and array of every column.
        note: Text below the table.
        names: Texts for axes and labels that the table does not call by their name.

    Returns:
        The table.
    """
    arrays = xr.broadcast(*(array for _, array in columns))
    first, dims = arrays[0], list(map(str, arrays[0].dims))
    known = names or {}
    kinds = schemes(first) if "layer" in dims else {}
    # The scheme comes after layer and head, before all other labels
    behind = max((dims.index(axis) for axis in ("layer", "head") if axis in dims), default=-1) + 1
    rows = []
    for place in np.ndindex(first.shape):
        here: dict[str, Any] = {
            axis: first[axis].values[at].item() for axis, at in zip(dims, place, strict=True)
        }
        labels = [known.get(label, label) for label in here.values()]
        values = [_cell(array.values[place]) for array in arrays]
        # A row with only texts, such as kinds, is left out
        if any(value is not None and not isinstance(value, str) for value in values):
            scheme = [scheme_name(kinds[int(here["layer"])])] if kinds else []
            rows.append((*labels[:behind], *scheme, *labels[behind:], *values))
    titles = [known.get(axis, axis.replace("_", " ")) for axis in dims]
    scheme = ["scheme"] if kinds else []
    return Table(
        name,
        title,
        (*titles[:behind], *scheme, *titles[behind:], *(title for title, _ in columns)),
        tuple(rows),
        note,
    )


def _cell(value: Any) -> Cell:
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not np.isfinite(plain) else plain


def format_cell(cell: Cell) -> str:
    """Write a cell as text.

    Args:
        cell: Text or number.

    Returns:
        Text as it is, whole numbers with thousands separated, others with three significant digits.
    """
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else number(cell)
