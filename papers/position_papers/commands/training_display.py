"""What `repo-interp train` and `zoo train` show: what a run is and will cost, bars with loss and score, and the scores in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from repo_interp.cli.console import Console, bold
from repo_interp.cli.progress import steps

if TYPE_CHECKING:
    from position_papers.training.folder import TrainingFolder
    from position_papers.training.preparation import Prepared


EVERY = 60.0
"""Seconds between the lines where there is no terminal."""
WORTH_SAYING = 0.1
"""Share of the whole from which on the time of the scores is announced by itself."""


def announce(console: Console, prepared: Prepared, seeds: Sequence[int], jobs: int) -> None:
    """Say what will be trained with these seeds, `jobs` at a time, and what it costs."""
    from position_papers.training.preparation import estimate_cost
    from repo_interp.values import duration

    configuration = prepared.configuration
    several = f"seeds {', '.join(map(str, seeds))}, {jobs} at a time" if len(seeds) > 1 else f"seed {configuration.seed}"
    console.print(
        bold(
            configuration.task,
            f", scheme {configuration.scheme}"
            + (f", going on from {configuration.continue_from}" if configuration.continue_from else "")
            + f": {configuration.steps} steps of {configuration.batch * configuration.accumulation} sequences, {several}",
        ),
        highlight=False,
    )
    with console.status("rehearsing some steps"):
        cost = estimate_cost(prepared)
    waves = -(-len(seeds) // jobs)
    scoring = f", {duration(cost.scoring_seconds * waves)} of it for the scores at the end"
    console.print(
        f"{cost.parameters:,} parameters, {cost.position_parameters:,} of them for positions; "
        f"{1000 * cost.seconds_per_step:.0f} ms per step on {configuration.device}: about {duration(cost.seconds * waves)} in all"
        + (scoring if cost.scoring_seconds > WORTH_SAYING * cost.seconds else ""),
        highlight=False,
    )


class TrainingDisplay:
    """What is known of every run: its steps with loss and score, then how many prompts of the test sets have been scored."""

    def __init__(self, put: Callable[[str, int, int, str], None], steps: int) -> None:
        """`put` shows, of a run by name, how much is done, of how much, and a text; `steps`: those of each run."""
        self._put, self._steps = put, steps
        self._scores: dict[str, str] = {}

    def record(self, run: str, record: Mapping[str, Any]) -> None:
        """Show a record of the log."""
        if record["score"] is not None:
            self._scores[run] = f"{record['score']:.3f}"
        score = self._scores.get(run, "-")
        self._put(run, record["step"], self._steps, f"steps, loss {record['loss']:.4f}, score {score}")

    def scoring(self, run: str, done: int, total: int) -> None:
        """Show how far the scores at the end are."""
        self._put(run, done, total, "prompts of the test sets scored")

    def ended_steps(self, run: str) -> None:
        """Show that a run of another process is being scored, where nobody tells how far."""
        self._put(run, self._steps, self._steps, "steps; scoring the test sets")


@contextmanager
def training_bars(console: Console, runs: Sequence[str], steps_of_each: int, every: float = EVERY) -> Iterator[TrainingDisplay]:
    """A bar per run; where there is no terminal, a line about all runs on standard error now and then."""
    if console.is_terminal:
        name, text = (TextColumn(shown, markup=False) for shown in ("{task.description}", "{task.fields[text]}"))
        first = (name, BarColumn(), MofNCompleteColumn(), text)
        with Progress(*first, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
            bars = {run: progress.add_task(run, total=steps_of_each, text="steps") for run in runs}

            def bar(run: str, done: int, total: int, text: str) -> None:
                progress.update(bars[run], completed=done, total=total, text=text)

            yield TrainingDisplay(bar, steps_of_each)
        return
    lines: dict[str, str] = {}
    with steps(console, every) as step:

        def line(run: str, done: int, total: int, text: str) -> None:
            lines[run] = " ".join(filter(None, (run, f"{done:,}/{total:,}", text)))
            step("; ".join(lines.values()))

        yield TrainingDisplay(line, steps_of_each)


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
            bold(folder.directory, "  the checkpoint, with training.toml, log.jsonl and scores.json"),
            highlight=False,
        )


def _shown(score: float | None) -> str:
    return "beyond the learned table" if score is None else f"{score:.3f}"
