"""The table of encodings by tasks by seeds: recorded cells, and the trainings for empty cells.

    cell      an encoding on a task with a seed, trained by the task's recipe; empty without a record
              of equal budget
    taught    encodings that differ from RoPE on test sets unlike training at 5 %, after Holm's
              correction over the encodings of the task, if both have learned and have two seeds

A filled cell is a line of ZOO/encodings/TASK/runs.jsonl; weights stay in the directory of the run.
This module knows nothing about pages.
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
"""Options of schemes in the zoo, equal for all tasks."""
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
    """Read every encoding with records of the recipe.

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
        Cells by encoding, task and seed, with the run if there is one.
    """
    rows = rows_of(zoo)
    found = []
    for encoding in known_encodings():
        for task, column in COLUMNS.items():
            row = rows[task].get(encoding)
            by_seed = {} if row is None else {run.recorded.seed: run for run in row.runs}
            seeds = [column.seed(number) for number in SEEDS]
            more = sorted(set(by_seed) - set(seeds))  # beyond the three requested seeds
            found += [Cell(encoding, column, seed, by_seed.get(seed)) for seed in (*seeds, *more)]
    return found


def as_table(found: Sequence[Cell]) -> pd.DataFrame:
    """Return the table of cells, one line each.

    Args:
        found: Cells.

    Returns:
        Scores, loss, command, day, versions and SHA-256 of the record; empty without a record.
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
    """Sort empty cells by priority.

    Args:
        found: Cells.

    Returns:
        The empty cells: first the three tasks of a quick card, then others, and language last;
        within these the most requested encodings first; within these first seeds before second and
        third.
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
    """Plan the trainings for a cell.

    Args:
        cell: An empty cell.
        out: Directory of the runs, with a folder per encoding and shared starts.
        device: Device of the training.

    Returns:
        The training of the cell, after the training of its start, if it has one.
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
        training: Training of the cell.
        zoo: Directory of the records.

    Returns:
        The file of records.
    """
    return add_run(zoo / FILLED, f"{cell.column.task}/{cell.encoding}", training.directory)


@dataclass(frozen=True)
class Taught:
    """Result of a task on encodings compared with RoPE."""

    task: str
    decided: Mapping[str, Compared]
    """Decided differences by encoding."""
    tested: Mapping[str, Compared]
    """Encodings with a test: both have learned the task, with at least two seeds and an interval.
    """


def taught(rows: Mapping[str, Mapping[str, Row]]) -> Iterator[Taught]:
    """Compare every encoding with RoPE, on test sets unlike training.

    Args:
        rows: Rows from `rows_of`.

    Yields:
        The result of each task with records of RoPE.
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
            # One seed says too little about others, even if RoPE's seeds hardly vary.
            and min(len(own[name].runs), len(own[BASE].runs)) > 1
        }
        adjusted = holm(np.array([one.p_value for one in tested.values()]))
        decided = {
            name: one
            for (name, one), p in zip(tested.items(), adjusted, strict=True)
            if p < LEVEL and one.verdict != UNDECIDED
        }
        yield Taught(task, decided, tested)
