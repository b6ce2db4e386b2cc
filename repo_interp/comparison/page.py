"""The page of a comparison: self-contained, offline; two runs side by side over one prompt, then per measure its figures and its table.

Knows how the page is put together; knows nothing about what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import xarray as xr

from repo_interp.comparison.figures import Drawn, comparison_figures
from repo_interp.comparison.linked import linked_section
from repo_interp.comparison.looks import group_title, runs_of
from repo_interp.comparison.notes import notes
from repo_interp.comparison.variable_tables import comparison_tables
from repo_interp.failures import noted
from repo_interp.plots.marks.table import Table
from repo_interp.plots.pages.frame import framed, picture_html, table_html
from repo_interp.plots.style import save_figure


def draw_comparison(comparison: xr.DataTree, page: Path, directory: Path) -> list[str]:
    """Write the page, and every figure as PNG, SVG and PDF into `directory`, drawn once; return one line per failure.

    The same comparison gives the same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    pictures = []
    for drawn in comparison_figures(comparison, failures):
        with noted(failures, f"the figure {drawn.name}"):
            save_figure(drawn.figure, directory / drawn.name)
            svg = (directory / f"{drawn.name}.svg").read_bytes()
            pictures.append((drawn.measure, picture_html(drawn.figure, _caption(drawn), svg)))
    with noted(failures, "the page"):
        page.write_text(_page(comparison, pictures, failures), encoding="utf-8", newline="\n")
    return failures


def _page(comparison: xr.DataTree, pictures: Sequence[tuple[str, str]], failures: list[str]) -> str:
    """The HTML of the page with `pictures`: the measure and the HTML of each."""
    runs = runs_of(comparison)
    linked, scripts = linked_section(comparison, runs, failures)
    tables: dict[str, list[Table]] = {}
    for table in comparison_tables(comparison):
        tables.setdefault(table.name, []).append(table)
    measures = [name for name in comparison.children if name in tables or any(measure == name for measure, _ in pictures)]
    return framed(
        title=f"Compared: {', '.join(runs.title(name) for name in runs.names)}",
        facts="\n".join(f'<p class="left-out">{escape(line)}</p>' for line in notes(comparison)),
        navigation={**({"linked": "Side by side"} if linked else {}), **{name: group_title(name) for name in measures}},
        sections=[linked, *("\n".join(_section(name, tables.get(name, ()), pictures)) for name in measures)],
        provenance=table_html(_runs_table(comparison)),
        scripts=scripts,
    )


def _section(measure: str, tables: Sequence[Table], pictures: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield f'<section id="{escape(measure)}" aria-labelledby="{escape(measure)}-title">'
    yield f'<h2 id="{escape(measure)}-title">{escape(group_title(measure))}</h2>'
    yield from (picture for of, picture in pictures if of == measure)
    yield from map(table_html, tables)
    yield "</section>"


def _runs_table(comparison: xr.DataTree) -> Table:
    """What is compared: one row per run, from the root of the comparison."""
    root, runs = comparison.to_dataset(), runs_of(comparison)
    columns = [str(name) for name in root.data_vars]

    def cell(column: str, name: str) -> str | int:
        value = root[column].sel(run=name)
        return int(value) if value.dtype.kind in "iu" else str(value.values)[:24]

    rows = tuple((runs.title(name), *(cell(column, name) for column in columns)) for name in runs.names)
    titles = ("run", *(column.replace("_", " ") for column in columns))
    return Table("runs", "What is compared", titles, rows, "Digests are cut at 24 characters.")


def _caption(drawn: Drawn) -> str:
    return drawn.caption[:1].upper() + drawn.caption[1:]
