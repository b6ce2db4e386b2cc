"""What `repo-interp train` and `zoo train` show: what a run is, how far it is with loss and score, and the scores in the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table

from repo_interp.cli.console import Console, bold
from repo_interp.cli.progress import Step

if TYPE_CHECKING:
    from position_papers.training.folder import TrainingFolder
    from position_papers.training.preparation import Prepared

EVERY = 60.0
"""Seconds between the lines where there is no terminal."""


def announce(console: Console, prepared: Prepared, seeds: Sequence[int], jobs: int) -> None:
    """Say what will be trained with these seeds, `jobs` at a time."""
    from repo_interp.models.reposition import added_parameters

    configuration = prepared.configuration
    several = f"seeds {', '.join(map(str, seeds))}, {jobs} at a time" if len(seeds) > 1 else f"seed {configuration.seed}"
    console.print(
        bold(
            configuration.task,
            f", scheme {configuration.scheme}"
            + (f", continuing {configuration.continue_from}" if configuration.continue_from else "")
            + f": {configuration.steps} steps of {configuration.batch * configuration.accumulation} sequences, {several}",
        ),
        highlight=False,
    )
    parameters = sum(parameter.numel() for parameter in prepared.model.parameters())
    console.print(
        f"{parameters:,} parameters, {added_parameters(prepared.model):,} of them for positions; on {configuration.device}",
        highlight=False,
    )


def show(step: Step, total: int, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Show how far runs are, by name, of `total` steps in all, with the last loss and score in the log of each."""
    texts = []
    for run, log in logs.items():
        if log:
            score = next((f"{record['score']:.3f}" for record in reversed(log) if record["score"] is not None), "-")
            texts.append(f"{run} loss {log[-1]['loss']:.4f}, score {score}".strip())
    done = sum(log[-1]["step"] for log in logs.values() if log)
    step("training" if done < total else "scoring the test sets", done, total, "; ".join(texts))


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
