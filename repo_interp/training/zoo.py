"""The checkpoints that come with the package, by name: TASK/SCHEME, such as "niah/repo".

Each is a directory as `repo-interp train` leaves it, without its state: weights, tokenizer, training.toml, log.jsonl, scores.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from repo_interp.models.weights import weight_files
from repo_interp.shipped import zoo_path
from repo_interp.training.configuration import TrainingConfiguration
from repo_interp.training.trained import trained_configuration

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


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


def zoo(name: str, device: str = "cpu", dtype: str = "float32") -> TransformerBridge:
    """A checkpoint that comes with the package, such as "niah/repo", as a TransformerBridge. Raises InputError naming those there are."""
    from repo_interp.models.load import load

    return load(zoo_path(name), device, dtype)
