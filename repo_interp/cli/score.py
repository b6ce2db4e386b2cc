"""`repo-interp score CHECKPOINT [TASK]`: how well a checkpoint answers a task, by length, by depth, in and out of distribution; or, with
`--data FILE`, the questions of a data set that cannot come with the package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from repo_interp.cli.options import add_device, name_list, positive, positive_or_zero
from repo_interp.cli.train import option_value

_DATA_SETS = ("hybridqa", "longbench", "qasper", "glue", "mmlu_pro")
SUMMARY = "Score a checkpoint on a task, by test set and over the task's axes: a table and a run file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, a hub id, or the name of a zoo checkpoint")
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK",
        help=f"the task (default: the one it was trained on), or with --data a data set: {', '.join(_DATA_SETS)}",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="your copy of the data set, in its own published format; its own metrics score it"
    )
    parser.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help="with --data: tokens of a prompt with its answer; longer ones lose their middle (default: the training length, scaled)",
    )
    parser.add_argument("--out", metavar="DIR", help="where run.nc goes (default: runs/score-NAME, numbered when there is one)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that stands in --out")
    parser.add_argument("--test-sets", type=name_list, metavar="A,B", help="which test sets (default: all that the task has)")
    parser.add_argument("--count", type=positive, default=200, metavar="N", help="prompts of each (default: 200)")
    parser.add_argument("--seed", type=positive_or_zero, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument(
        "--answers",
        choices=("forced", "generated"),
        default="forced",
        help="read the answer off one teacher-forced pass, or generate it token by token (default: forced; exact match is the same)",
    )
    parser.add_argument(
        "--scaling",
        metavar="KIND:FACTOR",
        help="scale the rotation for longer prompts: yarn:2, linear:4 (position interpolation), from the training length",
    )
    parser.add_argument("--task-size", metavar="NAME", help="size of the task (default: as it was trained, else small)")
    parser.add_argument(
        "--set",
        type=option_value,
        action="append",
        metavar="NAME=VALUE",
        dest="task_options",
        help="an option of the task; may be repeated",
    )
    add_device(parser)
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="prompts in one forward pass (default: 32)")


def run(arguments: argparse.Namespace) -> int:
    """Score, print the tables, write the run file."""
    from rich.console import Console
    from rich.progress import Progress

    from repo_interp.cli.checkpoint import find
    from repo_interp.experiments.scoring import score
    from repo_interp.models.checkpoints import identify, load_model
    from repo_interp.models.families import training_length
    from repo_interp.models.provenance import checkpoint_digest
    from repo_interp.positions.layouts import format_layout
    from repo_interp.run import make_run, versions, write_run

    console = Console()
    path = find(arguments.checkpoint)
    checkpoint = identify(path)
    asked = _data_set(arguments)
    task = None if asked else _task(arguments, path)
    directory = _directory(arguments)
    scaling = _scaling(arguments.scaling, training_length(checkpoint.config))
    model = load_model(checkpoint, arguments.device, arguments.dtype, scaling)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("scoring", total=None)
        if task is None:
            scores = _answered(arguments, checkpoint, model, scaling)
        else:
            _require_vocabulary(task, model.config.vocab_size)
            scores = score(
                model,
                task,
                arguments.test_sets,
                arguments.count,
                arguments.seed,
                arguments.answers,
                arguments.batch_size,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
    provenance = {
        "checkpoint": arguments.checkpoint,
        "checkpoint_digest": checkpoint_digest(checkpoint.directory),
        "layout": format_layout(checkpoint.layout),
        "dtype": arguments.dtype,
        "scaling": arguments.scaling or "none",
        **versions(),
    }
    _print(console, scores, arguments)
    directory.mkdir(parents=True, exist_ok=True)
    write_run(make_run({"scores": scores}, provenance), directory / "run.nc")
    console.print(f"[bold]{directory / 'run.nc'}[/bold]  the numbers", highlight=False)
    return 0


def _data_set(arguments: argparse.Namespace) -> str | None:
    """The data set that is asked for; None for a task. Raises InputError where one option needs another."""
    from repo_interp.errors import InputError

    if arguments.data is None:
        if arguments.task in _DATA_SETS:
            raise InputError(f"{arguments.task} needs data, which cannot come with the package; give your copy: --data FILE")
        if arguments.length is not None:
            raise InputError("--length is for data sets; give one, with --data FILE")
        return None
    if arguments.task not in _DATA_SETS:
        raise InputError(f"--data is for a data set, one of {', '.join(_DATA_SETS)}; name one behind the checkpoint")
    task_only = {"--test-sets": arguments.test_sets, "--task-size": arguments.task_size, "--set": arguments.task_options}
    given = [name for name, value in task_only.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} is for tasks; a data set has no such thing")
    return arguments.task


def _answered(arguments: argparse.Namespace, checkpoint, model, scaling):
    from repo_interp.errors import InputError
    from repo_interp.experiments.data_set_scores import ask
    from repo_interp.models.checkpoints import load_tokenizer
    from repo_interp.models.families import training_length
    from repo_interp.tasks.data_sets import data_set_prompts

    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise InputError(f"{arguments.checkpoint} has no tokenizer, so it can be asked nothing; put its tokenizer there")
    length = arguments.length or int(training_length(checkpoint.config) * (scaling or {"factor": 1.0})["factor"])
    prompts = data_set_prompts(arguments.task, arguments.data, tokenizer, length, arguments.count, arguments.seed)
    scores = ask(model, tokenizer, prompts, arguments.batch_size)
    stated = {"task": arguments.task, "metric": "score", "count": arguments.count, "seed": arguments.seed, "length": length}
    return scores.assign_attrs(answers="generated", left_out=[], higher_is_better="True", **stated)


def _task(arguments: argparse.Namespace, path: str):
    from repo_interp.errors import InputError
    from repo_interp.tasks import make_task
    from repo_interp.training.provenance import trained_task

    trained = trained_task(path)
    name = arguments.task or (None if trained is None else trained.name)
    if name is None:
        raise InputError(f"{arguments.checkpoint} does not say which task it was trained on; name one")
    options = dict(arguments.task_options or ())
    if trained is not None and name == trained.name and arguments.task_size is None:
        return make_task(trained.name, **trained.options() | options)
    return make_task(name, arguments.task_size or "small", **options)


def _directory(arguments: argparse.Namespace) -> Path:
    from repo_interp.errors import InputError

    if arguments.out is not None:
        directory = Path(arguments.out)
        if (directory / "run.nc").exists() and not arguments.overwrite:
            raise InputError(f"{directory} holds a run already; give another --out, or --overwrite to replace it")
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file; wanted a directory for the results")
        return directory
    name = "-".join(part for part in arguments.checkpoint.strip("./").split("/")[-2:] if part not in ("", "..", "."))
    directory, number = Path("runs") / f"score-{name}", 1
    while (directory / "run.nc").exists():
        number += 1
        directory = Path("runs") / f"score-{name}-{number}"
    return directory


def _scaling(text: str | None, trained: int) -> dict[str, str | float | int] | None:
    from repo_interp.errors import InputError

    if text is None:
        return None
    kind, colon, factor = text.partition(":")
    try:
        value = float(factor)
    except ValueError:
        value = 0.0
    if kind not in ("yarn", "linear") or not colon or value < 1.0:
        raise InputError(f"scaling {text!r} is unknown; wanted yarn:FACTOR or linear:FACTOR with a factor of 1 or more")
    return {"rope_type": kind, "factor": value} | ({"original_max_position_embeddings": trained} if kind == "yarn" else {})


def _require_vocabulary(task, present: int) -> None:
    from repo_interp.errors import InputError

    if task.vocabulary_size != present:
        raise InputError(
            f"the task {task.name} has {task.vocabulary_size} tokens, the checkpoint {present}; wanted a checkpoint trained on it"
        )


def _print(console, scores, arguments: argparse.Namespace) -> None:
    from rich.table import Table

    table = Table(
        "test set",
        scores.attrs["metric"],
        "standard error",
        *(("perplexity",) if "log_perplexity" in scores else ()),
        *(("questions", "cut") if "questions" in scores else ()),
        title=f"{arguments.checkpoint} on {scores.attrs['task']}, "
        + (f"{scores.attrs['count']} prompts each" if "questions" not in scores else f"up to {scores.attrs['length']} tokens"),
    )
    for test_set in scores.test_set.values:
        one = scores.sel(test_set=test_set)
        cells = [str(test_set), f"{float(one.mean_score):.3f}", f"{float(one.standard_error):.3f}"]
        if "log_perplexity" in scores:
            cells.append(f"{float(2.718281828459045**one.log_perplexity):.4g}")
        if "questions" in scores:
            cells += [str(int(one.questions)), f"{float(one.cut):.0%}"]
        table.add_row(*cells)
    console.print(table)
    if "score_map" in scores and scores.score_map.ndim == 2:
        rows, columns = scores.score_map.dims
        grid = Table(f"{rows} \\ {columns}", *(str(label) for label in scores[columns].values), title=scores.score_map.long_name)
        for label, values in zip(scores[rows].values, scores.score_map.values, strict=True):
            grid.add_row(str(label), *("-" if value != value else f"{value:.2f}" for value in values))
        console.print(grid)
