"""Write the figures of a paper into a directory, with the numbers behind them and a page of the
verdicts.

    NAME.png                a figure; NAME.svg, .pdf and .nc (its whole dataset) if `formats` lists them
    numbers.csv.gz          the numbers behind all figures, one per row; pandas.read_csv opens it
    evidence.csv.gz         the evidence behind every verdict, unit by unit (`kit.judge.table`); judging reads only this file
    verdicts.csv            every verdict with all columns, the difference of the checkpoint in scale, and the command of the row
    charts.nc.xz            the data of the figures (`kit.charts`), so that they can be drawn again without a model
    page.json               provenance: the inputs of the page; equal inputs give equal bytes; figures: for each, in order, name, caption,
                            chart, and the variables that are too large for numbers.csv.gz
    README.md               the table of verdicts, the figures with captions, the command, by the template `pages/paper.md.jinja`

The directory is written whole or not at all: it is made in another place and then moved. This
module knows nothing about single papers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from position_papers import FORMATS
from position_papers.items import files_of
from position_papers.kit.charts import CHARTS, draw, read_charts, write_charts
from position_papers.kit.experiment import Paper, Result
from position_papers.kit.judge.outcomes import (
    primary_rows,
    read_table,
    records,
    standing,
    verdict_table,
)
from position_papers.kit.judge.table import (
    EVIDENCE,
    evidence_table,
    read_evidence,
    verdicts,
    write_evidence,
)
from position_papers.kit.pages import rendered
from position_papers.kit.part import (
    Key,
    commands_of,
    joined_evidence,
    joined_numbers,
    joined_parts,
    keys_of,
)
from position_papers.kit.scale import scale_beside
from position_papers.kit.subjects import stem
from position_papers.training.trained import recorded_scores, trained_configuration
from repo_interp.errors import InputError
from repo_interp.plots.style import save_figure
from repo_interp.run import write_netcdf
from repo_interp.storage.files import replace_whole

VERDICTS, NUMBERS, PAGE = "verdicts.csv", "numbers.csv.gz", "page.json"
LARGEST = 2_000
"""Most numbers of a variable. A larger one is replaced by its means over the axes of `REPLICATES`,
and left out if these are still larger.
"""
COLUMNS = ("figure", "variable", "value", "text", "units")
"""Columns of numbers.csv.gz without the axes, which follow the second column."""
REPLICATES = ("prompt", "repeat", "draw", "point", "round")


def provenance_of(directory: Path, command: str) -> dict[str, str] | None:
    """Return the inputs from which `command` made the page in `directory`, or a part of it; None if
    it made none, or the directory has no page or no evidence to judge.
    """
    try:
        page = read_page(directory)
        known = [page["provenance"], *(part["provenance"] for part in page.get("parts", []))]
        own = next((each for each in known if each["command"] == command), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return own if isinstance(own, dict) and (directory / EVIDENCE).is_file() else None


def claims_in(directory: Path) -> set[str]:
    """Return the labels of the claims with rows on the page in `directory`."""
    file = directory / VERDICTS
    return {row["claim"] for row in records(read_table(file))} if file.is_file() else set()


def read_page(directory: Path) -> dict[str, Any]:
    """Read the page.json of `directory`."""
    return json.loads((directory / PAGE).read_text(encoding="utf-8"))


def require_free(directory: Path) -> None:
    """Raise InputError if `directory` is a file, or has other content, which figures must not
    replace.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if present and VERDICTS not in present:
        raise InputError(
            f"{directory} holds other things ({present[0]}); give --out a directory of its own"
        )


@dataclass(frozen=True)
class Written:
    """Counts of the written directory of a paper."""

    pictures: list[Path]
    """Number of drawn figures, in all formats."""
    rows: list[Key]
    """Number of judged pairs of claim and checkpoint."""


def write_paper(
    directory: Path,
    paper: Paper,
    results: Sequence[Result],
    paths: Mapping[str, str],
    command: str,
    provenance: Mapping[str, str],
    formats: Sequence[str] = FORMATS[:1],
    whole: tuple[Paper, str] | None = None,
) -> Written:
    """Write everything. The same results give the same bytes.

    `paths`: the checkpoints by name, for the difference in size from the paper's model next to each
    verdict. `whole`: the paper that `paper` is a part of, and the command for the whole paper;
    other content of `directory` then stays.
    """
    before = read_page(directory) if whole is not None and claims_in(directory) else None
    drawings = [
        drawing
        for result in results
        for drawing in result.drawings
        if not paper.drawn
        or any(files_of(item, paper.items, [stem(drawing.name)]) for item in paper.drawn)
    ]
    names = [stem(drawing.name) for drawing in drawings]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"two figures would have the same name, {', '.join(twice)}; give the checkpoints "
            "other names"
        )
    with replace_whole(directory) as unfinished:
        if before is None:
            unfinished.mkdir(parents=True)
        else:
            shutil.copytree(directory, unfinished)
        figures = _kept(before, directory, names)
        tables = [pd.DataFrame(columns=list(COLUMNS))]
        drawn = dict(zip(names, drawings, strict=True))
        charts = {name: chart for name, (_, chart) in figures.items() if chart is not None}
        charts |= {name: drawing.chart for name, drawing in drawn.items()}
        # In their previous order; new ones follow.
        charts = {name: charts[name] for name in (*figures, *names) if name in charts}
        stored = dict(zip(charts, write_charts(charts.values(), unfinished / CHARTS), strict=True))
        for name, drawing in drawn.items():
            if not stored[name]:
                save_figure(drawing.figure, unfinished / name, _pictures(formats))
            if "nc" in formats:
                attributes = {"caption": drawing.caption, "command": command, **provenance}
                write_netcdf(
                    plain(drawing.data).assign_attrs(attributes), unfinished / f"{name}.nc"
                )
            table, left_out = numbers(drawing.data)
            tables.append(table.assign(figure=name))
            facts = {"figure": name, "caption": drawing.caption, "left_out": ", ".join(left_out)}
            figures[name] = facts, drawing.chart
        told = [(result.experiment, own) for result in results for own in result.evidence]
        scales = [
            scale_beside(own.claim.scale or experiment.scale, own.checkpoint, paths)
            for experiment, own in told
        ]
        table = evidence_table((own for _, own in told), scales)
        rows = keys_of(table)
        write_evidence(table, unfinished / EVIDENCE)
        write_numbers(pd.concat(tables), unfinished / NUMBERS)
        own = {"command": command, **provenance}
        facts = {
            "provenance": own,
            "figures": [
                facts | {"chart": stored.get(name, {})} for name, (facts, _) in figures.items()
            ],
            "trained": training_rows(paths),
        }
        if before is not None and whole is not None:
            paper, of_all = whole
            made = read_evidence(unfinished / EVIDENCE)
            joined = joined_evidence(read_evidence(directory / EVIDENCE), made, paper)
            write_evidence(joined, unfinished / EVIDENCE)
            numbers_before, numbers_made = (
                pd.read_csv(place / NUMBERS, dtype=str, keep_default_na=False)
                for place in (directory, unfinished)
            )
            table = joined_numbers(numbers_before, numbers_made, list(figures))
            write_numbers(table, unfinished / NUMBERS)
            trained = {row["checkpoint"]: row for row in (*before["trained"], *facts["trained"])}
            facts |= {"provenance": before["provenance"], "trained": list(trained.values())}
            if parts := joined_parts(before, own, of_all, (names, rows)):
                facts["parts"] = parts
        # From the stored data, so that drawing again gives the same bytes
        draw_again(unfinished, facts, formats, names)
        write_verdicts(unfinished, paper, facts)
    made_now = [directory / f"{name}.{form}" for name in names for form in formats]
    return Written(made_now, rows)


def _kept(
    before: Mapping[str, Any] | None, directory: Path, names: Sequence[str]
) -> dict[str, tuple[dict[str, Any], partial[Any] | None]]:
    """Return the figures of an existing page, without records of charts, and their stored charts
    that stay; figures in `names` keep their place for the new drawings.
    """
    known = [] if before is None else before["figures"]
    stored = {
        each["figure"]: each["chart"]
        for each in known
        if each.get("chart") and each["figure"] not in names
    }
    charts = (
        dict(zip(stored, read_charts(stored.values(), directory / CHARTS), strict=True))
        if stored
        else {}
    )
    return {each["figure"]: (each, charts.get(each["figure"])) for each in known}


def draw_again(
    directory: Path,
    facts: Mapping[str, Any],
    formats: Sequence[str] = FORMATS[:1],
    names: Collection[str] | None = None,
) -> list[str]:
    """Draw the figures in `directory` from its stored charts.

    Args:
        directory: Directory of the figures.
        facts: Content of page.json.
        formats: Formats of the figures.
        names: Figures to draw; None: all.

    Returns:
        Names of the figures that do not change, because their charts are not stored.

    Raises:
        InputError: The charts are damaged, or this version lacks one of them.
    """
    file = directory / CHARTS
    known = {
        each["figure"]: each.get("chart")
        for each in facts["figures"]
        if names is None or each["figure"] in names
    }
    stored = {name: chart for name, chart in known.items() if chart and file.is_file()}
    if stored:
        for name, chart in zip(stored, read_charts(stored.values(), file), strict=True):
            save_figure(draw(chart), directory / name, _pictures(formats))
    return [name for name in known if name not in stored]


def _pictures(formats: Sequence[str]) -> list[str]:
    return [name for name in formats if name != "nc"]


def write_verdicts(directory: Path, paper: Paper, facts: Mapping[str, Any]) -> None:
    """Judge the table of evidence in `directory`, and write verdicts and the page.

    Args:
        directory: Directory of the table, and of figures with the numbers behind them.
        paper: The paper.
        facts: Content of page.json.

    Raises:
        InputError: The directory has no table of evidence.
    """
    if not (directory / EVIDENCE).is_file():
        raise InputError(f"{directory} has no {EVIDENCE} to judge; make its figures again")
    command = facts["provenance"]["command"]
    found, scales = verdicts(paper, read_evidence(directory / EVIDENCE))
    table = verdict_table(found, scales, command)
    table = table.assign(
        command=list(commands_of(facts, zip(table["claim"], table["checkpoint"], strict=True)))
    )
    table.to_csv(directory / VERDICTS, index=False, lineterminator="\n")
    rows = records(table)
    own = [
        standing(partial(primary_rows, rows, paper), paper, claim)
        for claim in paper.claims
        if not claim.part
    ]
    names = [figure["figure"] for figure in facts["figures"]]
    page = rendered(
        "paper.md",
        paper=paper,
        command=command,
        rows=rows,
        found=[verdict for verdict in own if verdict is not None],
        parts=facts.get("parts", []),
        items=[(item, files_of(item, paper.items, names)) for item in paper.items],
        **{name: facts[name] for name in ("provenance", "figures", "trained")},
    )
    written = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    for name, text in ((PAGE, written), ("README.md", page)):
        (directory / name).write_text(text, encoding="utf-8", newline="\n")


def training_rows(paths: Mapping[str, str]) -> list[dict[str, str]]:
    """Describe, by heading, the training of each checkpoint in `paths` (by name) and its final
    loss: mean and standard deviation over seeds, in nats per target.

    Checkpoints without a record of their training are left out.
    """
    rows = []
    for name, path in paths.items():
        known = trained_configuration(path) is not None
        runs = [run for run in recorded_scores(path) if np.isfinite(run.loss)] if known else []
        if runs:
            losses, configuration = [run.loss for run in runs], runs[0].configuration
            spread = f" ± {np.std(losses, ddof=1):.2g}" if len(losses) > 1 else ""
            row = {"checkpoint": name, "task": configuration.task}
            row["scheme"] = configuration.scheme + (
                ", continued" if configuration.continue_from else ""
            )
            row["steps x batch"] = (
                f"{configuration.steps:,} x {configuration.batch * configuration.accumulation}"
            )
            row["seeds"] = ", ".join(str(run.seed) for run in runs)
            rows.append({**row, "final loss": f"{np.mean(losses):.3g}{spread}"})
    return rows


def plain(data: xr.Dataset) -> xr.Dataset:
    """Convert a dataset for netCDF: booleans become 0 and 1."""
    return data.assign(
        {name: array.astype("int8") for name, array in data.items() if array.dtype == bool}
    )


def numbers(data: xr.Dataset) -> tuple[pd.DataFrame, list[str]]:
    """Return the data of a figure as one table of text, and the variables that are too large for
    it.

    A row has a variable, its label on every axis, its value as a number or as a text, and its unit.
    """
    parts, left_out = [pd.DataFrame(columns=list(COLUMNS))], []
    for name, array in plain(data.reset_coords()).data_vars.items():
        is_number = np.issubdtype(array.dtype, np.number)
        if array.size > LARGEST and is_number:
            array = array.mean([axis for axis in REPLICATES if axis in array.dims], keep_attrs=True)
        if array.size > LARGEST:
            left_out.append(str(name))
            continue
        own = (
            array.to_series().dropna().rename("drawn").reset_index()
            if array.dims
            else pd.DataFrame({"drawn": [array.item()]})
        )
        drawn = own.pop("drawn")
        # Whole numbers without a decimal point, independent of other figures with the same axis
        own = own.convert_dtypes().astype(str)
        own["value" if is_number else "text"] = [
            f"{each:.6g}" if isinstance(each, float) else str(each) for each in drawn
        ]
        parts.append(own.assign(variable=str(name), units=str(array.attrs.get("units", ""))))
    return pd.concat(parts), left_out


def write_numbers(table: pd.DataFrame, file: Path) -> None:
    """Write the joined tables of `numbers`, with a column `figure`, as compressed CSV; the same
    table gives the same bytes.
    """
    axes = [name for name in table.columns if name not in COLUMNS]
    columns = [*COLUMNS[:2], *axes, *COLUMNS[2:]]
    table[columns].to_csv(
        file, index=False, lineterminator="\n", compression={"method": "gzip", "mtime": 0}
    )
