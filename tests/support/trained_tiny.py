"""Tiny checkpoints trained for a few steps by the package's own training, for tests of what reads
trained checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from position_papers.training.configuration import TrainingConfiguration, replaced, to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.loop import train
from position_papers.training.preparation import prepare
from position_papers.training.trained import make_configuration, zoo_runs
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.checkpoint_files.stated import tokens_of

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "steps": 2,
    "batch": 2,
    "warm_up": 1,
    "score_every": 0,
    "score_prompts": 4,
}


LINE = (
    "reversal --scheme repo --layers 2 --width 16 --heads 2 --batch 4 --warm-up 2 --score-prompts 4"
    " --log-every 2 --set words=6 --set first_longest=3 --set longest=4 --set longest_test=5"
)
"""What follows `repo-interp train` for a tiny run."""
COMMAND = tuple(LINE.split())


def trained(directory: Path, task: str, scheme: str, **fields: Any) -> Path:
    """A finished run in `directory`: weights, training.toml, scores.json."""
    configuration = replaced(TrainingConfiguration(task=task), {**TINY, "scheme": scheme, **fields})
    folder = TrainingFolder(directory)
    folder.begin(to_toml(configuration))
    for _ in train(prepare(configuration), folder):
        pass
    return directory


def left_by_training(name: str, directory: Path) -> Path:
    """A checkpoint that ships, in `directory` as its training left it, without its log."""
    place = shutil.copytree(zoo_path(name), directory, ignore=shutil.ignore_patterns("seed-*"))
    for file in tokens_of(zoo_path(name)).glob("tokenizer*"):
        shutil.copy(file, place)
    run = zoo_runs(zoo_path(name))[0]
    (place / "scores.json").write_text(json.dumps(run["scores"]))
    (place / "training.toml").write_text(
        to_toml(make_configuration(run["training"]), run["training"]["made_with"])
    )
    return place


def without_weights(directory: Path) -> Path:
    """The same run as a zoo ships it whose weights are left out."""
    for file in directory.iterdir():
        if file.name not in ("training.toml", "scores.json") and not file.is_dir():
            file.unlink()
    return directory
