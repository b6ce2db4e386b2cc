"""Scores that training runs left on the disk: the runs of a directory, one per seed, and whether several had equal budgets.

    DIRECTORY/{training.toml, scores.json, log.jsonl}            the run itself, with weights or without
    DIRECTORY/seed-N/{training.toml, scores.json, log.jsonl}     the same run with another seed

A score is a mean over the prompts of one test set, in the metric of the task. Knows nothing about claims, models or figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import trained_configuration
from repo_interp.errors import InputError

BUDGET = (
    "task",
    "task_size",
    "task_options",
    "continue_from",
    "layers",
    "width",
    "heads",
    "steps",
    "batch",
    "accumulation",
    "learning_rate",
    "warm_up",
    "curriculum",
)
"""What has to be equal for schemes to be compared; of `continue_from`, whether there is one."""


@dataclass(frozen=True)
class Recorded:
    """What one training run scored at its end."""

    directory: Path
    scheme: str
    """Scheme or layout, as training.toml names it: "rope", "repo@1/3"."""
    seed: int
    metric: str
    prompts: int
    """Prompts behind each mean."""
    steps: int
    """Steps of training."""
    means: Mapping[str, float]
    """Mean score by test set; NaN where its prompts are longer than the model can take."""
    configuration: TrainingConfiguration
    loss: float = float("nan")
    """Of the last steps of training, nats per target; NaN where there is no log."""


def recorded_scores(directory: str | os.PathLike[str]) -> list[Recorded]:
    """Every run recorded in `directory`: its own, then those of its seed-N children, ascending. Empty where nothing is recorded.

    A directory that has a scores.json must have a training.toml; InputError where it has none, or either cannot be read.
    """
    directory = Path(directory)
    children = sorted(directory.glob("seed-*/scores.json"), key=lambda file: _number(file.parent.name))
    files = [directory / "scores.json", *children]
    runs = [_read(file) for file in files if file.is_file()]
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{directory} records seed {max(seeds, key=seeds.count)} twice; wanted one run per seed")
    return runs


def final_losses(runs: Mapping[str, Sequence[Recorded]]) -> str:
    """The loss of the last steps of training of checkpoints by name, means over seeds, as "final loss 0.0123 (rope), 0.5 (hope)"; ""
    where no log is there.
    """
    means = {name: np.mean([run.loss for run in of_seeds]) for name, of_seeds in runs.items() if of_seeds}
    known = [f"{mean:.3g} ({name})" for name, mean in means.items() if np.isfinite(mean)]
    return f"final loss {', '.join(known)}" if known else ""


LOSSES = {
    "checkpoint": "checkpoint",
    "task": "task",
    "scheme": "scheme",
    "steps": "steps x batch",
    "seeds": "seeds",
    "loss": "final loss",
}
"""Columns of `training_rows`, and what stands above them."""


def training_rows(paths: Mapping[str, str]) -> list[dict[str, str]]:
    """How each of the checkpoints at `paths`, by name, was trained, and the loss that it ended with: mean and standard deviation over its
    seeds, in nats per target. Those that say nothing of their training are left out.
    """
    rows = []
    for name, path in paths.items():
        known = trained_configuration(Path(path)) is not None
        runs = [run for run in recorded_scores(path) if np.isfinite(run.loss)] if known else []
        if runs:
            losses, configuration = [run.loss for run in runs], runs[0].configuration
            spread = f" ± {np.std(losses, ddof=1):.2g}" if len(losses) > 1 else ""
            rows.append(
                {
                    "checkpoint": name,
                    "task": configuration.task,
                    "scheme": configuration.scheme + (", continued" if configuration.continue_from else ""),
                    "steps": f"{configuration.steps:,} x {configuration.batch * configuration.accumulation}",
                    "seeds": ", ".join(str(run.seed) for run in runs),
                    "loss": f"{np.mean(losses):.3g}{spread}",
                }
            )
    return rows


def by_seed(runs: Sequence[Recorded], test_sets: Iterable[str]) -> np.ndarray:
    """Mean scores [seed, test_set] of `runs`; NaN where a run lacks that test set."""
    return np.array([[run.means.get(name, np.nan) for name in test_sets] for run in runs], dtype=float).reshape(len(runs), -1)


def unequal_budgets(configurations: Mapping[str, TrainingConfiguration | None]) -> str:
    """What differs in the budgets of checkpoints by name, as "budgets differ: steps 1500 (rope), 500 (repo)"; "" where nothing does.

    None: a checkpoint that does not say how it was trained, which is named.
    """
    known = {name: configuration for name, configuration in configurations.items() if configuration is not None}
    unknown = [name for name in configurations if name not in known]
    parts = []
    for field in BUDGET:
        values: dict[str, list[str]] = {}
        for name, configuration in known.items():
            values.setdefault(_shown(field, configuration), []).append(name)
        if len(values) > 1:
            parts.append(f"{field} " + ", ".join(f"{value} ({', '.join(names)})" for value, names in values.items()))
    texts = [f"budgets differ: {'; '.join(parts)}"] if parts else []
    if unknown and len(configurations) > 1:
        texts.append(f"budget unknown: {', '.join(unknown)}")
    return "; ".join(texts)


def _shown(field: str, configuration: TrainingConfiguration) -> str:
    value = getattr(configuration, field)
    if field == "continue_from":
        return "a checkpoint" if value else "nothing"
    return json.dumps(dict(sorted(value.items()))) if isinstance(value, Mapping) else str(value)


def _number(name: str) -> int:
    digits = name.removeprefix("seed-")
    return int(digits) if digits.isdecimal() else -1


def _read(file: Path) -> Recorded:
    configuration = trained_configuration(file.parent)
    if configuration is None:
        raise InputError(f"{file.parent} has scores.json but no training.toml, which says what was scored; put it there")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        means = {name: float("nan") if value is None else float(value) for name, value in record["test_sets"].items()}
        metric, prompts, steps = str(record["metric"]), int(record["prompts"]), int(record["steps"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no record of scores as training leaves it: {error!r}") from None
    loss = _final_loss(file.with_name("log.jsonl"))
    return Recorded(file.parent, configuration.scheme, configuration.seed, metric, prompts, steps, means, configuration, loss)


def _final_loss(log: Path) -> float:
    try:
        return float(json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["loss"])
    except FileNotFoundError:
        return float("nan")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{log} is no log as training leaves it: {error!r}") from None
