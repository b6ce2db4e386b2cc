"""Tables of a run in the terminal."""

from __future__ import annotations

import xarray as xr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from repo_interp.plots.pages.tables import tables


def print_tables(console: Console, run: xr.DataTree) -> None:
    """Print every table that the run's groups allow."""
    for made in tables(run):
        print_table(console, made)


def print_table(console: Console, made) -> None:
    """Print one of `plots.tables`."""
    shown = Table(title=made.title, title_justify="left", caption=made.note, caption_justify="left")
    for column, numeric in zip(made.columns, made.numeric, strict=True):
        shown.add_column(column, justify="right" if numeric else "left")
    for row in made.formatted():
        shown.add_row(*(Text(cell) for cell in row))
    console.print(shown)
