"""`repo-interp analyze [CHECKPOINT]`: from a checkpoint and prompts to a run and its page."""

from __future__ import annotations

import argparse
import warnings
from contextlib import suppress
from functools import partial
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repo_interp.cli.analyze_prompts import (
    add_made_prompts,
    given_prompts,
    make_prompts,
    require_none_made,
)
from repo_interp.cli.arguments import (
    add_batch_size,
    add_device,
    add_formats,
    add_resume,
    add_scaling,
    add_settings,
    load_kwargs,
    name_list,
    name_list_or_none,
    number_list,
    rope_scaling,
    scaling_of,
)
from repo_interp.cli.checkpoint import DEFAULT, configure, find_checkpoint, find_readable, stem
from repo_interp.cli.scheme_files import add_scheme_files, read_scheme_files
from repo_interp.entry_points import (
    EXPERIMENTS,
    MEASURES,
    TASKS,
    attribute_texts,
    names,
    require_names,
)
from repo_interp.errors import InputError, Unfinished
from repo_interp.measures.topics import expand_topics, topics
from repo_interp.runtime import processes
from repo_interp.runtime.failures import is_out_of_memory
from repo_interp.runtime.option_texts import field_value, with_field

if TYPE_CHECKING:
    import xarray as xr

    from repo_interp.analysis.job import Job
    from repo_interp.analysis.publication import Results
    from repo_interp.runtime.console import Console
    from repo_interp.runtime.progress import Step

SUMMARY = (
    "Measure what the heads of a checkpoint do with positions: a run file, figures "
    "and a report page."
)
SHARED = True


def _described(group: str) -> str:
    return "; ".join(
        f"{name} ({said})" for name, said in attribute_texts(group, "describes").items()
    )


def _options_of_measures() -> dict[str, list[str]]:
    """By measure with an option, the option, the field that it sets, and an example of its value."""
    return {name: text.split() for name, text in attribute_texts(MEASURES, "option").items()}


def _topics() -> str:
    return "; ".join(
        f"{topic} is {', '.join(members)}" for topic, members in topics(MEASURES).items()
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp analyze`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help="a directory, a hub id, or the name of a checkpoint that comes with the package "
        f"(default: {DEFAULT})",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts.jsonl, plain text, or logged samples of lm-evaluation-harness or "
        "inspect-ai, to analyze; - is standard input "
        "(default: prompts of the task that the checkpoint was trained on, else one text of "
        "512 tokens from the documentation of Python's "
        "standard library)",
    )
    parser.add_argument("--text", metavar="TEXT", help="one text to analyze")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the results (default: runs/NAME, with a number if it exists)",
    )
    add_resume(parser)
    parser.add_argument(
        "--measures",
        type=name_list,
        default=None,
        metavar="A,B",
        help=f"measures: {_described(MEASURES)}; {_topics()} (default: those that fit the positions of the "
        "layers and the prompts, which the first line names)",
    )
    parser.add_argument(
        "--experiments",
        type=name_list_or_none,
        default=None,
        metavar="A,B",
        help="experiments, which need many forward passes; none: no experiment (default, without "
        "--measures and --layers: quick ones about the model's positions): "
        f"{_described(EXPERIMENTS)}; scored by the task of the prompts, and prompts of a file by "
        "their generated tokens or, without these, by log perplexity",
    )
    helps = attribute_texts(MEASURES, "option_help")
    for name, (option, _, example) in _options_of_measures().items():
        parser.add_argument(option, metavar=example, help=helps[name])
    add_settings(
        parser,
        "parameters",
        "a parameter of a measure or an experiment, such as patterns.epsilon=0.5 or "
        "perturbation.gammas=0.05,0.1, or epsilon=0.5 if only one has it; or of the task that makes "
        "the prompts, such as corpus=FILE",
    )
    parser.add_argument(
        "--layers",
        type=number_list,
        metavar="5-15",
        help="layers to measure (default: all); experiments take all",
    )
    parser.add_argument(
        "--heads",
        type=number_list,
        metavar="0,3",
        help="heads to measure (default: all); experiments take all",
    )
    add_made_prompts(parser)
    add_scaling(parser)
    add_device(parser)
    add_scheme_files(parser)
    add_batch_size(parser, default="auto")
    add_formats(parser)
    parser.add_argument(
        "--all-findings",
        action="store_true",
        help="print all findings, each with its evidence",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="print the tables of all measures too, after the findings",
    )


def run(arguments: argparse.Namespace) -> int:
    """Analyze, write and print.

    Args:
        arguments: Parsed options.

    Returns:
        0; 1 if the numbers exist but a measure, a figure or the page failed.

    Raises:
        InputError: A name, a path or a value is refused.
    """
    from repo_interp.cli.results import ASKED, Command, draw_results, print_results
    from repo_interp.runtime.console import Console, on_one_line

    console, name = Console(), arguments.checkpoint or DEFAULT
    # The content of the files is part of the recorded options
    arguments.scheme = read_scheme_files(arguments.scheme)
    # Before the imports below, which take seconds
    _require_given(arguments, name)
    command = Command(arguments, name, "analysis")
    command.require_claimable()
    from repo_interp.analysis.publication import claim_results
    from repo_interp.models.rescaling import acting_scaling
    from repo_interp.runtime.progress import steps

    # Before anything is loaded: finished results need no model.
    if (code := command.resume_finished(console)) is not None:
        return code
    with steps(console) as step:
        job = _job(arguments, name, step)
    # Claimed only once the model is loaded, so that bad input leaves no directory behind.
    with claim_results(command.out, stem(name), command.replaces) as results:
        _announce(console, name, job)
        # Work that was kept for other options is noticed when the store is opened.
        with command.same_question(console), steps(console) as step:
            attributes = {ASKED: command.asked}
            # A scaling without effect is only in the notes
            acts = acting_scaling(job.decoder, arguments.scaling or "")
            attributes |= {"scaling": acts} if acts else {}
            # The other processes have done their share, and one writes and draws.
            run = _execute(job, results, step, attributes)
            if not processes.is_first():
                return 0
            published = draw_results(results, run, step, command.formats)
    from repo_interp.cli.console_tables import print_all_findings, print_findings, print_tables

    # Only the first process comes here: the others have returned.
    show_findings = print_all_findings if arguments.all_findings else print_findings
    show_findings(console, run)
    if arguments.tables:
        print_tables(console, run)
    for line in run.attrs.get("stopped", "").splitlines():
        console.print(f"not measured: {line}", style="yellow")
    if results.has_batches:
        # If a measure stopped, its batches stay, and the work can continue from them.
        console.print(
            f"finished batches are kept; go on by --resume --out {on_one_line(results.directory)}",
            style="yellow",
        )
    # 1 also if a measure stopped: the other numbers exist.
    return print_results(console, results, published) or int("stopped" in run.attrs)


def _require_given(arguments: argparse.Namespace, name: str) -> None:
    """Raise InputError for names, paths and values that can be refused without torch."""
    from repo_interp.checkpoint_files.stated import (
        PLAIN,
        plain_keys,
        read_checkpoint,
        stated,
        text_keys,
    )
    from repo_interp.tasks.prompt.jsonl import require_readable

    path = find_readable(name)
    if arguments.text and isfile(arguments.text):
        raise InputError(
            f"--text {arguments.text} is a file, and its name would be the text; "
            f"--prompts {arguments.text} reads it"
        )
    if arguments.prompts is not None or arguments.text is not None:
        require_none_made(arguments)
    scaling_of(arguments.scaling)
    load_kwargs(arguments)
    if arguments.measures is not None:
        arguments.measures = expand_topics(MEASURES, arguments.measures)
    require_names(MEASURES, arguments.measures or ())
    require_names(EXPERIMENTS, arguments.experiments or ())
    require_names(TASKS, [] if arguments.task is None else [arguments.task], "ruler")
    for key, _ in arguments.parameters:
        owner = key.rpartition(".")[0]
        if owner and owner not in names(TASKS):
            require_names(MEASURES, [owner], *names(EXPERIMENTS))
    if arguments.prompts is not None:
        require_readable(arguments.prompts)
    if (arguments.layers or arguments.heads) and Path(path).is_dir():
        keys = plain_keys(text_keys(stated(Path(path)), name), name)
        # Others are configured by transformers, which loads torch.
        if keys.get("model_type") in PLAIN:
            _require_within(arguments, read_checkpoint(path, configure).config)


def _given_options(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Measure, field and value of the given options that measures declare."""
    return [
        (owner, field, value)
        for owner, (option, field, _) in _options_of_measures().items()
        if (value := getattr(arguments, option.removeprefix("--").replace("-", "_"))) is not None
    ]


def _require_within(arguments: argparse.Namespace, config: Any) -> None:
    """Raise InputError for layers and heads that a configuration does not have."""
    for chosen, field, kind in (
        (arguments.layers, "num_hidden_layers", "layer"),
        (arguments.heads, "num_attention_heads", "head"),
    ):
        # Some configurations have no single number of heads; then only the job checks.
        with suppress(RuntimeError):
            count = getattr(config, field, None)
            if isinstance(count, int) and (beyond := [one for one in chosen or () if one >= count]):
                raise InputError(
                    f"{kind} {beyond[0]} was asked for; the model's are 0 to {count - 1}"
                )


def _job(arguments: argparse.Namespace, name: str, step: Step) -> Job:
    """The job that `arguments` ask for of the checkpoint `name`.

    Raises InputError for options that do not fit, unknown names before anything is read.
    """
    step(f"loading {name}")
    from repo_interp.measures.measure_catalogue import measure_named

    # Names and settings are checked before the model is loaded, which may take minutes. Those of
    # measures, which need only torch, are checked before experiments and models are imported.
    settings = [(*key.rpartition("."), text) for key, text in arguments.parameters]
    # Called for their errors: the parameters are set once the measures are known.
    for owner, _, option, text in settings:
        if owner in names(MEASURES):
            field_value(measure_named(owner), option, text, owner, fixed=("name",))
    further = _given_options(arguments)
    for owner, field, value in further:
        asked_for: Any = measure_named(owner)
        with_field(asked_for, field, value, owner)
    from repo_interp.experiments.experiment_catalogue import experiment_named, experiments_named
    from repo_interp.plots.view_catalogue import view_of

    for experiment in arguments.experiments or ():
        experiment_named(experiment)
    # Settings of a task are checked when the prompts are made.
    for owner, _, option, text in settings:
        if owner in names(EXPERIMENTS):
            field_value(experiment_named(owner), option, text, owner, fixed=("name",))
    for measure in arguments.measures or ():
        view_of(measure)  # one of another package that cannot be imported is refused here too
    from repo_interp.analysis.defaults import choose, resolve_measures
    from repo_interp.analysis.job import Job
    from repo_interp.cli.threads import use_threads
    from repo_interp.models.checkpoints import identify
    from repo_interp.models.decoder import as_decoder
    from repo_interp.models.load import open_model
    from repo_interp.models.rescaling import IdleScaling

    path = find_checkpoint(name)
    config = identify(path).config.get_text_config()
    _require_within(arguments, config)
    # The base of NTK scaling follows from the configuration
    scaling = arguments.scaling and rope_scaling(arguments.scaling, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdleScaling)  # the notes have it
        bridge = open_model(path, rope_scaling=scaling, **load_kwargs(arguments))
    use_threads(bridge, arguments.threads)
    step("making prompts")
    if arguments.prompts is None and arguments.text is None:
        prompts, task, source = make_prompts(arguments, bridge, step)
    else:
        prompts, task, source = given_prompts(arguments, bridge)
    layers, heads, parameters = arguments.layers, arguments.heads, arguments.parameters
    measures, experiments = choose(
        as_decoder(bridge), prompts, arguments.measures, layers, arguments.experiments, task
    )
    for owner, field, value in further:
        # A measure like others, added on request and only once
        measures = tuple(dict.fromkeys((*measures, owner)))
        parameters = [*parameters, (f"{owner}.{field}", value)]
    measures, experiments = _with_parameters(
        resolve_measures(measures), experiments_named(experiments), parameters
    )
    size = arguments.batch_size
    return Job(bridge, prompts, measures, layers, heads, experiments, task, size, source)


def _announce(console: Console, name: str, job: Job) -> None:
    """Print the measures and the notes on them.

    Raises InputError if there is not enough memory.
    """
    from torch import get_num_threads

    from repo_interp.analysis.memory_needed import require_memory_for_run
    from repo_interp.analysis.notes import notes_on
    from repo_interp.cli.console_tables import print_notes
    from repo_interp.runtime.console import bold

    # Refused before the first pass rather than after an hour
    require_memory_for_run(job.decoder, job.lengths, job.size, job.passes)
    many = "s" if len(job.prompts) > 1 else ""
    line = (
        f": {len(job.prompts)} prompt{many} of up to {max(job.lengths)} tokens "
        f"from {job.prompts_from}; measures {', '.join(measure.name for measure in job.measures)}"
    )
    if job.experiments:
        experiments = ", ".join(plan.experiment.name for plan in job.experiments)
        line += f", experiments {experiments} ({len(job.passes):,} more passes)"
    line += f", on {job.decoder.device}"
    if job.decoder.device.type == "cpu":
        threads = get_num_threads()
        line += f" with {threads} thread{'s' if threads > 1 else ''}"
    if processes.count() > 1:
        line += f", in {processes.count()} processes"
    console.print(bold(name, line))
    # Before the work as well as in the report: a note may be a reason to stop here.
    print_notes(console, notes_on(job.decoder, job.prompts, job.measures, gaps=job.gaps))


def _execute(job: Job, results: Results, step: Step, attributes: dict[str, str]) -> xr.DataTree:
    """Return the run, written to `results`."""
    from repo_interp.analysis.analyze import execute, layers_step
    from repo_interp.analysis.notes import Remark
    from repo_interp.cli.results import KEEP_EVERY

    def write(run: xr.DataTree) -> None:
        run.attrs |= attributes
        results.write(run)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Remark)  # the notes have it
        try:
            return execute(
                job,
                results.store,
                KEEP_EVERY,
                partial(layers_step, step),
                experiment_progress=step,
                finished=write,
            )
        except (KeyboardInterrupt, Unfinished) as interruption:
            resumable = (
                "finished batches are kept; the same command continues from there"
                if results.has_batches
                else ""
            )
            # The same type, so that its exit code stays; the text adds how to continue.
            raise type(interruption)(
                "; ".join(filter(None, (str(interruption), resumable)))
            ) from None
        except BaseException as error:
            if is_out_of_memory(error):
                raise InputError(
                    "not enough memory; give shorter prompts or a smaller --batch-size"
                ) from None
            raise


def _with_parameters(measures, experiments, parameters):
    from dataclasses import fields, is_dataclass

    by_name: dict[str, Any] = {part.name: part for part in (*measures, *experiments)}
    for key, text in parameters:
        name, dot, option = key.rpartition(".")
        # An option without an owner belongs to the only part that has it.
        if not dot:
            having = [
                part_name
                for part_name, part in by_name.items()
                if is_dataclass(part) and option in {f.name for f in fields(part)}
            ]
            if len(having) != 1:
                those = (
                    f"of {', '.join(having)}: say whose"
                    if having
                    else f"of none of {', '.join(by_name)}"
                )
                raise InputError(
                    f"--set {option}={text}: {option!r} is an option {those}, as in "
                    f"OWNER.{option}={text}"
                )
            (name,) = having
        if name not in by_name:
            raise InputError(
                f"--set {key}: the measure {name!r} is not among those measured, "
                f"{', '.join(by_name)}"
            )
        # Replaced, as measures are frozen; a wrong value is refused with the option's name.
        by_name[name] = with_field(by_name[name], option, text, name, fixed=("name",))
    return [by_name[measure.name] for measure in measures], [
        by_name[experiment.name] for experiment in experiments
    ]
