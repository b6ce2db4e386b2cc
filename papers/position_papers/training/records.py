"""What training runs scored at their end: every seed of a checkpoint, in one of two forms.

    DIRECTORY/{training.toml, scores.json, log.jsonl}            the run itself, as training leaves it, with weights or without
    DIRECTORY/seed-N/{training.toml, scores.json, log.jsonl}     the same run with another seed
    ZOO/TASK/runs.jsonl                                          in the zoo, a line per run (`trained`)

A score is a mean over the prompts of one test set, in the metric of the task. Knows nothing about claims, models or figures.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import configured, read_runs, seed_of, trained_configuration, zoo_runs
from repo_interp.errors import InputError
from repo_interp.files import write_text
from repo_interp.shipped import RUNS

SAME_TEXTS = "scores_on_texts_of_seed_0"
"""Key of a line about another seed of a language model whose weights do not ship: training scores every seed on other windows of the
held-out text, which differ by more than seeds do. {"python": whose sources are the text, "scores": one per window, by test set}"""


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
    same_texts: Mapping[str, Any] | None = None
    """What `SAME_TEXTS` records, where it is recorded."""


def recorded_scores(directory: str | os.PathLike[str]) -> list[Recorded]:
    """Every run recorded of `directory`: its own, then those of its seed-N children, ascending. Empty where nothing is recorded.

    A directory that has a scores.json must have a training.toml; InputError where it has none, or either cannot be read.
    """
    directory = Path(directory)
    children = sorted((file.parent for file in directory.glob("seed-*/scores.json")), key=lambda child: seed_of(child) or -1)
    runs = [_left_by_training(place) for place in (directory, *children) if (place / "scores.json").is_file()]
    runs = runs or [_in_zoo(directory, line) for line in zoo_runs(directory)]
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{directory} records seed {max(seeds, key=seeds.count)} twice; wanted one run per seed")
    return runs


def on_texts_of_seed_0(run: Recorded, texts: str, count: int) -> Mapping[str, float] | None:
    """The mean scores of a run on the first `count` windows that seed 0 is scored on, by test set; None where they are not recorded.

    `texts`: the version of Python whose sources the windows are cut from.
    """
    if run.same_texts is None or run.same_texts["python"] != texts:
        return None
    scores: Mapping[str, list[float]] = run.same_texts["scores"]
    return None if count > min(map(len, scores.values())) else {name: float(np.mean(own[:count])) for name, own in scores.items()}


def add_run(zoo: Path, name: str, run: Path, same_texts: Mapping[str, Any] | None = None) -> Path:
    """Record the finished training run in the directory `run` in the zoo as TASK/NAME, in the place of an earlier one of its seed.

    `same_texts`: see `SAME_TEXTS`. Returns the file of records.
    """
    task, _, own = name.partition("/")
    stated = tomllib.loads((run / "training.toml").read_text(encoding="utf-8"))
    last = json.loads((run / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    line = {"name": own, "seed": stated["seed"], "loss": last["loss"], "seconds": last["seconds"], "scores": scores}
    file = zoo / task / RUNS
    lines = {(known["name"], known["seed"]): known for known in read_runs(file)}
    lines[own, stated["seed"]] = line | ({SAME_TEXTS: same_texts} if same_texts else {}) | {"training": stated}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json.dumps(lines[key], ensure_ascii=False) + "\n" for key in sorted(lines)))
    return file


def _left_by_training(directory: Path) -> Recorded:
    file, log = directory / "scores.json", directory / "log.jsonl"
    configuration = trained_configuration(directory)
    if configuration is None:
        raise InputError(f"{directory} has scores.json but no training.toml, which says what was scored; put it there")
    try:
        run = _recorded(directory, configuration, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no record of scores as training leaves it: {error!r}") from None
    try:
        return replace(run, loss=float(json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["loss"]))
    except FileNotFoundError:
        return run
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{log} is no log as training leaves it: {error!r}") from None


def _in_zoo(directory: Path, line: Mapping[str, Any]) -> Recorded:
    return replace(
        _recorded(directory, configured(line["training"]), line["scores"]), loss=line["loss"], same_texts=line.get(SAME_TEXTS)
    )


def _recorded(directory: Path, configuration: TrainingConfiguration, scores: Mapping[str, Any]) -> Recorded:
    means = {name: float("nan") if value is None else float(value) for name, value in scores["test_sets"].items()}
    return Recorded(
        directory,
        configuration.scheme,
        configuration.seed,
        str(scores["metric"]),
        int(scores["prompts"]),
        int(scores["steps"]),
        means,
        configuration,
    )
