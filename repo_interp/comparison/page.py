"""The page of a comparison: self-contained, offline, without scripts; a section a measure with its table and its figures.

Figures stand in the page as pictures. Knows how the page is put together; knows nothing about what is compared.
"""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import xarray as xr

from repo_interp.comparison.figures import Drawn, comparison_figures
from repo_interp.comparison.looks import runs_of
from repo_interp.comparison.variable_tables import comparison_tables
from repo_interp.plots.marks.table import Table
from repo_interp.plots.pages.frame import PAGE_DPI, PAGE_PIXELS, framed, table_html
from repo_interp.plots.style import PaperFigure, save_figure


def comparison_page(comparison: xr.DataTree, path: str | os.PathLike[str]) -> Path:
    """Write the page of `comparison` to `path` and return it. The same comparison gives the same bytes."""
    return _write(comparison, Path(path), [(drawn, _picture(drawn.figure)) for drawn in comparison_figures(comparison)])


def write_comparison(comparison: xr.DataTree, page: Path, directory: Path) -> list[Path]:
    """Write the page, and every figure as PNG, SVG and PDF into `directory`; return the files. Every figure is drawn once."""
    directory.mkdir(parents=True, exist_ok=True)
    shown, made = [], []
    for drawn in comparison_figures(comparison):
        made += save_figure(drawn.figure, directory / drawn.name)
        shown.append((drawn, _picture(drawn.figure)))
    return [_write(comparison, page, shown), *made]


def _write(comparison: xr.DataTree, path: Path, shown: Sequence[tuple[Drawn, str]]) -> Path:
    runs = runs_of(comparison)
    tables = {table.name: table for table in comparison_tables(comparison)}
    measures = [name for name in comparison.children if name in tables or any(drawn.measure == name for drawn, _ in shown)]
    warned = [line for line in str(comparison.attrs.get("notes", "")).split("\n") if line]
    page = framed(
        title=f"Compared: {', '.join(runs.title(name) for name in runs.names)}",
        facts="\n".join(f'<p class="left-out">{escape(line)}</p>' for line in warned),
        navigation={name: _title(name) for name in measures},
        sections=["\n".join(_section(name, tables.get(name), shown)) for name in measures],
        provenance=table_html(_runs_table(comparison)),
    )
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def _section(measure: str, table: Table | None, shown: Sequence[tuple[Drawn, str]]) -> Iterator[str]:
    yield f'<section id="{escape(measure)}" aria-labelledby="{escape(measure)}-title">'
    yield f'<h2 id="{escape(measure)}-title">{escape(_title(measure))}</h2>'
    for drawn, picture in shown:
        if drawn.measure == measure:
            width = round(drawn.figure.get_figwidth() * PAGE_PIXELS)
            caption = escape(drawn.caption[:1].upper() + drawn.caption[1:])
            yield (
                f'<figure><img width="{width}" style="max-width: 100%; height: auto" alt="{caption}" '
                f'src="data:image/png;base64,{picture}"><figcaption>{caption}</figcaption></figure>'
            )
    if table is not None:
        yield table_html(table)
    yield "</section>"


def _runs_table(comparison: xr.DataTree) -> Table:
    """What was compared, from the root of the comparison."""
    root = comparison.to_dataset()
    runs = runs_of(comparison)
    columns = [str(name) for name in root.data_vars]
    rows = [
        (
            runs.title(name),
            *(
                int(root[c].sel(run=name)) if root[c].dtype.kind in "iu" else str(root[c].sel(run=name).values)[:24]
                for c in columns
            ),
        )
        for name in runs.names
    ]
    return Table(
        "runs",
        "What is compared",
        ("run", *(c.replace("_", " ") for c in columns)),
        tuple(rows),
        "Digests are cut at 24 characters.",
    )


def _picture(figure: PaperFigure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PAGE_DPI)
    return b64encode(buffer.getvalue()).decode()


def _title(measure: str) -> str:
    return measure.replace("_", " ").capitalize()
