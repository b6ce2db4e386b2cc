"""One page that shows a run, or several: self-contained, offline, readable without JavaScript, without a mouse, with any token in it.

    section = figures and tables of a group's view in plain HTML + its map of heads and its interactive part, brought to life by scripts

A section for every view that shows something of the run (`catalogue`); other groups are named. Everything stands in one file: the files of
`page/`, those of the views, arrays as base64 float32, and plotly.js from the plotly package where an interactive part may use it. Knows
how a page is put together; knows nothing about what a section shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.failures import noted
from repo_interp.plots.catalogue import figures_of, views_of
from repo_interp.plots.marks.reading import checkpoint_name
from repo_interp.plots.marks.runs import has_runs, runs_of
from repo_interp.plots.marks.table import Table, format_cell
from repo_interp.plots.pages.frame import framed, json_script, page_scripts, picture_html, table_html
from repo_interp.plots.pages.linked import LINKED, linked_section
from repo_interp.plots.style import FORMATS, rendered, write_pictures
from repo_interp.plots.view import Interactive, PageOptions, View

BUDGET = 16.0
"""Megabytes of positions that are embedded unless more are asked for."""
LONG_TABLE = 24
"""Rows above which a reader may fold a table away."""
_NO_SCRIPT = (
    '<noscript><p class="left-out">What can be clicked in this page needs JavaScript; figures and tables do not.</p></noscript>'
)
_EMBEDDED = ("png", "svg")
"""What a figure is rendered as for the page: its SVG, or where that is large its PNG."""
_LITTLE = "Figures and tables, which say little about this run"


@dataclass(frozen=True)
class Section:
    """A section of the page: the view it shows, its HTML, and what it brings to life."""

    view: View
    html: str
    interactive: Interactive | None
    has_head_maps: bool
    has_head_charts: bool


def report_page(
    run: xr.DataTree, path: str | os.PathLike[str], prompts: Sequence[int] | None = None, megabytes: float = BUDGET
) -> Path:
    """Write the page of `run`, one run or several, to `path` and return the path. The same run gives the same bytes.

    `prompts`: numbers of the prompts to embed, in order; as many as fit into `megabytes` are, and the page says which are left
    out. A group without a section is named. Raises InputError when the run has no group, or not one of
    `prompts`.
    """
    options = PageOptions(None if prompts is None else tuple(prompts), round(megabytes * 1e6))
    path = Path(path)
    pictures = [(one.measure, picture_html(one.figure, one.caption, rendered(one.figure, _EMBEDDED))) for one in figures_of(run)]
    path.write_text(_page(run, options, pictures, None), encoding="utf-8", newline="\n")
    return path


def write_report(
    run: xr.DataTree,
    path: Path,
    directory: Path,
    formats: Sequence[str] = FORMATS[:1],
    drawn: Callable[[str], object] | None = None,
) -> list[str]:
    """Write the page of `run`, one run or several, to `path`, and every figure in `formats` into `directory`; return one line per failure.

    `drawn` is called with the name of each figure, which is drawn once. What one view cannot draw or say costs its figures or its section
    alone. Raises OSError where a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    pictures = []
    for one in figures_of(run, failures):
        if drawn is not None:
            drawn(one.name)
        with noted(failures, f"the figure {one.name!r} of {one.measure!r}"):
            contents = rendered(one.figure, tuple(dict.fromkeys((*formats, *_EMBEDDED))))
            write_pictures({name: contents[name] for name in formats}, directory / one.name)
            pictures.append((one.measure, picture_html(one.figure, one.caption, contents)))
    with noted(failures, "the page"):
        path.write_text(_page(run, PageOptions(), pictures, failures), encoding="utf-8", newline="\n")
    return failures


def _page(run: xr.DataTree, options: PageOptions, pictures: Sequence[tuple[str, str]], failures: list[str] | None) -> str:
    """The HTML of the page with `pictures`: the group and the HTML of each."""
    if not run.children:
        raise InputError("a report needs a run with at least one measure; this one has none")
    sections = []
    for view in views_of(run):
        with noted(failures, f"the section of {view.group!r}"):
            section = _section(view, run, options, [picture for group, picture in pictures if group == view.group])
            sections += [] if section is None else [section]
    linked, scripts = linked_section(run, failures) if has_runs(run) else ("", _scripts(sections))
    return framed(
        title=_title(run, sections),
        facts=f'<dl class="facts">{_summary(run, sections)}</dl>{_warnings(run)}',
        navigation={**({LINKED: "Side by side"} if linked else {}), **{one.view.group: one.view.title for one in sections}},
        sections=[_NO_SCRIPT if scripts else "", *([linked] if linked else []), *(section.html for section in sections)],
        provenance=f"<p>What this page was made from, as recorded in the run file.</p>\n{_provenance(run)}",
        scripts=scripts,
    )


def _warnings(run: xr.DataTree) -> str:
    """What the run says beside its numbers, and what it could not measure."""
    lines = [*str(run.attrs.get("notes", "")).splitlines()]
    lines += [f"not measured: {line}" for line in str(run.attrs.get("stopped", "")).splitlines()]
    return "".join(f'<p class="left-out">{escape(line)}</p>' for line in lines)


def _title(run: xr.DataTree, sections: Sequence[Section]) -> str:
    """What the page is about: the runs that are compared, what the first view says that says something, or the first section."""
    if has_runs(run):
        runs = runs_of(run)
        return f"Compared: {', '.join(runs.title(name) for name in runs.names)}"
    described = next(filter(None, (view.describe(run) for view in views_of(run))), None)
    tasks = [f" on {node.attrs['task']}" for node in run.children.values() if "task" in node.attrs]
    first = sections[0].view.title if sections else "Run"
    return described or f"{first} of {checkpoint_name(run)}{tasks[0] if tasks else ''}"


def _section(view: View, run: xr.DataTree, options: PageOptions, pictures: Sequence[str]) -> Section | None:
    """The section of `view` with `pictures` of its figures; None where there is nothing to show."""
    drawn = [f'<div class="figures">{"".join(pictures)}</div>'] if pictures else []
    static = "\n".join([*drawn, *(_folded(table) for table in view.tables(run))])
    maps = [heads.data() for heads in view.head_maps(run)]
    charts = [chart.data() for chart in view.head_charts(run)]
    data, notes = (None, ()) if view.interactive is None else view.interactive.data(run, options)
    interactive = None if data is None else view.interactive
    if not static and not maps and not charts and interactive is None:
        return None
    name = escape(view.group)
    parts = [
        f'<section id="{name}" aria-labelledby="{name}-title">',
        f'<h2 id="{name}-title">{escape(view.title)}</h2>',
        f"<p>{escape(lead)}</p>" if (lead := view.lead if isinstance(view.lead, str) else view.lead(run)) else "",
        *(f'<p class="left-out">{escape(note)}</p>' for note in notes),
    ]
    if interactive is not None:
        parts.append(interactive.markup.read_text(encoding="utf-8"))
    if charts:
        parts.append('<div class="head-charts" hidden></div>')
    if not view.informative(run):
        static = f"<details><summary>{_LITTLE}</summary>\n{static}\n</details>" if static else ""
    elif maps:
        parts.append('<div class="head-maps" hidden></div>')
    parts.append(static)
    if interactive is not None or maps or charts:
        content = json_script({"maps": maps if view.informative(run) else [], "charts": charts, "data": data})
        parts.append(f'<script type="application/json" class="section-data" data-section="{name}">{content}</script>')
    return Section(view, "\n".join([*parts, "</section>"]), interactive, bool(maps), bool(charts))


def _folded(table: Table) -> str:
    if len(table.rows) <= LONG_TABLE:
        return table_html(table)
    return f"<details open><summary>{escape(table.title)}: {len(table.rows)} rows</summary>{table_html(table)}</details>"


def _scripts(sections: Sequence[Section]) -> list[str]:
    maps = ["heads.js"] if any(section.has_head_maps for section in sections) else []
    charts = ["head_charts.js"] if any(section.has_head_charts for section in sections) else []
    return page_scripts([section.interactive for section in sections if section.interactive], [*maps, *charts])


def _summary(run: xr.DataTree, sections: Sequence[Section]) -> str:
    facts = {"layout": "layout", "training_length": "trained on (tokens)", "dtype": "dtype", "prompts": "prompts"}
    given = [(label, run.attrs[name]) for name, label in facts.items() if name in run.attrs]
    given = [(label, _stretches(value) if label == "layout" else value) for label, value in given]
    shown = {section.view.group for section in sections}
    others = [name for name in run.children if name not in shown]
    given += [("in run.nc, without a section here", ", ".join(others))] if others else []
    return "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(_fact(value))}</dd></div>" for label, value in given)


def _stretches(layout: Any) -> str:
    """ "rope,rope,repo" -> "rope × 2, repo"."""
    stretches = [(name, len(list(layers))) for name, layers in groupby(str(layout).split(","))]
    return ", ".join(name if count == 1 else f"{name} × {count}" for name, count in stretches)


def _provenance(run: xr.DataTree) -> str:
    """Every attribute of the run and of its groups, JSON laid out; and of several runs what each is."""
    parts = [table_html(_runs_table(run))] if has_runs(run) else []
    owners = [("run", run.attrs), *((name, node.attrs) for name, node in run.children.items() if node.attrs)]
    for owner, attributes in owners:
        rows = "".join(
            f'<tr><th scope="row">{escape(str(name))}</th><td><pre>{escape(_fact(value))}</pre></td></tr>'
            for name, value in attributes.items()
        )
        parts.append(f'<table class="provenance"><caption>{escape(owner)}</caption><tbody>{rows}</tbody></table>')
    return "".join(parts)


def _runs_table(comparison: xr.DataTree) -> Table:
    """One row per run, from the root of the comparison."""
    root, runs = comparison.to_dataset(), runs_of(comparison)
    columns = {str(name): array.values.tolist() for name, array in root.data_vars.items()}
    rows = tuple(
        (runs.title(name), *(value if isinstance(value, int) else str(value)[:24] for value in values))
        for name, *values in zip(runs.names, *columns.values(), strict=True)
    )
    titles = ("run", *(name.replace("_", " ") for name in columns))
    return Table("runs", "What is compared", titles, rows, "Digests are cut at 24 characters.")


def _fact(value: Any) -> str:
    if isinstance(value, str) and value[:1] in "{[":
        try:
            return json.dumps(json.loads(value), indent=2, ensure_ascii=False)
        except json.JSONDecodeError:
            return value
    return format_cell(value) if isinstance(value, int) else str(value)
