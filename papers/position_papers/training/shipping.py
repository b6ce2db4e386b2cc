"""Carry out the zoo's plan: train what is not finished, put what ships into the zoo, and write the zoo's page and registry.

    wave 1: runs from random weights        wave 2: those that go on from one of wave 1
    page:   mean over seeds of the final loss, and of the score on a test set; +- standard deviation over seeds where there are several

Weights are stored in float16, which changes no score of the zoo and takes half the space; they are computed with in float32 as before.
Interrupted at any moment, training goes on where it stopped. Knows nothing about terminals.
"""

from __future__ import annotations

import csv
import hashlib
import io
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from position_papers.training.configuration import to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.plan import ABOUT, Planned, PlannedRun
from position_papers.training.processes import train_side_by_side
from position_papers.training.records import add_run, recorded_scores
from position_papers.training.trained import made_with, trained_configuration
from position_papers.zoo_directory import DIRECTORY
from repo_interp import shipped
from repo_interp.analysis.trained_task import trained_task
from repo_interp.experiments.task_scores import task_scores
from repo_interp.files import replaced, write_text
from repo_interp.models.checkpoints import load_model
from repo_interp.processes import from_first
from repo_interp.tasks import make_task

WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REGISTRY = "registry.csv"
WINDOWS = 64
"""Of held-out text that language models of several seeds are scored on together."""


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those that are not trained to their end. Raises InputError where another thing stands in a run's place."""
    waiting = [run for run in runs if not TrainingFolder(run.directory).is_finished]
    for run in waiting:
        folder = TrainingFolder(run.directory)
        if not folder.is_begun and not any(run.directory.glob("seed-*")):
            folder.require_free()
    return waiting


def make(runs: Sequence[PlannedRun], jobs: int, watch: Callable[[], None]) -> bool:
    """Train every unfinished one of `runs`, `jobs` at a time; `watch` is called twice per second. Returns whether all came to their end."""

    def begun(wave: bool) -> list[PlannedRun]:
        """The runs of a wave that wait, the longest first, each with its folder."""
        waiting = [run for run in unfinished(runs) if bool(run.configuration.continue_from) is wave]
        for run in waiting:
            folder = TrainingFolder(run.directory)
            with folder.claimed():
                if not folder.is_begun:
                    folder.begin(
                        to_toml(run.configuration, made_with(run.configuration, f"repo-interp zoo train {run.planned.name}"))
                    )
        return sorted(waiting, key=_work, reverse=True)

    for wave in (False, True):
        waiting = from_first(lambda wave=wave: begun(wave))
        if waiting and not train_side_by_side([(run.configuration, run.directory) for run in waiting], jobs, watch):
            return False
    return True


def _work(run: PlannedRun) -> float:
    """What a run costs, roughly: sequences times the square of the width."""
    configuration = run.configuration
    return configuration.steps * configuration.batch * configuration.accumulation * configuration.width**2


def install(run: PlannedRun, zoo: Path) -> Path:
    """Put the record of a finished run into the directory `zoo`, and its weights where the plan says that they ship, whole or not at all.

    Returns where its weights are, or its record. The two checkpoints of the instrument keep the files that training wrote.
    """
    same_texts = None
    if run.planned.task == "language" and run.seed and run.seed not in run.planned.weights:
        same_texts = {"python": platform.python_version(), "scores": _scores(run.directory, WINDOWS, seed=0)}
    records = add_run(zoo, run.planned.name, run.directory, same_texts)
    if run.seed not in run.planned.weights:
        return records
    at_instrument = zoo.resolve() == DIRECTORY.resolve() and (shipped.DIRECTORY / run.shipped).is_dir()
    target = (shipped.DIRECTORY if at_instrument else zoo) / run.shipped
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced(target) as fresh:
        fresh.mkdir()
        as_trained = (WEIGHTS, "generation_config.json", "training.toml") if at_instrument else ()
        for name in ("config.json", "steps.nc", *as_trained):
            if (run.directory / name).is_file():
                shutil.copyfile(run.directory / name, fresh / name)
        for seed in target.glob("seed-*"):
            shutil.copytree(seed, fresh / seed.name)
        if not at_instrument:
            _store_rounded(run.directory / WEIGHTS, fresh / WEIGHTS)
        for name in TOKENIZER:
            shutil.copyfile(run.directory / name, (fresh if at_instrument else zoo / run.planned.task) / name)
    return target


def _scores(checkpoint: Path, count: int, seed: int) -> dict[str, list[float]]:
    task = trained_task(checkpoint)
    assert task is not None, checkpoint
    scores = task_scores(load_model(checkpoint), task, None, count, seed)["score"]
    return {str(name): scores.sel(test_set=name).values.round(6).tolist() for name in scores["test_set"].values}


def _store_rounded(source: Path, target: Path) -> None:
    """The weights of a safetensors file, each rounded to the nearest float16."""
    with safe_open(source, "pt") as weights:
        save_file({name: weights.get_tensor(name).to(torch.float16) for name in weights.keys()}, target, weights.metadata())  # noqa: SIM118


def write_registry(zoo: Path) -> None:
    """List the weights in the directory `zoo`: name, size in bytes, SHA-256, what they are."""
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(("name", "bytes", "sha256", "what"))
    for file in sorted(zoo.glob("**/*model.safetensors")):
        configuration = trained_configuration(file.parent)
        assert configuration is not None, file
        kind = (
            f"adapter on {configuration.continue_from}"
            if configuration.adapter
            else "continued"
            if configuration.continue_from
            else ""
        )
        what = ", ".join(
            filter(None, (f"{configuration.scheme} on {configuration.task}", f"seed {configuration.seed}", kind, "float16"))
        )
        content = file.read_bytes()
        table.writerow((file.parent.relative_to(zoo).as_posix(), len(content), hashlib.sha256(content).hexdigest(), what))
    write_text(zoo / REGISTRY, lines.getvalue())


_HEAD = """# The checkpoints that come with the laboratory

`ri.zoo("niah/rope")` loads a checkpoint, `repo-interp zoo` lists all, `make zoo` trains all again and writes this page.

| place | contents |
|---|---|
| TASK/NAME | weights of seed 0 in float16, and their configuration |
| TASK/NAME/seed-N | the same of another seed, if its weights ship: `ri.load("reversal/repo/seed-1")` |
| TASK/runs.jsonl | a line for each training run: its configuration, command, versions, final loss and scores |
| TASK/tokenizer.json | the tokenizer of all checkpoints of the task |
| registry.csv | size, SHA-256 and a description of all weights |

niah/repo and reversal/repo come with the instrument. Checkpoints marked "records" ship without weights. The
[adapters](smollm2-135m/README.md) have a page of their own.

The same configuration on the same machine gives the same weights, before they are rounded to float16. `repo-interp zoo train TASK/NAME`
trains every seed of a checkpoint, and the checkpoint that it continues, as [plan.toml](../position_papers/training/plan.toml) states them.

Loss is the mean over the last steps of training, in nats per target. Loss and scores are means over seeds, ± their standard deviation. A
seed decides the initial weights, the order of the training data, and the prompts that are scored; ± includes all three. It is not the
error of a comparison of two checkpoints, because equal seeds have equal prompts. The prompts of `language` are windows of held-out text.
Windows differ in difficulty, which makes up much of its ±.
"""


def zoo_page(plan: Iterable[Planned], ahead: Sequence[Planned], zoo: Path) -> str:
    """The page, in Markdown, of what a plan has in the directory `zoo`, and of what is `ahead`: planned and not trained yet."""
    plan = list(plan)
    parts = [_HEAD]
    for task in dict.fromkeys(planned.task for planned in plan):
        of_task = [planned for planned in plan if planned.task == task]
        words = ABOUT.get(task) or (type(make_task(task)).__doc__ or "").strip().partition("\n")[0]
        parts += [f"## {task}\n", words + "\n", _table(of_task, zoo) + "\n"]
    if ahead:
        names = "\n".join(f"- {planned.name}" for planned in ahead)
        parts += ["## Planned, not trained yet\n", f"In the order of what they decide:\n\n{names}\n"]
    return "\n".join(parts)


def _table(plan: Sequence[Planned], zoo: Path) -> str:
    recorded = [(planned, recorded_scores(zoo / planned.name)) for planned in plan]
    names = dict.fromkeys(name for _, runs in recorded for run in runs for name in run.means)
    sets = _thinned(sorted(names, key=lambda name: int(name) if name.isdigit() else 0))
    lines = [f"| name | seeds | loss | {' | '.join(sets)} |", "|" + "---|" * (3 + len(sets))]
    for planned, runs in recorded:
        name = planned.name if planned.weights else f"{planned.name} (records)"
        cells = [_cell([run.loss for run in runs]), *(_cell([run.means.get(name, np.nan) for run in runs]) for name in sets)]
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _thinned(sets: list[str]) -> list[str]:
    """All test sets where they are few; of many lengths, those where something changes: the last of training's and all beyond."""
    return sets if len(sets) <= 8 else [sets[0], *sets[-11:]]


def _cell(values: Sequence[float]) -> str:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "–"
    mean = f"{np.mean(known):.3f}"
    return mean if len(known) == 1 else f"{mean} ± {np.std(known, ddof=1):.3f}"
