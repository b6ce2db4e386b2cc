"""`repo-interp zoo`: list the checkpoints that come with the package; `repo-interp zoo train`:
train all of them again, following the plan.
"""

from __future__ import annotations

import argparse
import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from position_papers.training.plan import AHEAD, PLAN, RUNS, PlannedRun, chosen, planned_runs
from repo_interp.checkpoint_files.shipped import shipped_names, zoo_path, zoo_seeds
from repo_interp.cli.arguments import count, require_device_kind
from repo_interp.errors import InputError
from repo_interp.runtime import processes
from repo_interp.storage.files import require_directory, require_writable, write_text
from repo_interp.values import duration

if TYPE_CHECKING:
    from rich.table import Table

    from repo_interp.runtime.console import Console

SHARED = True
SUMMARY = (
    "List the checkpoints that come with the packages, show the progress of training "
    "them again, or train them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    actions = "list the checkpoints, show the progress of training, or train (default: list)"
    parser.add_argument(
        "action", nargs="?", choices=("list", "plan", "train"), default="list", help=actions
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a task or TASK/NAME; may be repeated (default: all that ship)",
    )
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="train: runs at a time (default: 1)"
    )
    device = (
        "train: device of the training: cpu, cuda, or auto: cuda if available "
        "(default: as in the plan, cpu)"
    )
    parser.add_argument("--device", metavar="NAME", help=device)
    deterministic = "train: compute sums in the same order every time (default: on a processor)"
    parser.add_argument(
        "--deterministic", action=argparse.BooleanOptionalAction, help=deterministic
    )
    into = "train: copy finished checkpoints that ship to DIR (default: they stay in runs/zoo)"
    parser.add_argument("--into", metavar="DIR", help=into)


def run(arguments: argparse.Namespace) -> int:
    """Print the checkpoints or the plan, or train. Returns the exit code."""
    from repo_interp.runtime.console import Console

    console = Console()
    if arguments.action != "list":
        chosen((*PLAN, *AHEAD), arguments.names)  # check the names before torch is imported
    if arguments.action == "train":
        return _train(console, arguments)
    (_plan if arguments.action == "plan" else _list)(console, arguments.names)
    return 0


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """An empty table without lines: columns aligned to the left for the words in `left` and for
    names of test sets ("of"), and to the right for the other numbers in `right`.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    for column in (*left, *right):
        table.add_column(
            column,
            justify="left" if column in (*left, "of") else "right",
            no_wrap=True,
            # a long layout must not shorten the names
            max_width=10 if column == "layout" else None,
        )
    return table


def _plan(console: Console, names: list[str]) -> None:
    """Print for each checkpoint of the plan the finished runs and steps, the time they took, and
    the time left at the same pace.
    """
    from position_papers.training.folder import TrainingFolder

    table = _table(("name",), ("runs", "steps", "took", "left"))
    runs = planned_runs(chosen((*PLAN, *AHEAD), names))
    for name, group in groupby(runs, key=lambda run: run.planned.name):
        folders = [(run.configuration.steps, TrainingFolder(run.directory)) for run in group]
        last = [(folder.records() or [{"step": 0, "seconds": 0.0}])[-1] for _, folder in folders]
        done = sum(record["step"] for record in last)
        seconds = sum(record["seconds"] for record in last)
        steps = sum(count for count, _ in folders)
        finished = sum(folder.is_finished for _, folder in folders)
        took, left = (
            (duration(seconds), duration(seconds / done * (steps - done))) if done else ("-", "?")
        )
        table.add_row(
            name,
            f"{finished}/{len(folders)}",
            f"{done:,}/{steps:,}",
            took,
            "-" if done == steps else left,
        )
    console.print(table)
    console.print(
        "?: not begun; repo-interp zoo train estimates what is left from its first steps.",
        highlight=False,
    )


def _list(console: Console, names: list[str]) -> None:
    wanted = tuple(f"{name.rstrip('/')}/" for name in names) or ("",)
    shown = [name for name in shipped_names() if f"{name}/".startswith(wanted)]
    if not shown:
        raise InputError(
            f"no checkpoint {' or '.join(names)} is installed; these are: "
            f"{', '.join(shipped_names())}"
        )
    from position_papers.training.trained import recorded_scores  # imports torch
    from repo_interp.checkpoint_files.stored import weight_files

    table = _table(("name", "layout"), ("steps", "seeds", "score", "of", "score", "of"))
    for name in shown:
        own, *others = recorded_scores(zoo_path(name))
        sets = [(test_set, value) for test_set, value in own.means.items() if not math.isnan(value)]
        scores = [
            cell
            for test_set, value in (sets[0], sets[-1])
            for cell in (f"{value:.3f}", _short(test_set))
        ]
        seeds = f"{len(zoo_seeds(name))}/{1 + len(others)}"
        steps = ("+" if own.configuration.continue_from else "") + str(own.steps)
        table.add_row(name, own.configuration.scheme, steps, seeds, *scores)
    console.print(table)
    bytes_of = (file.stat().st_size for name in shown for file in weight_files(zoo_path(name)))
    size = f"{sum(bytes_of) / 1e6:.0f} MB in all"
    how = "Look into one: repo-interp analyze NAME; in Python: ri.zoo(NAME)."
    scored = (
        "Scores of the first and last test set, in the task's metric. +: steps from "
        "another checkpoint. Seeds: with weights here / trained."
    )
    console.print(f"{size}. {scored} {how}", highlight=False)


def _short(test_set: str) -> str:
    """The name of a test set, shortened so that a row fits into 80 columns."""
    return test_set if len(test_set) <= 9 else f"{test_set[:8]}…"


def _train(console: Console, arguments: argparse.Namespace) -> int:
    if arguments.into:
        require_directory(Path(arguments.into))
        require_writable(Path(arguments.into), "--into")
    require_writable(RUNS, "directory to train in")
    require_device_kind(arguments.device or "cpu")
    # Not earlier: these modules import torch
    from position_papers.commands.train import EVERY
    from position_papers.training.folder import TrainingFolder
    from position_papers.training.shipping import make, unfinished
    from repo_interp.models.checkpoints import device_named
    from repo_interp.runtime.progress import steps

    if processes.count() > 1 and arguments.jobs > 1:
        raise InputError(
            "--jobs is for one process; several that were launched together train one run "
            "each: leave it out"
        )
    device = None if arguments.device is None else str(device_named(arguments.device))
    runs = planned_runs(
        chosen((*PLAN, *AHEAD) if arguments.names else PLAN, arguments.names),
        device=device,
        deterministic=arguments.deterministic,
    )
    waiting = processes.from_first(lambda: unfinished(runs))
    trained_on = runs[0].configuration.device
    console.print(
        f"{len(runs)} training runs on {trained_on}, {len(runs) - len(waiting)} of them finished",
        highlight=False,
    )
    if waiting:
        total = sum(run.configuration.steps for run in waiting)
        with steps(console, EVERY) as step:
            places = [run.directory for run in waiting]

            def watch() -> None:
                logs = [TrainingFolder(place).records() for place in places]
                step("training", sum(records[-1]["step"] for records in logs if records), total)

            ended = make(runs, arguments.jobs, watch)
        if not ended:
            kept = filter(None, (TrainingFolder(place).kept for place in places))
            raise KeyboardInterrupt(
                "; ".join((*kept, "the states are saved; the same command continues from there"))
            )
    if not processes.is_first():
        return 0
    with processes.alone():
        return _installed(console, runs, arguments)


def _installed(console: Console, runs: list[PlannedRun], arguments: argparse.Namespace) -> int:
    """Measure saved steps, copy the files to ship to `arguments.into`, and print each directory."""
    from position_papers.training.shipping import install, write_registry, zoo_page
    from repo_interp.runtime.console import bold

    for planned in runs:
        _keep_steps(console, planned)
        place = install(planned, Path(arguments.into)) if arguments.into else planned.directory
        console.print(bold(place), highlight=False)
    if arguments.into:
        write_registry(Path(arguments.into))
    if arguments.into and not arguments.names:
        write_text(Path(arguments.into) / "README.md", zoo_page(PLAN, AHEAD, Path(arguments.into)))
    return 0


def _keep_steps(console: Console, run: PlannedRun) -> None:
    """Measure the saved steps of a run that keeps them. Their weights do not ship, only these
    measurements.
    """
    from position_papers.hope.over_training import FILE, write_steps
    from position_papers.hope.replicates import Sampling

    if run.configuration.checkpoint_every and not (run.directory / FILE).is_file():
        with console.status(f"measuring the saved steps of {run.planned.name}"):
            write_steps(run.directory, Sampling(step_sequences=64))
