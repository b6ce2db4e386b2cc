"""Figures of a paper in a directory: each as PNG, SVG and PDF with its data, and a page that says what was found and by what command.

    NAME.png, .svg, .pdf    the figure        NAME.nc      its data            figures.csv    names and captions, in order
    verdicts.csv            every verdict, every column, with how the checkpoint differs in scale and the command that gives the row
    provenance.json         what it was made from: the same again gives the same bytes
    README.md               the table of verdicts, the figures with captions, the command: all written from the data

All of it or none: it is made beside and moved into place. Knows nothing about any paper.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import xarray as xr

from position_papers.kit.claims import ROW, markdown_table, verdict_rows
from position_papers.kit.experiment import Result
from position_papers.kit.recorded_scores import LOSSES, training_rows
from position_papers.kit.scale import scale_beside
from position_papers.kit.subjects import stem
from repo_interp.errors import InputError
from repo_interp.files import replaced
from repo_interp.plots.style import FORMATS, save_figure
from repo_interp.run import write_netcdf

COLUMNS = {
    "claim": "claim",
    "checkpoint": "checkpoint",
    "verdict": "verdict",
    "measured": "measured",
    "ours": "ours",
    "spread": "spread",
    "spread_over": "over",
    "n": "n",
    "seeds": "seeds",
    "control": "control",
    "paper": "paper",
    "written": "rule written",
    "note": "note",
}
VERDICTS, FIGURES, PROVENANCE = "verdicts.csv", "figures.csv", "provenance.json"


def is_made_from(directory: Path, provenance: Mapping[str, str]) -> bool:
    """Whether `directory` holds figures made from just this."""
    file = directory / PROVENANCE
    try:
        return json.loads(file.read_text(encoding="utf-8")) == dict(provenance)
    except (OSError, ValueError):
        return False


def require_free(directory: Path) -> None:
    """Raises InputError where `directory` is a file, or holds something that figures may not replace."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if present and VERDICTS not in present:
        raise InputError(f"{directory} holds other things ({present[0]}); give --out a directory of its own")


def write_paper(
    directory: Path,
    title: str,
    results: Sequence[Result],
    paths: Mapping[str, str],
    command: str,
    provenance: Mapping[str, str],
) -> list[Path]:
    """Write everything and return the files. The same results give the same bytes.

    `paths`: the checkpoints by name, beside whose verdicts it is said how they differ in size from the paper's model.
    """
    drawings = [drawing for result in results for drawing in result.drawings]
    names = [stem(drawing.name) for drawing in drawings]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InputError(f"two figures would have the same name, {', '.join(twice)}; give the checkpoints other names")
    with replaced(directory) as unfinished:
        unfinished.mkdir(parents=True)
        for name, drawing in zip(names, drawings, strict=True):
            save_figure(drawing.figure, unfinished / name, FORMATS)
            attributes = {"caption": drawing.caption, "command": command, **provenance}
            write_netcdf(plain(drawing.data).assign_attrs(attributes), unfinished / f"{name}.nc")
        scales = [verdict.claim.scale or result.experiment.scale for result in results for verdict in result.verdicts]
        rows = [
            row | {"scale": scale_beside(scale, row["checkpoint"], paths), "command": command}
            for scale, row in zip(scales, verdict_rows(verdict for result in results for verdict in result.verdicts), strict=True)
        ]
        captions = [{"figure": name, "caption": drawing.caption} for name, drawing in zip(names, drawings, strict=True)]
        texts = {
            VERDICTS: _csv(rows, (*ROW, "scale", "command")),
            FIGURES: _csv(captions, ("figure", "caption")),
            PROVENANCE: json.dumps(dict(provenance), indent=1) + "\n",
            "README.md": _page(title, captions, rows, training_rows(paths), command, provenance),
        }
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8", newline="\n")
    return sorted(directory.iterdir())


def plain(data: xr.Dataset) -> xr.Dataset:
    """What a netCDF file takes: truth values as 0 and 1."""
    return data.assign({name: array.astype("int8") for name, array in data.items() if array.dtype == bool})


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a table that `write_paper` wrote."""
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _page(
    title: str,
    captions: Sequence[Mapping[str, str]],
    rows: list[dict[str, str]],
    trained: list[dict[str, str]],
    command: str,
    provenance: Mapping[str, str],
) -> str:
    claims = {row["claim"]: row for row in rows}
    parts = [f"# {title}", "Made by", f"```\n{command}\n```", "## Verdicts", markdown_table(rows, COLUMNS), "### What was asked"]
    parts.append(
        "\n".join(
            f"- **{name}** ({row['source']}): {row['statement']}. Holds when: {row['rule']}." for name, row in claims.items()
        )
    )
    if trained:
        parts += [
            "## Final losses",
            "Mean over the last steps of training, nats per target; ± over seeds.",
            markdown_table(trained, LOSSES),
        ]
    parts.append("## Figures")
    for figure in captions:
        name = figure["figure"]
        parts += [f"### {name}", f"![{name}]({name}.png)", figure["caption"]]
        parts.append(f"[PDF]({name}.pdf) · [SVG]({name}.svg) · [data]({name}.nc)")
    parts += ["## Provenance", "\n".join(f"- {name}: {value}" for name, value in provenance.items())]
    return "\n\n".join(parts) + "\n"


def _csv(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
