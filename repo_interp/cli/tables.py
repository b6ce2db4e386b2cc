"""Tables of a run in the terminal."""

from __future__ import annotations

from dataclasses import replace

import xarray as xr
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from repo_interp.plots import Table, tables

MOST_ROWS = 40
"""Rows that are printed of a table of a run; the report page has all."""


def print_tables(console: Console, run: xr.DataTree) -> None:
    """Print every table that the groups of `run` allow, of long ones the first rows; the page has already named what has failed."""
    for table in tables(run, failures=[]):
        left_out = len(table.rows) - MOST_ROWS
        if left_out > 0:
            table = replace(table, rows=table.rows[:MOST_ROWS], note=f"{table.note} {left_out:,} more rows are in report.html.")
        print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """Print `table`."""
    drawn = Drawn(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for column, numeric in zip(table.columns, table.numeric, strict=True):
        drawn.add_column(column, justify="right" if numeric else "left")
    for row in table.formatted():
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)
