"""Carry out the zoo's plan: train what is not finished, side by side, and put what ships where the package looks for it.

    wave 1: runs from random weights        wave 2: those that go on from one of wave 1

Interrupted at any moment, it goes on where it stopped. Knows nothing about terminals.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from repo_interp.training.configuration import TABLES, to_toml
from repo_interp.training.folder import TrainingFolder
from repo_interp.training.plan import PlannedRun
from repo_interp.training.provenance import made_with
from repo_interp.training.recipes import recipe
from repo_interp.training.several import train_side_by_side

RECORDS = ("training.toml", "log.jsonl", "scores.json")
"""What ships of every run."""
CHECKPOINT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What ships where weights do."""
EXTRAS = ("steps.nc",)
"""What ships where somebody made it: measurements over the saved steps, which are too large themselves."""


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those that are not trained to their end. Raises InputError where another thing stands in a run's place."""
    waiting = [run for run in runs if not TrainingFolder(run.directory).is_finished]
    for run in waiting:
        folder = TrainingFolder(run.directory)
        if not folder.is_begun and not any(run.directory.glob("seed-*")):
            folder.require_free()
    return waiting


def make(runs: Sequence[PlannedRun], jobs: int, watch: Callable[[], None]) -> bool:
    """Train every unfinished one of `runs`, `jobs` at a time; `watch` is called twice a second. Returns whether all came to their end."""
    for wave in (False, True):
        waiting = [run for run in unfinished(runs) if bool(run.configuration.continue_from) is wave]
        for run in waiting:
            folder = TrainingFolder(run.directory)
            if not folder.is_begun:
                folder.begin(to_toml(run.configuration, made_with(run.configuration, command(run))))
        if waiting and not train_side_by_side([(run.configuration, run.directory) for run in waiting], jobs, watch):
            return False
    return True


def install(run: PlannedRun, zoo: Path) -> Path:
    """Put what ships of a finished run into the directory `zoo`; whole or not at all. Returns where."""
    target = zoo / run.shipped
    names = RECORDS + (CHECKPOINT + EXTRAS if run.planned.weights and run.seed == 0 else ())
    fresh = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name in names:
        if (run.directory / name).is_file():
            shutil.copyfile(run.directory / name, fresh / name)
    if target.is_dir():
        for seed in target.glob("seed-*"):
            seed.rename(fresh / seed.name)
        shutil.rmtree(target)
    fresh.rename(target)
    return target


def command(run: PlannedRun) -> str:
    """The command that trains one run of the plan alone."""
    configuration = run.configuration
    ground = recipe(configuration.task, continued=bool(configuration.continue_from))
    words = ["repo-interp", "train", configuration.task, "--scheme", configuration.scheme]
    if configuration.continue_from:
        words += ["--continue-from", configuration.continue_from]
    for name, value in sorted(run.planned.fields.items()):
        if name in TABLES:
            flag = "--set" if name == "task_options" else "--scheme-set"
            words += [
                word for key, one in value.items() if ground.get(name, {}).get(key) != one for word in (flag, f"{key}={one}")
            ]
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if run.seed:
        words += ["--seed", str(run.seed)]
    return " ".join([*words, "--out", run.directory.as_posix()])
