"""What is known of a checkpoint that ships, by its name: TASK/SCHEME, such as "niah/repo", or TASK/SCHEME/seed-N."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import configured, zoo_runs
from repo_interp.checkpoint_files.stored import weight_files
from repo_interp.shipped import zoo_path


@dataclass(frozen=True)
class ZooEntry:
    """What is known of a checkpoint without loading it."""

    name: str
    path: Path
    configuration: TrainingConfiguration
    scores: dict
    """The metric, and its mean by test set."""
    bytes: int
    """Size of the weights."""
    seeds: dict[int, dict]
    """The scores of the same run with other seeds, with weights or without."""


def zoo_entry(name: str) -> ZooEntry:
    """What is known of checkpoint `name`. Raises InputError when the package has none of that name."""
    path = zoo_path(name)
    runs = {line["seed"]: line for line in zoo_runs(path)}
    own = runs[min(runs)]
    return ZooEntry(
        name=name,
        path=path,
        configuration=configured(own["training"]),
        scores=own["scores"],
        bytes=sum(file.stat().st_size for file in weight_files(path)),
        seeds={seed: line["scores"] for seed, line in runs.items() if seed != own["seed"]},
    )
