"""The table of encodings by tasks by seeds: what the records have, and what fills the rest.

    cell      an encoding on a task with a seed, trained by the task's recipe; empty until a record
              of equal budget is there
    taught    encodings that differ from RoPE on test sets unlike training at 5 %, after Holm's
              correction over the encodings of the task, where both have learned and have two seeds

A filled cell is a line of ZOO/encodings/TASK/runs.jsonl; weights stay in the directory of the run.
Knows nothing about pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from position_papers.card.columns import COLUMNS, Column, plain_layout
from position_papers.card.intervals import BETTER, UNDECIDED, WORSE
from position_papers.card.records import (
    FILLED,
    NINE,
    VERSIONS,
    Compared,
    Row,
    Run,
    compared,
    known_encodings,
    rivals,
)
from position_papers.card.trials import STARTS, Training, Trials
from position_papers.kit.judge.differences import holm
from position_papers.training.trained import add_run
from position_papers.zoo_directory import DIRECTORY
from repo_interp.positions.layouts import CONTEXTUAL

SEEDS = (0, 1, 2)
OPTIONS = {scheme: {"p_max": 64} for scheme in CONTEXTUAL}
"""Options of schemes as the zoo has them on every task."""
FIRST = ("reversal", "flip_flop", "selective_copy")
WANTED = (
    *("rope", "nope", "alibi", "cope", "repo", "hope", "fire", "kerple", "learned"),
    *("selective_rope", "forgetting", "path", "pope", "repo_alibi"),
    *NINE,
)
"""Encodings whose cells are filled first."""
BASE = "rope"
LEVEL = 0.05


@dataclass(frozen=True)
class Cell:
    """An encoding on a task with a seed."""

    encoding: str
    column: Column
    seed: int
    run: Run | None


def rows_of(zoo: Path = DIRECTORY) -> dict[str, dict[str, Row]]:
    """Read every encoding that has records at the recipe.

    Args:
        zoo: Directory of the records.

    Returns:
        Rows by task, then by encoding.
    """
    known, found = known_encodings(), {}
    for task, column in COLUMNS.items():
        more = {"continue_from": column.start} if column.start else {}
        all_names = rivals(column, column.configuration(BASE, 0, **more), zoo)
        found[task] = {name: all_names[name] for name in known if name in all_names}
    return found


def cells(zoo: Path = DIRECTORY) -> list[Cell]:
    """List every cell of the table.

    Args:
        zoo: Directory of the records.

    Returns:
        Cells by encoding, task and seed, with the run where there is one.
    """
    rows = rows_of(zoo)
    found = []
    for encoding in known_encodings():
        for task, column in COLUMNS.items():
            row = rows[task].get(encoding)
            by_seed = {} if row is None else {run.recorded.seed: run for run in row.runs}
            seeds = [column.seed(number) for number in SEEDS]
            more = sorted(set(by_seed) - set(seeds))  # beyond the three that are asked for
            found += [Cell(encoding, column, seed, by_seed.get(seed)) for seed in (*seeds, *more)]
    return found


def as_table(found: Sequence[Cell]) -> pd.DataFrame:
    """The table of cells, a line each.

    Args:
        found: Cells.

    Returns:
        Scores, loss, command, day, versions and SHA-256 of the record; empty where there is none.
    """
    return pd.DataFrame([_line(cell) for cell in found])


def _line(cell: Cell) -> dict[str, Any]:
    line: dict[str, Any] = {
        "encoding": cell.encoding,
        "task": cell.column.task,
        "seed": cell.seed,
    }
    if (run := cell.run) is None:
        return line
    row = Row(cell.encoding, cell.column, (run,))
    return line | {
        "learned": "" if cell.column.learned is None else "yes" if row.learned[0] else "no",
        "loss": run.recorded.loss,
        "training_length": run.score(cell.column.inside),
        "beyond": run.score(cell.column.beyond),
        "metric": run.recorded.metric,
        "layout": run.recorded.configuration.scheme,
        "device": run.recorded.configuration.device,
        **{name: run.made_with.get(name, "") for name in VERSIONS},
        "date": run.date,
        "command": run.made_with.get("command", ""),
        "sha256": run.sha256,
    }


def in_order(found: Sequence[Cell]) -> list[Cell]:
    """Put empty cells into the order in which they are filled.

    Args:
        found: Cells.

    Returns:
        The empty ones: the three tasks of a quick card before others, and language last; of these
        tasks, encodings that are asked for most before others; of these, first seeds before second
        and third ones.
    """

    def place(cell: Cell) -> tuple[Any, ...]:
        column = cell.column
        seeds = [column.seed(number) for number in SEEDS]
        wanted = WANTED.index(cell.encoding) if cell.encoding in WANTED else len(WANTED)
        return (
            column.task == "language",
            column.task not in FIRST,
            wanted == len(WANTED),
            seeds.index(cell.seed),
            wanted,
        )

    return sorted((cell for cell in found if cell.run is None), key=place)


def trainings(cell: Cell, out: Path, device: str = "cpu") -> list[Training]:
    """Plan what fills a cell.

    Args:
        cell: An empty cell.
        out: Directory of the runs: each encoding has its own in it, and all share what they go on
            from.
        device: Where they are trained.

    Returns:
        The training of the cell, behind the one that it goes on from.
    """
    layout = plain_layout(cell.column.task, cell.encoding)
    options = OPTIONS.get(cell.encoding, {})
    number = [cell.column.seed(each) for each in SEEDS].index(cell.seed)
    trials = Trials(out / cell.encoding, layout, device, options, out / STARTS)
    return trials.trainings([cell.column], [number])


def record(cell: Cell, training: Training, zoo: Path = DIRECTORY) -> Path:
    """Record a finished training as a cell of the table.

    Args:
        cell: The cell.
        training: Its training.
        zoo: Directory of the records.

    Returns:
        The file of records.
    """
    return add_run(zoo / FILLED, f"{cell.column.task}/{cell.encoding}", training.directory)


@dataclass(frozen=True)
class Taught:
    """What a task teaches of encodings beside RoPE."""

    task: str
    decided: Mapping[str, Compared]
    """By encoding, where the difference is decided."""
    tested: Mapping[str, Compared]
    """Where both have learned the task, with two seeds or more, and there is an interval."""


def taught(rows: Mapping[str, Mapping[str, Row]]) -> Iterator[Taught]:
    """Compare every encoding with RoPE, on test sets unlike training.

    Args:
        rows: As `rows_of` gives them.

    Yields:
        What each task that RoPE has records of says.
    """
    for task, own in rows.items():
        if BASE not in own:
            continue
        found = {name: compared(row, own[BASE]) for name, row in own.items() if name != BASE}
        tested = {
            name: one
            for name, one in found.items()
            if one.verdict in (BETTER, WORSE, UNDECIDED)
            and np.isfinite(one.limits[0])
            # What one seed scores says too little of the next one where RoPE's do not spread
            and min(len(own[name].runs), len(own[BASE].runs)) > 1
        }
        adjusted = holm(np.array([one.p_value for one in tested.values()]))
        decided = {
            name: one
            for (name, one), p in zip(tested.items(), adjusted, strict=True)
            if p < LEVEL and one.verdict != UNDECIDED
        }
        yield Taught(task, decided, tested)
