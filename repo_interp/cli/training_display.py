"""What `repo-interp train` and `zoo train` show: what a run is and will cost, bars with loss and score, and the scores in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from repo_interp.cli.console import Console, plain

if TYPE_CHECKING:
    from repo_interp.training.folder import TrainingFolder
    from repo_interp.training.preparation import Prepared


def announce(console: Console, prepared: Prepared, seeds: Sequence[int], jobs: int) -> None:
    """Say what will be trained with these seeds, `jobs` at a time, and what it costs."""
    from repo_interp.training.preparation import estimate_cost
    from repo_interp.values import duration

    configuration = prepared.configuration
    several = f"seeds {', '.join(map(str, seeds))}, {jobs} at a time" if len(seeds) > 1 else f"seed {configuration.seed}"
    console.print(
        f"[bold]{configuration.task}[/bold], scheme {configuration.scheme}"
        + (f", going on from {plain(configuration.continue_from)}" if configuration.continue_from else "")
        + f": {configuration.steps} steps of {configuration.batch * configuration.accumulation} sequences, {several}",
        highlight=False,
    )
    with console.status("rehearsing some steps"):
        cost = estimate_cost(prepared)
    seconds = cost.steps * cost.seconds_per_step * -(-len(seeds) // jobs)
    console.print(
        f"{cost.parameters:,} parameters, {cost.position_parameters:,} of them for positions; "
        f"{1000 * cost.seconds_per_step:.0f} ms per step on {configuration.device}: about {duration(seconds)} in all",
        highlight=False,
    )


def step_bars(console: Console, *columns: TextColumn) -> Progress:
    """Bars over the steps of runs; `columns` stand behind the number of steps."""
    first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*first, *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def training_bars(console: Console) -> Progress:
    """Bars over the steps of runs, with loss and score."""
    return step_bars(console, TextColumn("loss {task.fields[loss]}  score {task.fields[score]}"))


def advance(progress: Progress, bar: TaskID, record: dict[str, Any]) -> None:
    """Put a record of the log onto its bar."""
    shown: dict[str, Any] = {"loss": f"{record['loss']:.4f}"}
    if record["score"] is not None:
        shown["score"] = f"{record['score']:.3f}"
    progress.update(bar, completed=record["step"], **shown)


def print_scores(console: Console, folders: Sequence[TrainingFolder]) -> None:
    """Print the scores of finished runs: a column per run, a row per test set; neighbouring test sets with equal scores share a row."""
    scores = [json.loads(folder.scores.read_text(encoding="utf-8")) for folder in folders]
    table = Table("test sets", *(folder.directory.name for folder in folders))
    table.title = f"{scores[0]['metric']}, {scores[0]['prompts']} prompts each"
    shown = [(name, tuple(_shown(score["test_sets"][name]) for score in scores)) for name in scores[0]["test_sets"]]
    for cells, group in groupby(shown, key=lambda row: row[1]):
        names = [name for name, _ in group]
        table.add_row(names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}", *cells)
    console.print(table)
    for folder in folders:
        console.print(
            f"[bold]{plain(folder.directory)}[/bold]  the checkpoint, with training.toml, log.jsonl and scores.json",
            highlight=False,
        )


def _shown(score: float | None) -> str:
    return "beyond the learned table" if score is None else f"{score:.3f}"
