"""What is known of a checkpoint that ships, by its name: TASK/SCHEME, such as "niah/repo".

Each is a directory as `repo-interp train` leaves it, without its state: weights, tokenizer, training.toml, log.jsonl, scores.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import trained_configuration
from repo_interp.models.weights import weight_files
from repo_interp.shipped import zoo_path


@dataclass(frozen=True)
class ZooEntry:
    """What is known of a checkpoint without loading it."""

    name: str
    path: Path
    configuration: TrainingConfiguration
    scores: dict
    """scores.json: the metric, and its mean by test set."""
    bytes: int
    """Size of the weights."""
    seeds: dict[int, dict]
    """scores.json of the same run with other seeds, whose weights do not ship."""


def zoo_entry(name: str) -> ZooEntry:
    """What is known of checkpoint `name`. Raises InputError when the package has none of that name."""
    path = zoo_path(name)
    configuration = trained_configuration(path)
    assert configuration is not None, f"{name} has no training.toml"
    return ZooEntry(
        name=name,
        path=path,
        configuration=configuration,
        scores=_read(path / "scores.json"),
        bytes=sum(file.stat().st_size for file in weight_files(path)),
        seeds={int(file.parent.name.removeprefix("seed-")): _read(file) for file in sorted(path.glob("seed-*/scores.json"))},
    )


def _read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))
