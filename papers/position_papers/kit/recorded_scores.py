"""What a page says of training runs: how they were trained, what their losses were, and whether several had equal budgets.

Knows nothing about claims, models or figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import recorded_scores, trained_configuration

BUDGET = (
    *("task", "task_size", "task_options", "continue_from", "layers", "width", "heads"),
    *("steps", "batch", "accumulation", "learning_rate", "warm_up", "curriculum"),
)
"""What has to be equal for schemes to be compared; of `continue_from`, whether there is one."""


def training_rows(paths: Mapping[str, str]) -> list[dict[str, str]]:
    """How each of the checkpoints at `paths`, by name, was trained, and the loss that it ended with: mean and standard deviation over its
    seeds, in nats per target; by heading. Those that say nothing of their training are left out.
    """
    rows = []
    for name, path in paths.items():
        known = trained_configuration(path) is not None
        runs = [run for run in recorded_scores(path) if np.isfinite(run.loss)] if known else []
        if runs:
            losses, configuration = [run.loss for run in runs], runs[0].configuration
            spread = f" ± {np.std(losses, ddof=1):.2g}" if len(losses) > 1 else ""
            row = {"checkpoint": name, "task": configuration.task}
            row["scheme"] = configuration.scheme + (", continued" if configuration.continue_from else "")
            row["steps x batch"] = f"{configuration.steps:,} x {configuration.batch * configuration.accumulation}"
            row["seeds"] = ", ".join(str(run.seed) for run in runs)
            rows.append({**row, "final loss": f"{np.mean(losses):.3g}{spread}"})
    return rows


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
