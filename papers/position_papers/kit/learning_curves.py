"""Learning curves: training loss and score by step, of checkpoints that kept their log.jsonl (CoPE,
fig. 5; HoPE, fig. 10).

    loss [checkpoint, seed, step]    mean since the step before it in the log
    score [checkpoint, seed, step]   of the task, NaN where the log has none (`train --score-every`)

Checkpoints of one task share a figure, with a line per checkpoint: the mean over its seeds, in a
band from the smallest to the largest. Seeds are the directory's own run and those in seed-N. Judges
no claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from matplotlib.lines import Line2D

from position_papers.kit.experiment import Drawing, Experiment, Needs, alike
from position_papers.kit.subjects import Subject, records_of
from position_papers.training.trained import read_runs, seed_of
from repo_interp.errors import InputError
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.reading import unit_label
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.tasks import make_task


def _logs(subject: Subject) -> dict[int, Path]:
    """Logs of a checkpoint's runs by seed."""
    directory, known = records_of(subject), subject.configuration
    first = 0 if known is None else known.seed
    files = [*directory.glob("log.jsonl"), *directory.glob("seed-*/log.jsonl")]
    seeds = (seed_of(file.parent) for file in files)
    return {first if seed is None else seed: file for seed, file in zip(seeds, files, strict=True)}


def measure(subjects: Sequence[Subject], *_: Any) -> xr.Dataset:
    """Loss and score by step; NaN where a run has no record of a step."""
    runs = [
        _read(file).assign(checkpoint=subject.name, seed=seed)
        for subject in subjects
        for seed, file in _logs(subject).items()
    ]
    table = pd.concat(runs).set_index(["checkpoint", "seed", "step"])
    data = table[["loss", "score"]].astype(float).to_xarray()
    data = data.sel(checkpoint=[subject.name for subject in subjects])
    configuration = subjects[0].configuration
    assert configuration is not None  # of `NEEDS`
    task = make_task(configuration.task)
    layouts = ("checkpoint", [subject.layout for subject in subjects])
    return (
        data.assign(
            loss=with_attrs(data["loss"], "training loss", "nat per target"),
            score=with_attrs(data["score"], task.metric, task.units),
        )
        .assign_coords(layout=layouts)
        .assign_attrs(task=task.name)
    )


def _read(file: Path) -> pd.DataFrame:
    try:
        return pd.DataFrame(read_runs(file)).loc[:, ["step", "loss", "score"]]
    except (ValueError, KeyError) as error:
        raise InputError(f"{file} is no log of a training run: {error}") from None


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Loss and score over the steps of training."""
    task = data.attrs["task"]
    caption = (
        f"Loss and score of checkpoints on the task {task} over the steps of their training, as "
        "log.jsonl has them (CoPE fig. 5, HoPE fig. 10). Line: mean over seeds; band: from the "
        "smallest to the largest seed."
    )
    yield Drawing(f"learning_curves_{task}", partial(learning_curves, data), caption, data)


@style()
def learning_curves(data: xr.Dataset) -> PaperFigure:
    """Draw loss, and score where one is known, over the steps of training."""
    known = [name for name in ("loss", "score") if data[name].notnull().any()]
    figure = paper_figure(PAGE_WIDTH, 2.4)
    colours = looks(data)
    for ax, name in zip(figure.subplots(1, len(known), squeeze=False)[0], known, strict=True):
        for checkpoint, look in colours.items():
            values = data[name].sel(checkpoint=checkpoint).dropna("step", how="all")
            line = {key: look[key] for key in ("color", "linestyle")}
            ax.plot(values["step"], values.mean("seed"), **line, gid=f"{name} {checkpoint}")
            if values["seed"].size > 1:
                ends = values.min("seed"), values.max("seed")
                ax.fill_between(values["step"], *ends, color=look["color"], alpha=0.2, linewidth=0)
        ax.set(xlabel="training step", ylabel=unit_label(data[name].attrs["long_name"], data[name]))
        ax.grid(axis="y")
    for look in colours.values():
        look.pop("marker")
    legend_below(figure, [Line2D([], [], **look) for look in colours.values()], 2.6)
    return figure


NEEDS = Needs(
    alike(
        lambda subject: subject.configuration is not None and bool(_logs(subject)),
        lambda subject: subject.kind,
    ),
    "no log of training was kept",
)
LEARNING_CURVES = Experiment("learning_curves", (), NEEDS, measure, lambda data: (), draw)
