"""Records of training runs: the configuration of each run, and the final scores of every seed of a
checkpoint.

    DIRECTORY/{training.toml, scores.json, log.jsonl}            the run itself after training, with weights or without
    DIRECTORY/seed-N/{training.toml, scores.json, log.jsonl}     the same run with another seed
    ZOO/TASK/runs.jsonl                                          in the zoo, a line per run of the task: {"name", "seed", "loss", "seconds",
                                                                 "finished", "log", "scores",
                                                                 "training"}: what scores.json and
                                                                 training.toml say, and the loss of
                                                                 the last steps; of new ones the day
                                                                 too, and losses on the way

A score is a mean over the prompts of one test set, in the metric of the task; new records also have
the scores of single prompts (`prompt_scores`). scores.json states the digest of the scored weights,
and is refused for other weights. This module knows nothing about claims, models or figures.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import position_papers.training.prompt_scores as prompt_scores
from position_papers.training.configuration import (
    TrainingConfiguration,
    read_toml,
    replaced,
    to_toml,
)
from position_papers.zoo_directory import REGISTRY, recorded_at
from repo_interp.checkpoint_files.options import (
    Functions,
    functions_of,
    other_functions,
    read_functions,
)
from repo_interp.checkpoint_files.shipped import RUNS
from repo_interp.checkpoint_files.stored import stored_digest
from repo_interp.errors import InputError, Taken
from repo_interp.positions.layouts import named_schemes
from repo_interp.storage.files import write_text
from repo_interp.tasks import Task, make_task

SAME_TEXTS = "scores_on_texts_of_seed_0"
"""Key of a line about another seed of a language model whose weights do not ship: training scores
every seed on other windows of the held-out text, which differ by more than seeds do. {"python":
whose sources are the text, "scores": one per window, by test set}
"""
LOGGED = 20
"""Number of losses of a log in a record."""


def made_with(configuration: TrainingConfiguration, command: str) -> dict[str, str]:
    """Make the table `made_with` of training.toml: the command, versions, the functions of schemes
    that are not in a package, and the digest of the continued checkpoint.
    """
    origin = {"command": command, "python": platform.python_version()}
    origin |= {name: version(name) for name in ("torch", "transformers", "numpy")}
    origin |= configured_task(configuration).sources()
    if functions := functions_of(named_schemes(configuration.scheme)):
        origin["functions"] = json.dumps(functions)
    if configuration.adapter:
        origin["peft"] = version("peft")
    if configuration.continue_from:
        # Imported here, since reading records, as `zoo` does, needs no torch.
        from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
        from repo_interp.models.checkpoints import identify

        origin["continued_from"] = checkpoint_digest(
            identify(configuration.continue_from).directory
        )
    return origin


def trained_configuration(path: str | os.PathLike[str]) -> TrainingConfiguration | None:
    """Read the training configuration of the checkpoint directory `path`; if the zoo has only
    records, that of the first seed.

    None if there is no record.
    """
    record = Path(path) / "training.toml"
    if not record.is_file():
        lines = zoo_runs(path)
        return make_configuration(lines[0]["training"]) if lines else None
    try:
        return make_configuration(read_toml(record))
    except InputError as error:
        raise InputError(f"{record} is not of a training run: {error}") from None


def make_configuration(stated: Mapping[str, Any]) -> TrainingConfiguration:
    """Make the configuration from the fields of a training.toml.

    Raises InputError if they name no task, or do not fit.
    """
    fields = {name: value for name, value in stated.items() if name != "made_with"}
    if "task" not in fields:
        raise InputError("it names no task")
    return replaced(TrainingConfiguration(task=str(fields["task"])), fields)


def require_begun(path: str | os.PathLike[str], configuration: TrainingConfiguration) -> None:
    """Raise Taken unless a run of `configuration`, on any device, was begun in the directory
    `path`.
    """
    begun = trained_configuration(path)
    free = {"device": configuration.device, "deterministic": configuration.deterministic}
    if begun is None or to_toml(replace(begun, **free)) != to_toml(configuration):
        raise Taken(
            f"{path} has another training run than the one to be trained there; give another --out"
        )
    require_functions(path)


def require_functions(path: str | os.PathLike[str]) -> None:
    """Raise Taken if a scheme of the run in `path` has another function now, or none."""
    stated = _stated_functions(Path(path) / "training.toml")
    if lost := ", ".join(name for name in stated if not functions_of([name])):
        raise Taken(
            f"{path} was begun with the scheme {lost} of a function that is not named here; give "
            "its file again, by --scheme FILE.py:FUNCTION"
        )
    if others := other_functions(stated):
        raise Taken(
            f"{path} was begun with another function: {others}; put it back, or give another --out"
        )


def _stated_functions(record: Path) -> Functions:
    """Read the functions of schemes in a training.toml; empty without such a file."""
    if not record.is_file():
        return {}
    try:
        made: Any = tomllib.loads(record.read_text(encoding="utf-8")).get("made_with", {})
        stated = json.loads(made.get("functions", "{}"))
        return read_functions(stated, list(stated), str(record))
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{record} has functions that cannot be read: {error}") from None


def zoo_runs(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of TASK/NAME or TASK/NAME/seed-N in a zoo, by seed; empty for others.

    The directory itself may be missing.
    """
    of_seeds, seed = _of_seeds(Path(directory))
    lines = read_runs(of_seeds.parent / RUNS)
    return [
        line for line in lines if line["name"] == of_seeds.name and seed in (None, line["seed"])
    ]


def _of_seeds(directory: Path) -> tuple[Path, int | None]:
    """Split a directory of a zoo into the checkpoint without seed-N, and N (None without one)."""
    recorded = recorded_at(directory)
    seed = seed_of(recorded)
    return (recorded if seed is None else recorded.parent), seed


def read_runs(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a runs.jsonl; empty without such a file."""
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.is_file()
        else []
    )


def seed_of(directory: Path) -> int | None:
    """Return N of a directory seed-N; None for another name."""
    prefix, _, digits = directory.name.partition("seed-")
    return int(digits) if not prefix and digits.isdecimal() else None


def configured_task(configuration: TrainingConfiguration) -> Task:
    """Make the task of `configuration`.

    Raises InputError for an unknown task or option.
    """
    return make_task(configuration.task, configuration.task_size, **configuration.task_options)


# ---- scores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """Final scores of one training run."""

    seed: int
    metric: str
    prompts: int
    """Number of prompts behind each mean."""
    steps: int
    """Number of training steps."""
    means: Mapping[str, float]
    """Mean score by test set; NaN if its prompts are too long for the model."""
    configuration: TrainingConfiguration
    loss: float = float("nan")
    """Loss of the last steps of training, in nats per target; NaN without a log."""
    same_texts: Mapping[str, Any] | None = None
    """Entry of `SAME_TEXTS`, if there is one."""
    by_prompt: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    """Scores of single prompts by test set; empty if only means are recorded."""
    log: tuple[tuple[int, float], ...] = ()
    """Steps, and the loss since the previous entry in nats, from a line of runs.jsonl."""
    weights: str = ""
    """SHA-256 of the scored weights (`stored_digest`), from scores.json, or from registry.csv in a
    zoo; empty: not recorded.
    """


def recorded_scores(directory: str | os.PathLike[str]) -> list[Recorded]:
    """Return all recorded runs of `directory`: its own, then those of its directories seed-N,
    ascending; empty without records.

    Raises InputError if a directory has a scores.json without training.toml, if one of them cannot
    be read, or if scores.json states the digest of other weights.
    """
    directory = Path(directory)
    children = sorted(
        (file.parent for file in directory.glob("seed-*/scores.json")),
        key=lambda child: seed_of(child) or -1,
    )
    runs = [
        _left_by_training(place)
        for place in (directory, *children)
        if (place / "scores.json").is_file()
    ]
    runs = runs or [_in_zoo(directory, line) for line in zoo_runs(directory)]
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InputError(
            f"{directory} records seed {max(seeds, key=seeds.count)} twice; wanted one run per seed"
        )
    return runs


def on_texts_of_seed_0(run: Recorded, texts: str, count: int) -> Mapping[str, float] | None:
    """Return the mean scores of a run on the first `count` windows of seed 0, by test set; None if
    they are not recorded.

    `texts` is the version of Python whose sources the windows are from.
    """
    if run.same_texts is None or run.same_texts["python"] != texts:
        return None
    scores: Mapping[str, list[float]] = run.same_texts["scores"]
    return (
        None
        if count > min(map(len, scores.values()))
        else {name: float(np.mean(own[:count])) for name, own in scores.items()}
    )


def add_run(zoo: Path, name: str, run: Path, same_texts: Mapping[str, Any] | None = None) -> Path:
    """Record the finished training run in the directory `run` as TASK/NAME in the zoo, and replace
    an earlier record of its seed.

    `same_texts`: see `SAME_TEXTS`. Returns the file of records.
    """
    task, _, own = name.partition("/")
    line = line_of(run, own, same_texts)
    file = zoo / task / RUNS
    lines = {(known["name"], known["seed"]): known for known in read_runs(file)}
    lines[own, line["seed"]] = line
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        file, "".join(json.dumps(lines[key], ensure_ascii=False) + "\n" for key in sorted(lines))
    )
    return file


def line_of(run: Path, name: str, same_texts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the line of runs.jsonl for the finished training run in the directory `run`, by
    `name`.
    """
    stated = tomllib.loads((run / "training.toml").read_text(encoding="utf-8"))
    log = read_runs(run / "log.jsonl")
    last = log[-1]
    file = run / "scores.json"
    scores = json.loads(file.read_text(encoding="utf-8"))
    scores.pop("weights", None)  # shipped weights are rounded, and the registry has their digest
    line = {
        "name": name,
        "seed": stated["seed"],
        "loss": last["loss"],
        "seconds": last["seconds"],
        "finished": datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat(),
        "log": _thinned([(record["step"], record["loss"]) for record in log]),
        "scores": scores,
    }
    return line | ({SAME_TEXTS: same_texts} if same_texts else {}) | {"training": stated}


def _thinned(log: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduce a log to at most `LOGGED` parts, each with its last step and mean loss."""
    parts = np.array_split(np.arange(len(log)), min(LOGGED, len(log)))
    return [
        (log[part[-1]][0], float(f"{np.mean([log[place][1] for place in part]):.4g}"))
        for part in parts
    ]


def _left_by_training(directory: Path) -> Recorded:
    configuration, file = trained_configuration(directory), directory / "scores.json"
    if configuration is None:
        raise InputError(
            f"{directory} has scores.json but no training.toml, which says what was scored; "
            "put it there"
        )
    try:
        run = _recorded(configuration, json.loads(file.read_text(encoding="utf-8")))
        file = directory / "log.jsonl"
        run = replace(run, loss=float(read_runs(file)[-1]["loss"])) if file.exists() else run
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{file} is no record of scores or losses as training leaves it: {error!r}"
        ) from None
    if (
        run.weights
        and (directory / "config.json").is_file()
        and run.weights != stored_digest(directory)
    ):
        raise InputError(
            f"{directory / 'scores.json'} has the scores of other weights than those beside "
            "it; remove it, or put them back"
        )
    return run


def run_of_line(line: Mapping[str, Any]) -> Recorded:
    """Read a run from a line of runs.jsonl; the digest of its weights is in a registry."""
    run = _recorded(make_configuration(line["training"]), line["scores"])
    log = tuple((int(step), float(loss)) for step, loss in line.get("log", ()))
    return replace(run, loss=line["loss"], same_texts=line.get(SAME_TEXTS), log=log)


def _in_zoo(directory: Path, line: Mapping[str, Any]) -> Recorded:
    run = run_of_line(line)
    return replace(run, weights=registered(directory, run.seed))


def registered(directory: Path, seed: int) -> str:
    """Return the SHA-256 of the weights of a checkpoint and seed in the zoo's registry; "" if not
    listed.
    """
    of_seeds, _ = _of_seeds(directory)
    name = f"{of_seeds.parent.name}/{of_seeds.name}" + (f"/seed-{seed}" if seed else "")
    registry = of_seeds.parent.parent / REGISTRY
    rows = registry.read_text(encoding="utf-8").splitlines() if registry.is_file() else ()
    return next((row["sha256"] for row in csv.DictReader(rows) if row["name"] == name), "")


def _recorded(configuration: TrainingConfiguration, scores: Mapping[str, Any]) -> Recorded:
    means = {
        name: float("nan") if value is None else float(value)
        for name, value in scores["test_sets"].items()
    }
    return Recorded(
        configuration.seed,
        str(scores["metric"]),
        int(scores["prompts"]),
        int(scores["steps"]),
        means,
        configuration,
        by_prompt=prompt_scores.read(scores),
        weights=str(scores.get("weights", "")),
    )
