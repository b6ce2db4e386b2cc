"""Execute the zoo's plan: train unfinished runs, move weights and records into the zoo, and write
the zoo's page and registry.

    wave 1: runs from random weights        wave n: runs that continue one of wave n - 1
    page:   mean over seeds of the final loss, and of the score on a test set; +- standard deviation over several seeds

Weights are stored in float16, which changes no score of the zoo and takes half the space;
computations use float32 as before. After an interruption at any moment, training continues. This
module knows nothing about terminals.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Template
from safetensors import safe_open
from safetensors.torch import save_file

from position_papers.training.configuration import to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.loop import train_side_by_side
from position_papers.training.plan import ABOUT, Planned, PlannedRun
from position_papers.training.trained import (
    add_run,
    made_with,
    recorded_scores,
    trained_configuration,
)
from position_papers.zoo_directory import DIRECTORY, REGISTRY
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files import shipped
from repo_interp.experiments.test_set_scores import task_scores
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.runtime.processes import from_first
from repo_interp.storage.files import replace_whole, write_text
from repo_interp.tasks import make_task

WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WINDOWS = 64
"""Number of windows of held-out text for scoring language models of several seeds."""


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the unfinished runs.

    Raises InputError if a run's directory has other content.
    """
    waiting = [run for run in runs if not TrainingFolder(run.directory).is_finished]
    for run in waiting:
        folder = TrainingFolder(run.directory)
        if not folder.is_begun and not any(run.directory.glob("seed-*")):
            folder.require_free()
    return waiting


def make(runs: Sequence[PlannedRun], jobs: int, watch: Callable[[], None]) -> bool:
    """Train the unfinished `runs`, `jobs` at a time; `watch` is called twice per second.

    Returns whether all were finished.
    """

    def begun() -> list[PlannedRun]:
        """Return the runs that do not wait for others, the longest first, each with its folder."""
        left = unfinished(runs)
        unmade = {run.directory.as_posix() for run in left}
        waiting = [run for run in left if run.configuration.continue_from not in unmade]
        for run in waiting:
            folder = TrainingFolder(run.directory)
            with folder.claimed():
                if not folder.is_begun:
                    made = made_with(run.configuration, f"repo-interp zoo train {run.planned.name}")
                    folder.begin(to_toml(run.configuration, made))
        return sorted(waiting, key=_work, reverse=True)

    while waiting := from_first(begun):
        if not train_side_by_side(
            [(run.configuration, run.directory) for run in waiting], jobs, watch
        ):
            return False
    return True


def _work(run: PlannedRun) -> float:
    """Return the rough cost of a run: sequences times the square of the width."""
    configuration = run.configuration
    return (
        configuration.steps
        * configuration.batch
        * configuration.accumulation
        * configuration.width**2
    )


def install(run: PlannedRun, zoo: Path) -> Path:
    """Store the record of a finished run in the directory `zoo`, and its weights if the plan says
    so, whole or not at all.

    Returns the directory of its weights, or its record. The two checkpoints in the package
    repo_interp keep the files of their training.
    """
    same_texts = None
    if run.planned.task == "language" and run.seed and run.seed not in run.planned.weights:
        same_texts = {
            "python": platform.python_version(),
            "scores": _scores(run.directory, WINDOWS, seed=0),
        }
    records = add_run(zoo, run.planned.name, run.directory, same_texts)
    if run.seed not in run.planned.weights:
        return records
    at_instrument = (
        zoo.resolve() == DIRECTORY.resolve() and (shipped.DIRECTORY / run.shipped).is_dir()
    )
    target = (shipped.DIRECTORY if at_instrument else zoo) / run.shipped
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(target) as fresh:
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
            shutil.copyfile(
                run.directory / name, (fresh if at_instrument else zoo / run.planned.task) / name
            )
    return target


def _scores(checkpoint: Path, count: int, seed: int) -> dict[str, list[float]]:
    configuration = trained_configuration(checkpoint)
    # it was trained here
    task = None if configuration is None else trained_task(checkpoint, **configuration.task_options)
    assert task is not None, checkpoint
    scores = task_scores(as_decoder(load_model(checkpoint)), task, None, count, seed)["score"]
    return {str(each["test_set"].item()): each.values.round(6).tolist() for each in scores}


def _store_rounded(source: Path, target: Path) -> None:
    """Write the weights of a safetensors file, rounded to the nearest float16."""
    with safe_open(source, "pt") as weights:
        save_file(
            {name: weights.get_tensor(name).half() for name in weights.keys()},  # noqa: SIM118
            target,
            weights.metadata(),
        )


def write_registry(zoo: Path) -> None:
    """List the weights in the directory `zoo`: name, size in bytes, SHA-256 and description."""
    rows = []
    for file in sorted(zoo.glob("**/*model.safetensors")):
        known = trained_configuration(file.parent)
        assert known is not None, file
        kind = (
            f"adapter on {known.continue_from}"
            if known.adapter
            else "continued"
            if known.continue_from
            else ""
        )
        what = ", ".join(
            filter(None, (f"{known.scheme} on {known.task}", f"seed {known.seed}", kind, "float16"))
        )
        content = file.read_bytes()
        rows.append(
            (
                file.parent.relative_to(zoo).as_posix(),
                len(content),
                hashlib.sha256(content).hexdigest(),
                what,
            )
        )
    table = pd.DataFrame(rows, columns=["name", "bytes", "sha256", "what"])
    write_text(zoo / REGISTRY, table.to_csv(index=False, lineterminator="\n"))


def zoo_page(plan: Iterable[Planned], ahead: Sequence[Planned], zoo: Path) -> str:
    """Return the page, in Markdown, on the checkpoints of a plan in the directory `zoo`, and on
    those `ahead`, which are planned and not trained yet.
    """
    tasks: dict[str, list[Planned]] = {}
    for planned in plan:
        tasks.setdefault(planned.task, []).append(planned)
    sections = [
        {"name": task, "about": _about(task), **_table(own, zoo)} for task, own in tasks.items()
    ]
    template = Template(
        (Path(__file__).parent / "zoo.md.jinja").read_text(encoding="utf-8"), trim_blocks=True
    )
    return template.render(tasks=sections, ahead=ahead)


def _about(task: str) -> str:
    return ABOUT.get(task) or (type(make_task(task)).__doc__ or "").strip().partition("\n")[0]


def _table(plan: Sequence[Planned], zoo: Path) -> dict[str, list]:
    """Return names of the test sets and rows of cells; of many lengths, only the longest within
    training and all beyond it are listed.
    """
    recorded = [(planned, recorded_scores(zoo / planned.name)) for planned in plan]
    names = dict.fromkeys(name for _, runs in recorded for run in runs for name in run.means)
    sets = sorted(names, key=lambda name: int(name) if name.isdigit() else 0)
    sets = sets if len(sets) <= 8 else [sets[0], *sets[-11:]]
    rows = []
    for planned, runs in recorded:
        scores = [_cell([run.means.get(name, np.nan) for run in runs]) for name in sets]
        name = planned.name if planned.weights else f"{planned.name} (records)"
        rows.append([name, str(len(runs)), _cell([run.loss for run in runs]), *scores])
    return {"sets": sets, "rows": rows}


def _cell(values: Sequence[float]) -> str:
    known = [value for value in values if np.isfinite(value)]
    spread = f" ± {np.std(known, ddof=1):.3f}" if len(known) > 1 else ""
    return f"{np.mean(known):.3f}{spread}" if known else "–"
