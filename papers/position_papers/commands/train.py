"""`repo-interp train TASK`: train a small model on a task with any position scheme, or continue a
checkpoint with another scheme.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from position_papers.training.configuration import (
    SIZES,
    TABLES,
    TrainingConfiguration,
    joined,
    read_toml,
    replaced,
    to_toml,
)
from position_papers.training.plan import recipe
from repo_interp.cli.arguments import (
    add_settings,
    count,
    field_values,
    number_list,
    reader_of,
    require_device_kind,
    setting,
    without_owner,
)
from repo_interp.cli.checkpoint import find_checkpoint, find_readable
from repo_interp.cli.scheme_files import layout_of_files
from repo_interp.errors import InputError
from repo_interp.storage.files import require_writable
from repo_interp.values import checked

if TYPE_CHECKING:
    from position_papers.training.folder import TrainingFolder
    from position_papers.training.preparation import Prepared
    from repo_interp.runtime.console import Console
    from repo_interp.runtime.progress import Step

    Run = tuple[TrainingConfiguration, TrainingFolder]

SUMMARY = (
    "Train a small model on a task with any position scheme, or continue a checkpoint "
    "with another scheme."
)

CALL = "repo-interp train reversal --scheme repo --out runs/own"
"""An example call that error messages about the arguments show."""
EVERY = 60.0
"""Seconds between progress lines when the output is not a terminal."""
_SHORT = {"index_share_until": ("--index-share-until", "--p-drop")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: one for every field of a training configuration, and options that say
    where and how to run.
    """
    parser.add_argument(
        "task", nargs="?", metavar="TASK", help="the task, unless --config or --resume names it"
    )
    written = "a TOML file of the options below (their names with _), such as a training.toml"
    parser.add_argument("--config", metavar="FILE", help=written)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the checkpoint (default: runs/TASK-SCHEME/seed-N)",
    )
    resume = "continue the interrupted training in --out, or start if there is none"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the training run in --out"
    )
    parser.add_argument(
        "--seeds", type=number_list, metavar="0-2", help="one run per seed, in --out/seed-N"
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="runs at a time, with --seeds (default: 1)",
    )
    add_settings(
        parser,
        "task_options",
        "an option of the task, such as longest=20, or of the position scheme, such as "
        "scheme.p_max=64",
    )
    parser.add_argument(
        "--scheme-set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="scheme_options",
        help="short for --set scheme.NAME=VALUE: an option of the position scheme, such as "
        "assignment=layer or p_max=64",
    )
    recipe = parser.add_argument_group(
        "settings that decide the result (defaults where the task's recipe has none)"
    )
    for option in fields(TrainingConfiguration):
        if "help" not in option.metadata:
            continue
        if option.default is None:
            flag = {"action": argparse.BooleanOptionalAction, "help": option.metadata["help"]}
            recipe.add_argument(f"--{option.name}", **flag)
            continue
        shown = f" (default: {option.default})" if option.default != "" else ""
        shown += (
            f"; without a number {option.metadata['alone']}"
            if option.metadata["alone"] is not None
            else ""
        )
        recipe.add_argument(
            *_SHORT.get(option.name, (f"--{option.name.replace('_', '-')}",)),
            dest=option.name,
            # Python's int and float also accept digits of other scripts.
            type=str if isinstance(option.default, str) else reader_of(type(option.default)),
            default=None,
            nargs=None if option.metadata["alone"] is None else "?",
            const=option.metadata["alone"],
            metavar={float: "X", int: "N"}.get(type(option.default), "NAME"),
            help=option.metadata["help"] + shown,
        )


def run(arguments: argparse.Namespace) -> int:
    """Train with a progress bar, and print the scores."""
    from repo_interp.runtime.console import Console, on_one_line

    arguments.scheme_files = ()
    if arguments.scheme is not None:
        # Only for the command line: a TOML file may come from someone else and must run no code
        arguments.scheme_layout = arguments.scheme
        arguments.scheme, arguments.scheme_files = layout_of_files(arguments.scheme)
    _require_known_names(arguments)
    console = Console()
    runs = _runs(arguments)
    pending = [
        (configuration, folder)
        for configuration, folder in runs
        if arguments.overwrite or not folder.is_finished
    ]
    _require_possible(pending)
    for _, folder in runs:
        if folder.is_finished and not arguments.overwrite:
            console.print(f"{on_one_line(folder.directory)} is finished", highlight=False)
    several = arguments.seeds is not None
    out = runs[0][1].directory.parent if several else runs[0][1].directory
    try:
        done = not pending or (_train_several if several else _train_here)(
            console, pending, arguments
        )
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:  # the second Ctrl-C, which does not wait for the state to be saved
        if not any(folder.kept for _, folder in pending):
            raise
        done = False
    except OSError as error:
        again = f"make room, then go on by --resume --out {out}"
        raise InputError(f"{out} cannot be written ({error.strerror or error}); {again}") from None
    if not done:
        seeds = (
            f" --seeds {','.join(map(str, arguments.seeds))} --jobs {arguments.jobs}"
            if several
            else ""
        )
        if arguments.scheme_files:
            seeds += f" {shlex.join(['--scheme', arguments.scheme_layout])}"
        kept = "; ".join(filter(None, (folder.kept for _, folder in pending)))
        raise KeyboardInterrupt(
            f"{kept or 'the state is saved'}; go on with: repo-interp train --resume --out {out}{seeds}"
        )
    print_scores(console, [folder for _, folder in runs])
    return 0


def _require_known_names(arguments: argparse.Namespace) -> None:
    """Raise InputError for a task, a size, a scheme, a device or a checkpoint that does not exist,
    before anything heavy is imported.
    """
    from repo_interp.positions.layouts import SCHEMES, named_schemes
    from repo_interp.tasks import make_task, task_names

    if arguments.task is not None:
        if arguments.task in SCHEMES and arguments.task not in task_names():
            call = CALL.replace("--scheme repo", f"--scheme {arguments.task}")
            raise InputError(
                f"{arguments.task} is a position scheme, and the first word is a task, one of "
                f"{', '.join(task_names())}, as in {call} (see repo-interp train --help)"
            )
        make_task(arguments.task, arguments.task_size or "small")
    find_checkpoint(arguments.continue_from or "")
    require_device_kind(arguments.device or "cpu")
    try:
        named_schemes(arguments.scheme or TrainingConfiguration.scheme)
    except ValueError as error:
        raise InputError(str(error)) from None


def _require_possible(runs: Sequence[Run]) -> None:
    """Raise InputError for runs that cannot start or be written, before torch is imported."""
    from position_papers.training.trained import configured_task
    from repo_interp.positions.layouts import parse_layout

    for configuration, folder in runs:
        configured_task(configuration)
        require_writable(folder.directory)
        if configuration.continue_from:
            find_readable(configuration.continue_from)
            continue  # the number of layers is known only when the checkpoint is read
        try:
            parse_layout(configuration.scheme, configuration.layers)
        except ValueError as error:
            raise InputError(str(error)) from None


def _runs(arguments: argparse.Namespace) -> list[Run]:
    """Every requested run.

    Raises InputError for options that exclude each other, before anything is written.
    """
    if arguments.resume and arguments.overwrite:
        raise InputError("--resume continues and --overwrite starts again; give one of them")
    if (
        arguments.resume
        and arguments.out is None
        and arguments.task is None
        and arguments.config is None
    ):
        raise InputError(
            "--resume needs a directory: give --out DIR, or the options that the run was begun with"
        )
    if arguments.seeds is None and arguments.jobs > 1:
        raise InputError(
            "--jobs runs several seeds side by side; give them with --seeds, such as --seeds 0-2"
        )
    if arguments.seeds is not None and arguments.seed is not None:
        raise InputError("--seed is for one run and --seeds for several; give one of them")
    runs = [_one_run(arguments, seed) for seed in arguments.seeds or (None,)]
    if arguments.overwrite:
        _require_apart(runs)
    return runs


def _require_apart(runs: Sequence[Run]) -> None:
    """Raise InputError when a run continues a checkpoint that --overwrite would remove."""
    if not any(configuration.continue_from for configuration, _ in runs):
        return
    from repo_interp.models.checkpoints import identify

    removed = [folder.directory.resolve() for _, folder in runs]
    for continued in dict.fromkeys(
        configuration.continue_from for configuration, _ in runs if configuration.continue_from
    ):
        directory = identify(continued).directory.resolve()
        inside = next((place for place in removed if directory.is_relative_to(place)), None)
        if inside is not None:
            raise InputError(
                f"{continued} is continued, and --overwrite would remove it with "
                f"{inside.name}; give another --out"
            )


def _one_run(arguments: argparse.Namespace, seed: int | None) -> Run:
    """One run and its directory. A resumed run takes its configuration from its training.toml.
    `seed` is the seed of one run of several, each in a separate directory.
    """
    from position_papers.training.folder import TrainingFolder
    from position_papers.training.trained import require_functions, trained_configuration

    own = {} if seed is None else {"seed": seed}
    if arguments.out is None:
        fresh = _fresh(arguments, own)
        layout = fresh.scheme.replace("/", "-of-").replace(",", "-")
        folder = TrainingFolder(Path("runs") / f"{fresh.task}-{layout}" / f"seed-{fresh.seed}")
    else:
        folder = TrainingFolder(
            Path(arguments.out) if seed is None else Path(arguments.out) / f"seed-{seed}"
        )
    # raises InputError for a training.toml of something else, which must not be replaced
    stored = trained_configuration(folder.directory)
    if stored is None or not (arguments.resume and folder.is_begun):
        fresh = _fresh(arguments, own)
        if not (folder.is_begun and arguments.overwrite):
            folder.require_free()
        return fresh, folder
    require_functions(folder.directory)
    asked = _asked(arguments, vars(stored)) | own
    wanted = replaced(stored, asked)
    free = ("device", "deterministic")  # a run can go on on another device
    for name in asked.keys() - free:
        if getattr(wanted, name) != (known := getattr(stored, name)):
            begun = f"{folder.directory} was begun with another {name} ({known!r})"
            raise InputError(f"{begun}; leave it out to go on, or give another --out")
    return replaced(stored, {name: getattr(wanted, name) for name in free}), folder


def _fresh(arguments: argparse.Namespace, own: Mapping[str, Any]) -> TrainingConfiguration:
    """The requested configuration, with the fields `own`, over the recipe of its task."""
    asked = {**_asked(arguments, {}), **own}
    task, continued = str(asked["task"]), asked.get("continue_from")
    for name in SIZES:
        if continued and getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise InputError(
                f"--{flag} is of a fresh model, and {continued} keeps its own size and "
                "weights; leave it out"
            )
    return replaced(
        TrainingConfiguration(task=task), joined(recipe(task, continued=bool(continued)), asked)
    )


def _asked(arguments: argparse.Namespace, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a configuration from --config, replaced by fields from the command line. A task or
    a size that neither names is taken from `stored`.

    Raises InputError when no task is named, and for options that the task or the schemes lack.
    """
    from repo_interp.checkpoint_files.options import SchemeOptions, require_useful
    from repo_interp.positions.layouts import named_schemes
    from repo_interp.tasks import make_task, task_names

    written = read_toml(Path(arguments.config)) if arguments.config is not None else {}
    names = [option.name for option in fields(TrainingConfiguration) if option.name not in TABLES]
    from_options = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    named = {"task_size": "small", **stored, **written, **from_options}
    if not named.get("task"):
        raise InputError(
            f"no task was named; give one of {', '.join(task_names())}, as in {CALL} "
            "(see repo-interp train --help)"
        )
    of_scheme = [
        (name, text) for name, text in arguments.task_options if name.startswith("scheme.")
    ]
    of_task = [pair for pair in arguments.task_options if pair not in of_scheme]
    if of_task:
        task = make_task(named["task"], named["task_size"])
        from_options["task_options"] = field_values(
            without_owner(of_task, task.name), task, f"task {task.name}"
        )
    if of_scheme or arguments.scheme_options:
        texts = without_owner([*of_scheme, *arguments.scheme_options], "scheme")
        from_options["scheme_options"] = field_values(texts, SchemeOptions(), "the scheme")
        try:
            schemes = named_schemes(str(named.get("scheme") or TrainingConfiguration.scheme))
        except ValueError as error:
            raise InputError(str(error)) from None
        require_useful(schemes, SchemeOptions(**from_options["scheme_options"]))
    asked = joined(written, from_options)
    if "device" in asked:
        asked["device"] = _device(asked["device"])
    return asked


def _device(name: Any) -> str:
    """The name of an available device.

    Raises InputError for any other name.
    """
    name = checked(name, str, "device")
    if name == "cpu":
        return name  # always available, so torch need not be imported
    require_device_kind(name)
    from repo_interp.models.checkpoints import device_named

    return str(device_named(name))


def _train_here(console: Console, runs: Sequence[Run], arguments: argparse.Namespace) -> bool:
    """Train one run in this process. Returns whether it finished."""
    from position_papers.training.loop import train
    from position_papers.training.preparation import prepare
    from position_papers.training.processes import stoppable
    from repo_interp.runtime.progress import steps

    ((configuration, folder),) = runs
    prepared = prepare(configuration)
    _announce(console, prepared, f"seed {configuration.seed}")
    log = []
    with folder.claimed(), stoppable() as stop, steps(console, EVERY) as step:
        _begin(configuration, folder, arguments)
        for record in train(
            prepared,
            folder,
            stop,
            scoring=lambda done, total: step("scoring the test sets", done, total),
        ):
            log.append(vars(record))
            show(step, configuration.steps, {"": log})
    return folder.is_finished


def _train_several(console: Console, runs: Sequence[Run], arguments: argparse.Namespace) -> bool:
    """Train several runs in parallel. Returns whether all finished."""
    from position_papers.training.loop import train_side_by_side
    from position_papers.training.preparation import prepare
    from repo_interp.runtime.progress import steps

    seeds = ", ".join(str(configuration.seed) for configuration, _ in runs)
    _announce(
        console,
        prepare(runs[0][0]),
        f"seeds {seeds}, {arguments.jobs} at a time" if len(runs) > 1 else f"seed {seeds}",
    )
    for configuration, folder in runs:
        with folder.claimed():
            _begin(configuration, folder, arguments)
    total = sum(configuration.steps for configuration, _ in runs)
    with steps(console, EVERY) as step:

        def watch() -> None:
            show(
                step,
                total,
                {f"seed {configuration.seed}": folder.records() for configuration, folder in runs},
            )

        return train_side_by_side(
            [(configuration, folder.directory) for configuration, folder in runs],
            arguments.jobs,
            watch,
            scheme_files=arguments.scheme_files,
        )


def _begin(
    configuration: TrainingConfiguration, folder: TrainingFolder, arguments: argparse.Namespace
) -> None:
    from position_papers.training.trained import made_with

    if arguments.overwrite:
        folder.clear()
    elif not arguments.resume:
        folder.require_free()  # another process may have started a run in the meantime
    if not folder.is_begun:
        folder.begin(
            to_toml(
                configuration, made_with(configuration, shlex.join(["repo-interp", *sys.argv[1:]]))
            )
        )


def _announce(console: Console, prepared: Prepared, seeds: str) -> None:
    """Print which model will be trained, how, and with which `seeds`."""
    from repo_interp.models.reposition import added_parameters
    from repo_interp.runtime.console import bold

    configuration = prepared.configuration
    continued = f", continuing {configuration.continue_from}" if configuration.continue_from else ""
    sequences = f"{configuration.steps} steps of {configuration.batch * configuration.accumulation} sequences"
    console.print(
        bold(
            configuration.task,
            f", scheme {configuration.scheme}{continued}: {sequences}, {seeds}, on {configuration.device}",
        ),
        highlight=False,
    )
    parameters = sum(parameter.numel() for parameter in prepared.model.parameters())
    added = f"{added_parameters(prepared.model):,} of them for positions"
    console.print(f"{parameters:,} parameters, {added}", highlight=False)


def show(step: Step, total: int, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Show the progress of the runs, `total` steps together, and for each run by name the last loss
    and score in its log.
    """
    texts = []
    for run, log in logs.items():
        if log:
            score = next(
                (
                    f"{record['score']:.3f}"
                    for record in reversed(log)
                    if record["score"] is not None
                ),
                "-",
            )
            texts.append(f"{run} loss {log[-1]['loss']:.4f}, score {score}".strip())
    done = sum(log[-1]["step"] for log in logs.values() if log)
    step("training" if done < total else "scoring the test sets", done, total, "; ".join(texts))


def print_scores(console: Console, folders: Sequence[TrainingFolder]) -> None:
    """Print the scores of finished runs, with a column per run and a row per test set. Neighbouring
    test sets with equal scores share a row.
    """
    from rich.table import Table

    from repo_interp.runtime.console import bold

    scores = [json.loads(folder.scores.read_text(encoding="utf-8")) for folder in folders]
    table = Table("test sets", *(folder.directory.name for folder in folders))
    table.title = f"{scores[0]['metric']}, {scores[0]['prompts']} prompts each"
    shown = [
        (name, tuple(_shown(score["test_sets"][name]) for score in scores))
        for name in scores[0]["test_sets"]
    ]
    for cells, group in groupby(shown, key=lambda row: row[1]):
        names = [name for name, _ in group]
        table.add_row(names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}", *cells)
    console.print(table)
    left = "  the checkpoint, with training.toml, log.jsonl and scores.json"
    for folder in folders:
        console.print(bold(folder.directory, left), highlight=False)


def _shown(score: float | None) -> str:
    return "beyond the learned table" if score is None else f"{score:.3f}"
