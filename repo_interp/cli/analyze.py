"""`repo-interp analyze [CHECKPOINT]`: from a checkpoint and prompts to a run, figures and a report page."""

from __future__ import annotations

import argparse
from typing import Any

from repo_interp.cli.options import add_device, name_list, number_list, parameter, positive, positive_or_zero

SUMMARY = "Measure what the heads of a checkpoint do with positions: a run file, figures and a report page."

_VARIANTS = (
    "single_1",
    "single_2",
    "single_3",
    "multikey_1",
    "multikey_2",
    "multikey_3",
    "multivalue",
    "multiquery",
)


_WORTH_KEEPING = 15.0
"""Seconds of an analysis above which finished batches are kept on disk, so that it can go on after an interruption."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help="a directory, a hub id, or the name of a checkpoint that comes with the package (default: niah/repo)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts.jsonl to analyse (default: needle-in-a-haystack prompts are made)",
    )
    parser.add_argument("--out", metavar="DIR", help="where results go (default: runs/NAME, numbered when there is one)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that stands in --out")
    parser.add_argument(
        "--measures",
        type=name_list,
        default=None,
        metavar="A,B",
        help="measures to take (default: positions,patterns,attention_mass - the last where prompts mark generated tokens)",
    )
    parser.add_argument(
        "--experiments",
        type=name_list,
        default=(),
        metavar="A,B",
        help="experiments, which need many forward passes: perturbation (of order and positions, on these prompts), extrapolation "
        "(beyond the training length, on longer prompts of the same task); scored by the task of the prompts, and prompts of a file by "
        "their generated tokens or, without these, by log perplexity",
    )
    parser.add_argument(
        "--set",
        type=parameter,
        action="append",
        default=[],
        metavar="MEASURE.NAME=VALUE",
        dest="parameters",
        help="a parameter of a measure or an experiment, such as patterns.epsilon=0.5 or perturbation.gammas=0.05,0.1; may be repeated",
    )
    parser.add_argument("--layers", type=number_list, metavar="5-15", help="layers to measure (default: all)")
    parser.add_argument("--heads", type=number_list, metavar="0,3", help="heads to measure (default: all)")
    generated = parser.add_argument_group("prompts that are made, when no --prompts are given")
    generated.add_argument(
        "--task",
        metavar="NAME",
        help="ruler (needle in a haystack), or a synthetic task of ours (default: the task that the checkpoint was trained on by "
        "repo-interp train, else ruler)",
    )
    generated.add_argument("--variant", choices=_VARIANTS, default="multikey_1", help="of ruler (default: multikey_1)")
    generated.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help="tokens of a ruler prompt (default: the training length, at most 4096), or the test set of a synthetic task",
    )
    generated.add_argument("--count", type=positive, default=20, metavar="N", help="how many prompts (default: 20)")
    generated.add_argument("--seed", type=positive_or_zero, default=0, help="seed of the prompts (default: 0)")
    add_device(parser)
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="prompts in one forward pass (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Analyse, write and print; return the exit code."""
    from rich.console import Console

    from repo_interp.analysis.analyze import analyze, measures_named
    from repo_interp.analysis.cost import estimate
    from repo_interp.analysis.publication import claimed
    from repo_interp.cli.checkpoint import DEFAULT, find, stem
    from repo_interp.cli.progress import analysis_bars
    from repo_interp.cli.results import print_results
    from repo_interp.cli.tables import print_tables
    from repo_interp.errors import InputError
    from repo_interp.experiments.catalogue import experiment_named, planned
    from repo_interp.measures.catalogue import measure_named
    from repo_interp.models.load import load
    from repo_interp.plots.catalogue import view_of
    from repo_interp.plots.pages.report import write_report
    from repo_interp.tasks.prompt.jsonl import read_prompts

    console = Console()
    name = arguments.checkpoint or DEFAULT
    for measure in arguments.measures or ():
        measure_named(measure)  # an unknown name is refused before the checkpoint is read
    experiments = [experiment_named(experiment) for experiment in arguments.experiments]
    for measure in arguments.measures or ():
        view_of(measure)  # and so is a view of another package that cannot be imported
    path = find(name)
    bridge = load(path, device=_device(arguments.device), dtype=arguments.dtype)
    if arguments.dtype != "float32" and arguments.dtype != "float64":
        console.print(f"[yellow]positions are rounded in {arguments.dtype}; measure them in float32[/yellow]")
    if arguments.prompts is not None:
        prompts, task = read_prompts(arguments.prompts, tokenizer=bridge.tokenizer, vocab_size=bridge.cfg.d_vocab), None
    else:
        prompts, task = _make_prompts(arguments, bridge, path)
    measures = measures_named(arguments.measures or _default_measures(prompts))
    measures, experiments = _with_parameters(measures, experiments, arguments.parameters)
    plans = planned(bridge, prompts, experiments, task)
    passes = [length for plan in plans for length in plan.passes]
    cost = estimate(bridge, [len(prompt.tokens) for prompt in prompts], arguments.batch_size, len(measures), passes)
    longest, names = max(len(prompt.tokens) for prompt in prompts), ", ".join(measure.name for measure in measures)
    added = f", experiments {', '.join(arguments.experiments)} ({len(passes):,} more prompts)" if experiments else ""
    console.print(
        f"[bold]{name}[/bold]: {len(prompts)} prompts of up to {longest} tokens, measures {names}{added}; {cost}",
        highlight=False,
    )
    with claimed(arguments.out, stem(name), arguments.overwrite) as results:
        store = results.store if cost.seconds > _WORTH_KEEPING else None
        try:
            with analysis_bars(console) as (progress, experiment_progress):
                measured = analyze(
                    bridge,
                    prompts,
                    measures,
                    layers=arguments.layers,
                    heads=arguments.heads,
                    batch_size=arguments.batch_size,
                    store=store,
                    progress=progress,
                    experiments=plans,
                    task=task,
                    experiment_progress=experiment_progress,
                )
        except KeyboardInterrupt:
            kept = "finished batches are kept; the same command goes on from there" if store is not None else ""
            raise KeyboardInterrupt(kept) from None
        except BaseException as error:
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                raise InputError(f"not enough memory ({cost}); give shorter prompts or a smaller --batch-size") from None
            raise
        with console.status("drawing"):
            published = results.publish(measured, write_report)
    print_tables(console, measured)
    return print_results(console, results, published)


def _with_parameters(measures, experiments, parameters):
    from repo_interp.errors import InputError
    from repo_interp.values import with_field

    configured: dict[str, Any] = {part.name: part for part in (*measures, *experiments)}
    for name, parameter_name, text in parameters:
        if name not in configured:
            raise InputError(
                f"--set {name}.{parameter_name}: the measure {name!r} is not among those measured, {', '.join(configured)}"
            )
        configured[name] = with_field(configured[name], parameter_name, text, name, fixed=("name", "required_spans"))
    return [configured[measure.name] for measure in measures], [configured[experiment.name] for experiment in experiments]


def _default_measures(prompts) -> tuple[str, ...]:
    always = ("positions", "patterns")
    return (*always, "attention_mass") if all(prompt.generated for prompt in prompts) else always


def _make_prompts(arguments: argparse.Namespace, bridge, path: str):
    """Prompts and their task; None for those of ruler, which are judged by the tokens that they mark as generated."""
    from repo_interp import tasks
    from repo_interp.errors import InputError
    from repo_interp.models.provenance import loaded_from
    from repo_interp.training.trained import trained_task

    trained = trained_task(path)
    name = arguments.task or (trained.name if trained is not None else "ruler")
    if name == "ruler":
        origin = loaded_from(bridge)
        length = arguments.length or min(4096, origin.training_length if origin else 4096)
        if bridge.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so no prompts can be made for it; give --prompts with token ids")
        count, seed = arguments.count, arguments.seed
        return tasks.niah(bridge.tokenizer, variant=arguments.variant, length=length, count=count, seed=seed), None
    task = trained if trained is not None and trained.name == name else tasks.make_task(name)
    if bridge.cfg.d_vocab < task.vocabulary_size:
        raise InputError(
            f"the task {name} has {task.vocabulary_size} tokens, the checkpoint {bridge.cfg.d_vocab}; "
            "wanted a checkpoint trained on it, or --prompts"
        )
    test_set = None if arguments.length is None else str(arguments.length)
    return task.prompts(arguments.count, seed=arguments.seed, test_set=test_set), task


def _device(name: str) -> str:
    import torch

    from repo_interp.errors import InputError

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device {name!r} is not to be had here ({str(error).splitlines()[0][:120]}); --device cpu always is"
        ) from None
    return name
