"""One page that shows a run: self-contained, offline, readable without JavaScript, without a mouse, and with any token in it.

    page = tables in plain HTML + charts and the explorer of positions, drawn by plotly.js from data in the page

Sections come from the registry in `sections.py`; those whose groups the run lacks are not shown. Everything stands in one
file: the files of `page/`, plotly.js from the plotly package, arrays as base64 float32. A content security policy forbids any
request. Knows how a page is put together; knows nothing about what a section shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks.reading import checkpoint_name, has_groups
from repo_interp.plots.marks.table import Table, format_cell
from repo_interp.plots.pages.added import added_sections
from repo_interp.plots.pages.page_frame import framed, packaged
from repo_interp.plots.pages.sections import SECTIONS, Content, PageOptions, Section

BUDGET = 16.0
"""Megabytes of positions that are embedded unless more are asked for."""
_NO_SCRIPT = '<noscript><p class="left-out">Charts and the explorer need JavaScript; the tables below do not.</p></noscript>'


def report_page(
    run: xr.DataTree,
    path: str | os.PathLike[str],
    prompts: Sequence[int] | None = None,
    megabytes: float = BUDGET,
) -> Path:
    """Write the page of `run` to `path` and return the path. The same run gives the same bytes.

    `prompts`: numbers of the prompts to embed, in order; as many as fit into `megabytes` are, and the page says which are left
    out. A group without a section is named. Raises InputError when the run has no group, or not one of
    `prompts`.
    """
    shown = [section for section in [*SECTIONS, *added_sections(run)] if has_groups(run, section.groups)]
    if not run.children:
        raise InputError("a report needs a run with at least one measure; this one has none")
    options = PageOptions(None if prompts is None else tuple(prompts), round(megabytes * 1e6))
    contents = [(section, section.build(run, options)) for section in shown]
    page = framed(
        title=f"Positions in {checkpoint_name(run)}",
        facts=f'<dl class="facts">{_summary(run, shown)}</dl>',
        navigation={section.name: section.title for section in shown},
        sections=[_NO_SCRIPT, *(_section(section, content) for section, content in contents)],
        provenance=f"<p>What this page was made from, as recorded in the run file.</p>\n{_provenance(run)}",
        scripts=[_plotly(), "\n".join(packaged(name) for name in _scripts(shown))],
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def json_script(data: Any) -> str:
    """`data` as JSON that may stand inside a script element whatever texts it holds. Raises ValueError for NaN."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def table_html(table: Table) -> str:
    """A table in plain HTML, with its note below. Columns `layer` and `head` together make every row open that head in the
    explorer.
    """
    linked = "layer" in table.columns and "head" in table.columns
    rows = []
    for row, cells in zip(table.rows, table.formatted(), strict=True):
        drawn = [
            f'<td class="number">{escape(cell)}</td>' if numeric else f"<td>{escape(cell)}</td>"
            for cell, numeric in zip(cells, table.numeric, strict=True)
        ]
        if linked:
            layer, head = row[table.columns.index("layer")], row[table.columns.index("head")]
            drawn.append(
                f'<td><button type="button" class="open" data-layer="{layer}" data-head="{head}" hidden>'
                f"show L{layer} H{head}</button></td>"
            )
        rows.append(f"<tr>{''.join(drawn)}</tr>")
    header = "".join(
        f'<th scope="col"{" class=number" if numeric else ""}>{escape(column)}</th>'
        for column, numeric in zip(table.columns, table.numeric, strict=True)
    )
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption><thead><tr>{header}{"<td></td>" * linked}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="note">{escape(table.note)}</p>'
    )


def _section(section: Section, content: Content) -> str:
    parts = [f'<section id="{section.name}" aria-labelledby="{section.name}-title">']
    parts.append(f'<h2 id="{section.name}-title">{escape(section.title)}</h2>')
    parts.append(f"<p>{escape(content.lead)}</p>")
    parts += [f'<p class="left-out">{escape(note)}</p>' for note in content.notes]
    parts.append(content.html)
    for place, (label, _) in enumerate(content.charts):
        parts.append(
            f'<figure hidden><div class="chart" id="{section.name}-{place}" role="img" aria-label="{escape(label)}"></div>'
            f"<figcaption>{escape(label)}</figcaption></figure>"
        )
    parts += [_folded(table) for table in content.tables]
    data = {"charts": [chart for _, chart in content.charts], "data": content.data}
    parts.append(
        f'<script type="application/json" class="section-data" data-section="{section.name}">{json_script(data)}</script>'
    )
    return "\n".join([*parts, "</section>"])


def _folded(table: Table) -> str:
    if len(table.rows) <= 24:
        return table_html(table)
    return f"<details open><summary>{escape(table.title)}: {len(table.rows)} rows</summary>{table_html(table)}</details>"


def _summary(run: xr.DataTree, shown: Sequence[Section]) -> str:
    facts = {
        "layout": "layout",
        "training_length": "trained on (tokens)",
        "dtype": "dtype",
        "prompts": "prompts",
    }
    given = [(label, run.attrs[name]) for name, label in facts.items() if name in run.attrs]
    given = [(label, _stretches(value) if label == "layout" else value) for label, value in given]
    drawn = {name for section in shown for name in section.groups}
    undrawn = [name for name in run.children if name not in drawn]
    given += [("in run.nc, without a section here", ", ".join(undrawn))] if undrawn else []
    return "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(_fact(value))}</dd></div>" for label, value in given)


def _stretches(layout: Any) -> str:
    """ "rope,rope,repo" -> "rope × 2, repo"."""
    stretches = [(name, len(list(layers))) for name, layers in groupby(str(layout).split(","))]
    return ", ".join(name if count == 1 else f"{name} × {count}" for name, count in stretches)


def _provenance(run: xr.DataTree) -> str:
    """Every attribute of the run and of its groups; JSON is laid out."""
    owners = [("run", run.attrs), *((name, node.attrs) for name, node in run.children.items() if node.attrs)]
    parts = []
    for owner, attributes in owners:
        rows = "".join(
            f'<tr><th scope="row">{escape(str(name))}</th><td><pre>{escape(_fact(value))}</pre></td></tr>'
            for name, value in attributes.items()
        )
        parts.append(f'<table class="provenance"><caption>{escape(owner)}</caption><tbody>{rows}</tbody></table>')
    return "".join(parts)


def _fact(value: Any) -> str:
    if isinstance(value, str) and value[:1] in "{[":
        try:
            return json.dumps(json.loads(value), indent=2, ensure_ascii=False)
        except json.JSONDecodeError:
            return value
    return format_cell(value) if isinstance(value, int) else str(value)


def _scripts(shown: Sequence[Section]) -> list[str]:
    """Script files in the order in which they run: the page's own last, when all sections have said how they are drawn."""
    return [*dict.fromkeys(section.script for section in shown if section.script), "page.js"]


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
