"""Findings and tables of a run in the terminal.

A group without informative tables has one line.

Neighboring layers with the same numbers share a row. A table has as many rows as fit into the
window, twelve at most: of layers some from first to last, of ranked heads the first. The report
page has all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import xarray as xr
from rich.cells import cell_len
from rich.table import Table as Drawn
from rich.text import Text

from repo_interp.errors import one_line
from repo_interp.plots.findings import EVERY, findings
from repo_interp.plots.marks.finding import Finding
from repo_interp.plots.marks.table import Cell, Table
from repo_interp.plots.view_catalogue import views_of
from repo_interp.runtime.console import Console, span_of
from repo_interp.runtime.failures import until_failure

MOST_ROWS = 12
"""Rows that are printed of a table of a run at most."""
NOTE_LINES = 4
"""Most lines of notes that are printed, not counting a longer first note."""
_FEWEST_ROWS = 5
_WORD = 6
"""Smallest width in letters of a column whose words break."""
_FRAME, _END = 6, 14
"""Lines of a table without its rows, and lines of findings and paths."""


def print_findings(console: Console, run: xr.DataTree) -> None:
    """Print the first findings, one sentence each, and the place of the others.

    Args:
        console: Console to print to.
        run: The run.
    """
    # A finding of another package that fails must not cost the others.
    found = [*until_failure(lambda: iter(findings(run)), "the findings", [])]
    for place, finding in enumerate(found, start=1):
        _print_sentence(console, place, finding)
    if not found:
        console.print(
            "Nothing stands out: no number is clearly beyond its null, such as that of random "
            "weights or even attention. --tables prints the numbers."
        )
        return
    rest = [*until_failure(lambda: iter(findings(run, EVERY)), "the findings", [])][len(found) :]
    more = f", and {len(rest)} more" if rest else ""
    console.print(f"Evidence{more}: --all-findings, or report.html", style="dim")


def print_all_findings(console: Console, run: xr.DataTree) -> None:
    """Print all findings of a run, each with its evidence.

    Args:
        console: Console to print to.
        run: The run.
    """
    found = until_failure(lambda: iter(findings(run, EVERY)), "the findings", [])
    for place, finding in enumerate(found, start=1):
        _print_sentence(console, place, finding)
        console.print(Text(f"   {one_line(finding.evidence)}", "dim"))


def _print_sentence(console: Console, place: int, finding: Finding) -> None:
    where = f"  [{finding.place}]" if finding.place else ""
    console.print(Text.assemble(f"{place}. {one_line(finding.sentence)}", (where, "cyan")))


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print the first notes, as many as fit into a few lines, and how many others there are.

    Args:
        console: Console to print to.
        notes: Notes; the first one is always printed in full.
    """
    left = NOTE_LINES
    for place, note in enumerate(notes):
        lines = -(-cell_len(note) // console.width)
        if place and lines > left:
            others = len(notes) - place
            console.print(f"{others} more note{'s' * (others > 1)}: report.html", style="yellow")
            return
        console.print(note, style="yellow")
        left -= lines


def print_tables(console: Console, run: xr.DataTree) -> None:
    """Print a table for every group of a run, in the order of the page.

    Failures are left out: the page has named them.

    Args:
        console: Console to print to.
        run: The run.
    """
    views = views_of(run)
    silent, tables = [], []
    for view in views:
        made = list(until_failure(partial(view.tables, run), f"the tables of {view.group!r}", []))
        informative = next(
            until_failure(lambda view=view: [view.informative(run)], view.group, []), True
        )
        if informative:
            tables += made
        elif made:
            silent.append(view)
    rows = _rows_for(console, len(tables))
    left_out = 0
    # A column with only dashes takes the width of others.
    for table in tables:
        dense = _without_dashes(table)
        # Only numbers count: a table without any number becomes a sentence.
        if len(dense.columns) < len(table.columns) and not any(
            isinstance(cell, float) for row in dense.rows for cell in row
        ):
            console.print(f"{table.title}: no number could be measured. {table.note}")
            continue
        grouped = _group_layers(dense)
        excerpt = _excerpt(grouped, rows)
        left_out += len(grouped.rows) - len(excerpt.rows)
        print_table(console, excerpt)
    # Groups without information have one line instead of a table.
    for view in silent:
        console.print(f"{view.title}: {_nothing_to_say(run)}; folded away in report.html")
    if left_out:
        console.print(f"{left_out:,} more rows of these tables are in report.html.")


def print_table(console: Console, table: Table) -> None:
    """Print a table.

    In a narrow window long names break, numbers do not; if these do not fit either, every row is a
    line.

    Args:
        console: Console to print to.
        table: The table.
    """
    rows = [[one_line(cell) for cell in row] for row in table.formatted()]
    # rich draws three characters around every column and one at the end.
    widths = _widths(table, rows, console.width - 3 * len(table.columns) - 1)
    if widths is None:
        _print_lines(console, table, rows)
        return
    drawn = Drawn(
        title=table.title, title_justify="left", caption=table.note, caption_justify="left"
    )
    # Widths are given, since rich would cut cells where words do not fit; folding loses nothing.
    for column, numeric, width in zip(table.columns, table.numeric, widths, strict=True):
        drawn.add_column(
            column, justify="right" if numeric else "left", overflow="fold", width=width
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)


def _widths(table: Table, rows: Sequence[Sequence[str]], most: int) -> list[int] | None:
    """Return widths of the columns, together at most `most`; None if that is too narrow.

    If possible, no text is broken, else no word, else no number. The remaining width goes to the
    columns that are farthest from their full width.
    """
    columns = list(
        zip(
            table.columns,
            table.numeric,
            zip(*rows, strict=True) if rows else [()] * len(table.columns),
            strict=True,
        )
    )
    # In cells of the terminal: some characters take two.
    whole = [max(map(cell_len, (name, *cells))) for name, _, cells in columns]
    words = [
        max(map(cell_len, " ".join((name, *cells)).split()), default=1)
        for name, _, cells in columns
    ]
    numbers = [
        max(map(cell_len, cells), default=1) if numeric else _WORD for _, numeric, cells in columns
    ]
    # The widest that fits: no break at all, breaks between words, breaks within words.
    widths = next((some for some in (whole, words, numbers) if sum(some) <= most), None)
    if widths is not None:
        for _ in range(min(most, sum(whole)) - sum(widths)):
            # The remaining width goes to the columns that are farthest from their full width.
            widths[max(range(len(widths)), key=lambda place: whole[place] - widths[place])] += 1
    return widths


def _print_lines(console: Console, table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Print a table as its title, one line per row, and its note.

    A line has the names, then every number after its column.
    """
    console.print(Text(table.title, "italic"))
    for row in rows:
        named = [
            cell for cell, numeric in zip(row, table.numeric, strict=True) if cell and not numeric
        ]
        numbers = [
            f"{column} {cell}"
            for column, cell, numeric in zip(table.columns, row, table.numeric, strict=True)
            if numeric
        ]
        console.print(
            Text(f"{', '.join(named)}: {', '.join(numbers)}" if named else ", ".join(numbers))
        )
    if table.note:
        console.print(Text(table.note, "dim italic"))


def _rows_for(console: Console, tables: int) -> int:
    """Return the rows of a table with which `tables` tables fit into the window."""
    if not console.is_terminal or not tables:
        # Without a window, as in a pipe, nothing is cut for its height.
        return MOST_ROWS
    return min(MOST_ROWS, max(_FEWEST_ROWS, (console.size.height - _END) // tables - _FRAME))


def _without_dashes(table: Table) -> Table:
    """`table` without the columns that have no number in any row."""
    # At least one column must remain.
    places = [
        place
        for place in range(len(table.columns))
        if any(row[place] is not None for row in table.rows)
    ] or [0]
    columns = tuple(table.columns[place] for place in places)
    return replace(
        table,
        columns=columns,
        rows=tuple(tuple(row[place] for place in places) for row in table.rows),
    )


def _group_layers(table: Table) -> Table:
    """Merge rows of neighboring layers if all their other cells are equal as text."""
    rows: list[tuple[Cell, ...]] = []
    lines = zip(_layers(table), table.rows, table.formatted(), strict=True)
    # Neighbors with the same text in all other cells, as rounding shows them
    for (is_layer, _), group in groupby(lines, key=lambda line: (line[0] is not None, line[2][1:])):
        same = list(group)
        if is_layer and len(same) > 1:
            word = "layers " if str(same[0][1][0]).startswith("layer") else ""
            rows.append((f"{word}{same[0][0]}-{same[-1][0]}", *same[0][1][1:]))
        else:
            rows += [row for _, row, _ in same]
    return replace(table, rows=tuple(rows))


def _excerpt(table: Table, count: int) -> Table:
    """Return at most `count` rows: layers at equal steps and all other rows, else the first."""
    if len(table.rows) <= count:
        return table
    layers = [place for place, layer in enumerate(_layers(table)) if layer is not None]
    others = [place for place in range(len(table.rows)) if place not in layers]
    # Rows that are no layers, such as means, stay in any case.
    left = count - len(others)
    if not layers or left < 2:
        return replace(table, rows=table.rows[:count])
    chosen = {
        layers[place]
        for place in np.linspace(0, len(layers) - 1, min(left, len(layers))).round().astype(int)
    }
    return replace(
        table,
        rows=tuple(
            row for place, row in enumerate(table.rows) if place in chosen or place in others
        ),
    )


def _layers(table: Table) -> list[int | None]:
    """Return the layer (the first in a range) or component of every row; None for others."""
    if table.columns[0] not in ("layer", "layers", "component"):
        return [None] * len(table.rows)
    # Rows may name several layers already; their first one counts.
    named = (re.match(r"(?:layers? )?(\d+)", str(row[0])) for row in table.rows)
    return [None if match is None else int(match[1]) for match in named]


def _nothing_to_say(run: xr.DataTree) -> str:
    """Explain an uninformative view by the layout."""
    layout = str(run.attrs.get("layout", "")).split(",")
    parts, begun = [], 0
    for scheme, layers in groupby(layout):
        count = len(list(layers))
        parts.append(f"layers {span_of(range(begun, begun + count))} {scheme}")
        begun += count
    return (
        f"says little about this run ({', '.join(parts)})"
        if layout != [""]
        else "says little about this run"
    )
