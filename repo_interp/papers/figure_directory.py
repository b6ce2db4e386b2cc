"""Figures of a paper in a directory: each as PNG, SVG and PDF with its data, and a page that says what was found and by what command.

    NAME.png, .svg, .pdf    the figure        NAME.nc    its data        verdicts.csv    every verdict, every column
    README.md               the table of verdicts, the figures with captions, the command: all written from the data

All of it or none: it is made beside and moved into place. Knows nothing about any paper.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.papers.claims import Verdict, markdown_table, verdict_rows
from repo_interp.papers.result import Result
from repo_interp.plots.style import save_figure

COLUMNS = {
    "claim": "claim",
    "checkpoint": "checkpoint",
    "verdict": "verdict",
    "measured": "measured",
    "ours": "ours",
    "spread": "spread",
    "spread_over": "over",
    "n": "sequences",
    "control": "control",
    "paper": "paper",
    "note": "note",
}


def prepare(directory: str | os.PathLike[str], overwrite: bool) -> Path:
    """The directory for the figures. Raises InputError where it is a file, or holds something that may not be replaced."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if present and "verdicts.csv" not in present:
        raise InputError(f"{directory} holds other things ({present[0]}); give --out a directory of its own")
    if present and not overwrite:
        raise InputError(f"{directory} holds figures already; give another --out, or --overwrite to replace them")
    return directory


def write_figures(
    directory: Path,
    title: str,
    results: Sequence[Result],
    unmeasured: Sequence[Verdict],
    command: str,
    provenance: Mapping[str, str],
) -> list[Path]:
    """Write everything and return the files. The same results give the same bytes."""
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        for result in results:
            save_figure(result.figure, unfinished / result.name)
            stated = {"caption": result.caption, "command": command, **provenance}
            result.data.assign_attrs(stated).to_netcdf(unfinished / f"{result.name}.nc", engine="h5netcdf")
        rows = verdict_rows([*(verdict for result in results for verdict in result.verdicts), *unmeasured])
        (unfinished / "verdicts.csv").write_text(_csv(rows), encoding="utf-8", newline="\n")
        (unfinished / "README.md").write_text(_page(title, results, rows, command, provenance), encoding="utf-8", newline="\n")
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(directory.iterdir())


def _page(title: str, results: Sequence[Result], rows: list[dict[str, str]], command: str, provenance: Mapping[str, str]) -> str:
    claims = {row["claim"]: row for row in rows}
    parts = [f"# {title}", "Made by", f"```\n{command}\n```", "## Verdicts", markdown_table(rows, COLUMNS), "### What was asked"]
    parts += [f"- **{name}** ({row['source']}): {row['statement']}. Holds when: {row['rule']}." for name, row in claims.items()]
    parts.append("## Figures")
    for result in results:
        parts += [f"![{result.name}]({result.name}.png)", f"`{result.name}`: {result.caption}"]
    parts += ["## Provenance", "\n".join(f"- {name}: {value}" for name, value in provenance.items())]
    return "\n\n".join(parts) + "\n"


def _csv(rows: list[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
