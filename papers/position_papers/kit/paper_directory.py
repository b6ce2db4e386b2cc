"""Figures of a paper in a directory: each with the numbers behind it, and a page that says what was found and by what command.

    NAME.png, NAME.csv      the figure and its numbers; .svg, .pdf and .nc (the whole dataset) where `formats` asks for them
    figures.csv             names and captions, in order, with the variables that are too large for NAME.csv
    verdicts.csv            every verdict, every column, with how the checkpoint differs in scale and the command that gives the row
    provenance.json         what it was made from: the same again gives the same bytes
    README.md               the table of verdicts, the figures with captions, the command, by the template `pages/paper.md.jinja`

All of it or none: it is made beside and moved into place. Knows nothing about any paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from position_papers.kit.experiment import Result
from position_papers.kit.outcomes import records, verdict_table
from position_papers.kit.pages import rendered
from position_papers.kit.recorded_scores import LOSSES, training_rows
from position_papers.kit.scale import scale_beside
from position_papers.kit.subjects import stem
from repo_interp.errors import InputError
from repo_interp.files import replaced
from repo_interp.plots.style import save_figure
from repo_interp.run import write_netcdf

VERDICTS, FIGURES, PROVENANCE = "verdicts.csv", "figures.csv", "provenance.json"
FORMATS = ("png", "svg", "pdf", "nc")
"""What a figure can be written as, beside the CSV of its numbers."""
LARGEST = 2_000
"""Numbers of a variable from which on its means over the axes of `REPLICATES` stand for it; it is left out where they are more too."""
REPLICATES = ("prompt", "repeat", "draw", "point", "round")


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
    formats: Sequence[str] = FORMATS[:1],
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
        figures = []
        for name, drawing in zip(names, drawings, strict=True):
            save_figure(drawing.figure, unfinished / name, [each for each in formats if each != "nc"])
            if "nc" in formats:
                attributes = {"caption": drawing.caption, "command": command, **provenance}
                write_netcdf(plain(drawing.data).assign_attrs(attributes), unfinished / f"{name}.nc")
            left_out = write_numbers(drawing.data, unfinished / f"{name}.csv")
            figures.append({"figure": name, "caption": drawing.caption, "left_out": ", ".join(left_out)})
        told = [(result.experiment, verdict) for result in results for verdict in result.verdicts]
        scales = [scale_beside(own.claim.scale or experiment.scale, own.checkpoint, paths) for experiment, own in told]
        verdicts = verdict_table((own for _, own in told), scales, command)
        verdicts.to_csv(unfinished / VERDICTS, index=False, lineterminator="\n")
        pd.DataFrame(figures, columns=["figure", "caption", "left_out"]).to_csv(
            unfinished / FIGURES, index=False, lineterminator="\n"
        )
        rows = records(verdicts)
        page = rendered(
            "paper.md",
            title=title,
            command=command,
            rows=rows,
            asked={row["claim"]: row for row in rows}.values(),
            losses=LOSSES,
            trained=training_rows(paths),
            figures=figures,
            provenance=provenance,
        )
        texts = {PROVENANCE: json.dumps(dict(provenance), indent=1) + "\n", "README.md": page}
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8", newline="\n")
    return sorted(directory.iterdir())


def plain(data: xr.Dataset) -> xr.Dataset:
    """What a netCDF file takes: truth values as 0 and 1."""
    return data.assign({name: array.astype("int8") for name, array in data.items() if array.dtype == bool})


def write_numbers(data: xr.Dataset, file: Path) -> list[str]:
    """Write what is drawn as one table: a row per number, with its variable, unit and place on every axis. Return the variables that are
    left out, which are too large for a text.
    """
    parts, left_out = [], []
    for name, array in plain(data.reset_coords()).data_vars.items():
        if array.size > LARGEST and np.issubdtype(array.dtype, np.number):
            array = array.mean([axis for axis in REPLICATES if axis in array.dims], keep_attrs=True)
        if array.size > LARGEST:
            left_out.append(str(name))
            continue
        own = array.to_series().dropna().rename("value").reset_index() if array.dims else pd.DataFrame({"value": [array.item()]})
        own["value"] = [f"{each:.6g}" if isinstance(each, float) else str(each) for each in own["value"]]
        parts.append(own.assign(variable=str(name), units=str(array.attrs.get("units", ""))))
    table = pd.concat(parts) if parts else pd.DataFrame(columns=["variable", "value", "units"])
    axes = [name for name in table.columns if name not in ("variable", "value", "units")]
    table[["variable", *axes, "value", "units"]].to_csv(file, index=False, lineterminator="\n")
    return left_out
