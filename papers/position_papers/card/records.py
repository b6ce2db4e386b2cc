"""Runs of schemes on a task: trainings of a card, and rivals from records of the package.

A rival is a name in TASK/runs.jsonl whose training differs from the card's only in the scheme, its
options, the seed, and fields that do not change results (`kit.scores.unequal_budgets`). Seeds are
paired if both runs have the same kind of device and the same versions. Language models of different
seeds answer different windows, so only equal seeds are compared, and models on texts of different
Python versions are not compared. This module knows nothing about pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from position_papers.card.columns import Column
from position_papers.card.intervals import NOT_LEARNED, Margin, Prompts, margin
from position_papers.kit.judge.differences import Sample
from position_papers.kit.scores import SHARES, unequal_budgets
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import Recorded, read_runs, run_of_line
from repo_interp.checkpoint_files.shipped import RUNS
from repo_interp.entry_points import SCHEMES as SCHEME_GROUP
from repo_interp.entry_points import names
from repo_interp.positions.layouts import SCHEMES

VERSIONS = ("python", "torch", "transformers", "numpy")
FILLED = "encodings"
"""Directory next to the tasks of the zoo, with records for the table of encodings that are not in
the plan of checkpoints.
"""
PERIODS = ("r2n1", "n2r1")
NINE = (
    *("adarope", "adarope_scaled", "carope", "tapa", "grape", "harope", "wavelet", "stick"),
    "prope",
)
"""Schemes of docs/nine_schemes.py, which are not in a package."""


@dataclass(frozen=True)
class Run:
    """One training run and its provenance."""

    recorded: Recorded
    made_with: Mapping[str, str] = field(default_factory=dict)
    """The command, and versions."""
    date: str = ""
    """Day of scoring; empty if the record does not have it."""
    sha256: str = ""
    """SHA-256 of the line of runs.jsonl; empty for a run without a record."""
    seconds: float = np.nan
    """Logged losses of training."""

    @property
    def machine(self) -> tuple[str, ...]:
        """Kind of device and versions, which must be equal for equal seeds to be comparable."""
        versions = (self.made_with.get(name, "") for name in VERSIONS)
        return self.recorded.configuration.device, *versions

    def score(self, test_sets: Sequence[str]) -> float:
        """Return the mean score over test sets; NaN if one was not answered."""
        return float(np.mean([self.recorded.means.get(name, np.nan) for name in test_sets]))

    def prompts(self, test_sets: Sequence[str]) -> Prompts | None:
        """Return the scores of the prompts of test sets; None if one has only a mean."""
        known = self.recorded.by_prompt
        if any(name not in known for name in test_sets):
            return None
        return np.concatenate([known[name] for name in test_sets])


@dataclass(frozen=True)
class Row:
    """All runs of an encoding on a task."""

    name: str
    column: Column
    runs: tuple[Run, ...]

    @property
    def higher(self) -> bool:
        """Whether a higher score is better."""
        return "perplexity" not in self.runs[0].recorded.metric

    @property
    def learned(self) -> tuple[bool, ...]:
        """Whether each run learned the task; True without such a score."""
        least = self.column.learned
        return tuple(least is None or run.score(self.column.inside) >= least for run in self.runs)

    @property
    def losses(self) -> np.ndarray:
        """Loss of the last steps of each run, in nats."""
        return np.array([run.recorded.loss for run in self.runs])

    def scores(self, test_sets: Sequence[str]) -> np.ndarray:
        """Return the score of each run, a mean over test sets."""
        return np.array([run.score(test_sets) for run in self.runs])

    def by_test_set(self) -> dict[str, float]:
        """Return the mean score over seeds by test set; NaN if a seed has none."""
        names = dict.fromkeys(name for run in self.runs for name in run.recorded.means)
        return {name: float(np.mean(self.scores([name]))) for name in names}

    def sample(self, seeds: Sequence[int] = (), paired: bool = True) -> Sample | None:
        """Return scores on test sets unlike training.

        Args:
            seeds: Seeds to use; empty: all.
            paired: Whether the sample states the numbers of seeds.

        Returns:
            The sample; None if no run answered prompts of these lengths.
        """
        known = {
            run.recorded.seed: run.score(self.column.beyond)
            for run in self.runs
            if not seeds or run.recorded.seed in seeds
        }
        known = {seed: score for seed, score in known.items() if np.isfinite(score)}
        if not known:
            return None
        first = self.runs[0].recorded
        return Sample(
            np.array(list(known.values())),
            np.empty(0),
            first.prompts * len(self.column.beyond),
            first.metric in SHARES,
            tuple(known) if paired else (),
        )


@dataclass(frozen=True)
class Compared:
    """A rival's row, compared with that of the card."""

    row: Row
    margin: Margin | None
    """The card's scheme minus the rival; None without a common test set."""
    verdict: str
    unpaired: str = ""
    """Reason why seeds are not paired; empty if they are."""

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of 95 %; NaN without an interval."""
        return (np.nan, np.nan) if self.margin is None else (self.margin.low, self.margin.high)

    @property
    def p_value(self) -> float:
        """p-value of the difference; 1 without a difference."""
        return 1.0 if self.margin is None else self.margin.p_value


def compared(ours: Row, theirs: Row) -> Compared:
    """Compare the scheme of a card with a rival.

    Args:
        ours: The row of the card.
        theirs: The row of the rival.

    Returns:
        The difference on test sets unlike training, and a verdict, which needs that both schemes
        have learned the task.
    """
    own, others = ({run.recorded.seed: run for run in row.runs} for row in (ours, theirs))
    seeds = tuple(sorted(own.keys() & others.keys()))
    alike = all(own[seed].machine == others[seed].machine for seed in seeds)
    unpaired = "" if alike else "another device or other versions"
    if not ours.higher:  # windows of text depend on the seed
        pythons = {row[seed].made_with.get("python", "") for seed in seeds for row in (own, others)}
        if len(pythons) != 1:  # also if there is no version at all
            return Compared(theirs, None, "other texts", unpaired)
        unpaired = ""
    else:
        seeds = ()
    first, second = (row.sample(seeds, not unpaired) for row in (ours, theirs))
    if first is None or second is None:
        return Compared(theirs, None, "no score unlike training", unpaired)
    found = margin(first, second, None if unpaired else _same_prompts(ours, theirs, seeds))
    learned = all(ours.learned) and all(theirs.learned)
    return Compared(theirs, found, found.verdict(ours.higher) if learned else NOT_LEARNED, unpaired)


def _same_prompts(ours: Row, theirs: Row, seeds: Sequence[int]) -> tuple[Prompts, Prompts] | None:
    """Return scores unlike training on the prompts that both answered; None if the seeds differ, or
    a seed has only means. The prompts of a test set depend on the seed.
    """
    own, others = (
        {
            run.recorded.seed: run.prompts(row.column.beyond)
            for run in row.runs
            if not seeds or run.recorded.seed in seeds
        }
        for row in (ours, theirs)
    )
    first, second = ([scores[seed] for seed in sorted(scores)] for scores in (own, others))
    known = [[part for part in parts if part is not None] for parts in (first, second)]
    if own.keys() != others.keys() or any(len(parts) < len(own) for parts in known):
        return None
    if [len(part) for part in known[0]] != [len(part) for part in known[1]]:
        return None
    return np.concatenate(known[0]), np.concatenate(known[1])


def records_of(zoo: Path, task: str) -> dict[str, list[Run]]:
    """Read the records of a task.

    Args:
        zoo: Directory with TASK/runs.jsonl and `FILLED`/TASK/runs.jsonl.
        task: The task.

    Returns:
        Runs by name, from random weights and continued ones.
    """
    found: dict[str, list[Run]] = {}
    for place in (zoo, zoo / FILLED):
        for line in read_runs(place / task / RUNS):
            found.setdefault(line["name"], []).append(as_run(line))
    return found


def as_run(line: Mapping[str, Any]) -> Run:
    """Read a line of runs.jsonl.

    Args:
        line: The line.

    Returns:
        The run, with the SHA-256 of the line.
    """
    text = json.dumps(line, ensure_ascii=False)
    return Run(
        run_of_line(line),
        line["training"].get("made_with", {}),
        line.get("finished", ""),
        hashlib.sha256(text.encode()).hexdigest(),
        float(line["seconds"]),
    )


def rivals(column: Column, configuration: TrainingConfiguration, zoo: Path) -> dict[str, Row]:
    """Find the records of equal budget.

    Args:
        column: The column.
        configuration: Configuration of the card's scheme on the task.
        zoo: Directory of the records.

    Returns:
        Rows by name.
    """
    rows: dict[str, Row] = {}
    for name, runs in records_of(zoo, column.task).items():
        equal = [
            run
            for run in runs
            if not unequal_budgets({"card": configuration, name: run.recorded.configuration})
        ]
        if equal:
            rows[name] = Row(name, column, tuple(equal))
    return rows


def known_encodings() -> tuple[str, ...]:
    """List all schemes of packages, the periods in RePo's paper, and `NINE`."""
    packaged = [
        name for name in names(SCHEME_GROUP) if name not in SCHEMES and not _registered(name)
    ]
    return (*SCHEMES, *packaged, *PERIODS, *NINE)


def _registered(name: str) -> bool:
    """Return whether the scheme was registered by the running program."""
    from repo_interp.installed_points import installed_points

    return any(p.name == name and p.dist is None for p in installed_points(SCHEME_GROUP))
