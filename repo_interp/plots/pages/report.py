"""One page that shows a run, or several.

It is self-contained, works offline, without JavaScript and without a mouse, and can show any token.

    section = figures and tables of a group's view in plain HTML + its map of heads and its
    interactive part, brought to life by scripts

The page has a section for every view that shows something of the run (`catalogue`); other groups
are named. Everything is in one file: the files of `page/`, those of the views, arrays as base64
float32, and plotly.js from the plotly package if an interactive part may use it. This module
assembles a page, and knows nothing about the content of a section.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import xarray as xr

from repo_interp.errors import InputError, quoted
from repo_interp.plots.findings import EVERY, findings
from repo_interp.plots.lacking import reading
from repo_interp.plots.marks import Heads, Table, checkpoint_name, format_cell, has_runs, runs_of
from repo_interp.plots.pages.frame import Picture, packaged, page_script, picture, template
from repo_interp.plots.pages.linked import linked_sides
from repo_interp.plots.style import FORMATS, rendered, write_pictures
from repo_interp.plots.view import Interactive, PageOptions, View
from repo_interp.plots.view_catalogue import figures_of, views_of
from repo_interp.runtime.failures import record_failure, until_failure
from repo_interp.storage.files import file_to_write, write_text

BUDGET = 16.0
"""Megabytes of positions that are embedded by default."""
_EMBEDDED = ("png", "svg")
"""Format of a figure on the page: its SVG, or its PNG if the SVG is large."""


@dataclass(frozen=True)
class Section:
    """A section of the page: its view, its content, and its interactive part."""

    view: View
    content: dict[str, Any]
    """Arguments of the template's `section_of`."""
    interactive: Interactive | None
    lively: bool
    """Whether it needs scripts."""
    explores: bool
    """Whether this section holds the explorer, which comes first."""

    @property
    def follows(self) -> bool:
        """Whether this section comes next after the explorer, unfolded."""
        return self.interactive is not None and self.interactive.follows


def report_page(
    run: xr.DataTree,
    path: str | os.PathLike[str],
    prompts: Sequence[int] | None = None,
    megabytes: float = BUDGET,
) -> Path:
    """Write the page of one run or several.

    The same run gives the same bytes. The page names groups without a section, and prompts that are
    left out.

    Args:
        run: Tree of a run, a group per measure.
        path: File to write.
        prompts: Numbers of the prompts to embed, in order; None: all.
        megabytes: Budget for the embedded prompts; as many as fit are embedded.

    Returns:
        Path of the page.

    Raises:
        InputError: The run has no group or lacks one of `prompts`, or no file can have this path.
    """
    options = PageOptions(None if prompts is None else tuple(prompts), round(megabytes * 1e6))
    place = file_to_write(path, "report.html")
    write_text(place, _page(run, options, _pictures(run, None), None))
    return place


@dataclass(frozen=True)
class Shown:
    """The page of a run in a cell of a notebook."""

    page: str
    """The HTML of the page."""
    height: int
    """Pixels of the cell."""

    def _repr_html_(self) -> str:
        """The page in a frame: nothing in it reaches the notebook."""
        return (
            # Without allow-same-origin the frame has a separate origin for all its scripts.
            f'<iframe srcdoc="{escape(self.page)}" sandbox="allow-scripts allow-downloads" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )


def show(run: xr.DataTree, height: int = 800) -> Shown:
    """Make the page of one run or several for a cell of a notebook.

    Args:
        run: Tree of a run, a group per measure.
        height: Height of the cell in pixels.

    Returns:
        Object that a notebook displays.

    Raises:
        InputError: The run has no group, or `height` is not a positive whole number.
    """
    if isinstance(height, bool) or not isinstance(height, int) or height < 1:
        raise InputError(
            f"height is {quoted(height)}; wanted pixels, a whole number from 1 on, such as 800"
        )
    return Shown(_page(run, PageOptions(), _pictures(run, None), None), height)


def write_report(
    run: xr.DataTree,
    path: Path,
    directory: Path,
    formats: Sequence[str] | None = None,
    drawn: Callable[[str], object] | None = None,
) -> list[str]:
    """Write the page of one run or several, and figures as files.

    A view that fails loses only its figures or its section.

    Args:
        run: Tree of a run, a group per measure.
        path: File of the page.
        directory: Directory of the figures.
        formats: Any of png, svg and pdf; None: those figures as PNG that the page does not draw
            itself.
        drawn: Called with the name of every figure. Figures are drawn once.

    Returns:
        One line per failure.

    Raises:
        OSError: A file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    pictures = _pictures(run, failures, directory, formats, drawn)
    # Figures are on disk by now: a page that fails does not take them away.
    with record_failure(failures, "the page"):
        path.write_text(
            _page(run, PageOptions(), pictures, failures), encoding="utf-8", newline="\n"
        )
    return failures


def _pictures(
    run: xr.DataTree,
    failures: list[str] | None,
    directory: Path = Path(),
    formats: Sequence[str] | None = (),
    drawn: Callable[[str], object] | None = None,
) -> list[tuple[str, Picture]]:
    """Make the pictures of the page of `run`, with their groups.

    Figures are written into `directory` in `formats`, all of them where formats are named.

    For one run the page has no pictures of maps and charts.
    """
    pictures = []
    # A generator: only one figure is in memory at a time.
    for one in figures_of(run, failures):
        is_live = one.chart.live and not has_runs(run)
        written = (() if is_live else FORMATS[:1]) if formats is None else formats
        wanted = tuple(dict.fromkeys((*written, *(() if is_live else _EMBEDDED))))
        if drawn is not None and wanted:
            drawn(one.name)
        with record_failure(failures, f"the figure {one.name!r} of {one.measure!r}"):
            # A format may be wanted for both the directory and the page; it is rendered once.
            contents = rendered(one.figure, wanted) if wanted else {}
            write_pictures({name: contents[name] for name in written}, directory / one.name)
            if not is_live:
                pictures.append((one.measure, picture(one.figure, one.caption, contents)))
    return pictures


def _page(
    run: xr.DataTree,
    options: PageOptions,
    pictures: Sequence[tuple[str, Picture]],
    failures: list[str] | None,
) -> str:
    """The HTML of the page with `pictures`: pairs of a group and a picture."""
    if not run.children:
        raise InputError("a report needs a run with at least one measure; this one has none")
    sections: list[Section] = []
    for view in views_of(run):
        of_view = partial(
            _section,
            view,
            run,
            options,
            [picture for group, picture in pictures if group == view.group],
        )
        sections += until_failure(of_view, f"the section of {view.group!r}", failures)
    # The sort is stable, so the order of views holds within each kind.
    sections.sort(key=lambda section: (not section.explores, not section.follows))
    several = has_runs(run)
    found = list(until_failure(partial(findings, run, EVERY), "the findings", failures))
    sides = linked_sides(run, failures) if several else []
    interactives = [
        part
        for part in (section.interactive for section in (sides or sections))
        if part is not None
    ]
    # Sections of a comparison are plain pictures; only its two sides need scripts.
    lively = bool(sides) or (not several and any(section.lively for section in sections))
    not_measured = [
        f"not measured: {line}" for line in str(run.attrs.get("stopped", "")).splitlines()
    ]
    owners = [
        ("run", run.attrs),
        *((name, node.attrs) for name, node in run.children.items() if node.attrs),
    ]
    page = template().page_of(
        title=_title(run, sections),
        facts=_facts(run, sections),
        findings=found,
        warnings=[*str(run.attrs.get("notes", "")).splitlines(), *not_measured],
        sides=sides,
        sections=sections,
        runs=_runs_table(run) if several else None,
        owners=[
            (owner, {str(name): _fact(value) for name, value in stated.items()})
            for owner, stated in owners
        ],
        # A page without scripts stays small: no explorer, no plotly.
        style=packaged("page.css") + packaged("explorer.css") if lively else packaged("page.css"),
        script=page_script(
            interactives,
            bool(interactives) or any(section.content["charts"] for section in sections),
        )
        if lively
        else "",
    )
    return str(page)


def _title(run: xr.DataTree, sections: Sequence[Section]) -> str:
    """Choose the title of the page.

    It lists the runs that are compared, else it is the description by the first view that has one,
    else the first section.
    """
    if has_runs(run):
        runs = runs_of(run)
        return f"Compared: {', '.join(runs.title(name) for name in runs.names)}"
    described = next(filter(None, (_described(view, run) for view in views_of(run))), None)
    tasks = [f" on {node.attrs['task']}" for node in run.children.values() if "task" in node.attrs]
    first = sections[0].view.title if sections else "Run"
    title = described or f"{first} of {checkpoint_name(run)}{tasks[0] if tasks else ''}"
    scaling = run.attrs.get("scaling", "none")
    return title if scaling in ("", "none") else f"{title}, scaling {scaling}"


def _described(view: View, run: xr.DataTree) -> str:
    try:
        with reading(run, view.group):
            return view.describe(run)
    except InputError:
        return ""  # its section says it


def _section(
    view: View, run: xr.DataTree, options: PageOptions, pictures: Sequence[Picture]
) -> list[Section]:
    """The section of `view` with `pictures` of its figures; empty if there is nothing to show."""
    with reading(run, view.group):
        return _read_section(view, run, options, pictures)


def _read_section(
    view: View, run: xr.DataTree, options: PageOptions, pictures: Sequence[Picture]
) -> list[Section]:
    tables = list(view.tables(run))
    drawn = [
        (isinstance(chart, Heads), data)
        for chart in view.charts(run)
        if (data := chart.data()) is not None
    ]
    maps, charts = (
        [data for is_map, data in drawn if is_map == wanted] for wanted in (True, False)
    )
    data, notes = (None, ()) if view.interactive is None else view.interactive.data(run, options)
    interactive = None if data is None else view.interactive
    if not (pictures or tables or maps or charts or interactive):
        return []
    content = {
        "group": view.group,
        "title": view.title,
        "lead": view.lead if isinstance(view.lead, str) else view.lead(run),
        "notes": notes,
        "interactive": interactive,
        "informative": view.informative(run),
        "pictures": pictures,
        "tables": tables,
        "maps": maps,
        "charts": charts,
        "data": data,
    }
    lively = bool(maps or charts or interactive)
    # Only groups that describe prompts (token counts) can feed the explorer.
    explores = interactive is not None and "token_count" in run[view.group].data_vars
    return [Section(view, content, interactive, lively, explores)]


def _facts(run: xr.DataTree, sections: Sequence[Section]) -> list[tuple[str, str]]:
    """The facts below the title: a label and a text each."""
    facts = {
        "layout": "layout",
        "training_length": "context in training (tokens)",
        "dtype": "dtype",
        "prompts": "prompts",
    }
    given = [(label, run.attrs[name]) for name, label in facts.items() if name in run.attrs]
    given = [(label, _stretches(value) if label == "layout" else value) for label, value in given]
    shown = {section.view.group for section in sections}
    others = [name for name in run.children if name not in shown]
    given += [("in the run, without a section here", ", ".join(others))] if others else []
    return [(label, _fact(value)) for label, value in given]


def _stretches(layout: Any) -> str:
    """Count repeats: "rope,rope,repo" -> "rope × 2, repo"."""
    stretches = [(name, len(list(layers))) for name, layers in groupby(str(layout).split(","))]
    return ", ".join(name if count == 1 else f"{name} × {count}" for name, count in stretches)


def _runs_table(comparison: xr.DataTree) -> Table:
    """One row per run, from the root of the comparison."""
    root, runs = comparison.to_dataset(), runs_of(comparison)
    columns = {str(name): array.values.tolist() for name, array in root.data_vars.items()}
    rows = tuple(
        (
            runs.title(name),
            *(value if isinstance(value, int | float) else str(value)[:24] for value in values),
        )
        for name, *values in zip(runs.names, *columns.values(), strict=True)
    )
    titles = ("run", *(name.replace("_", " ") for name in columns))
    return Table("runs", "What is compared", titles, rows, "Digests are cut at 24 characters.")


def _fact(value: Any) -> str:
    if isinstance(value, str) and value[:1] in "{[":
        try:
            # Attributes of a run are flat; nested ones (parameters, options) are stored as JSON.
            return json.dumps(json.loads(value), indent=2, ensure_ascii=False)
        except json.JSONDecodeError:
            return value
    return format_cell(value) if isinstance(value, int) else str(value)
