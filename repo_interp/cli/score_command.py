"""`repo-interp score CHECKPOINT [TASK]`: scores by length, depth and distribution."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repo_interp.cli.arguments import (
    add_batch_size,
    add_device,
    add_formats,
    add_resume,
    add_scaling,
    add_settings,
    count,
    field_values,
    load_kwargs,
    name_list,
    rope_scaling,
    scaling_of,
    seed,
    without_owner,
)
from repo_interp.cli.checkpoint import find_readable, stem
from repo_interp.cli.scheme_files import add_scheme_files, read_scheme_files
from repo_interp.entry_points import TASKS, require_names
from repo_interp.errors import InputError
from repo_interp.runtime import processes
from repo_interp.runtime.option_texts import value_of
from repo_interp.values import Count

if TYPE_CHECKING:
    import xarray as xr

    from repo_interp.experiments.test_set_scores import Cost
    from repo_interp.runtime.console import Console
    from repo_interp.runtime.progress import Step
    from repo_interp.tasks import Task

RULER = "ruler"
HARNESS = "lm-eval:"
FEW_SHOT = "few_shot"
_OPTIONS = {
    RULER: {"variant": str, "dialect": str, "essay": str, "depth": float},
    FEW_SHOT: {"shots": tuple[Count, ...], "rows": str},
}
SHARED = True
SUMMARY = (
    "Score a checkpoint on a task, by test set and over the task's axes: a table, "
    "figures, a page and a run file."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp score`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a directory, a hub id, or the name of a zoo checkpoint",
    )
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK",
        help=f"the task (default: the checkpoint's own); {RULER}: needles in a haystack in "
        f"the checkpoint's own tokens; {FEW_SHOT}: whether answers follow the labels of examples; "
        f"{HARNESS}NAME: a task of lm-evaluation-harness that generates text, such as ruler_vt",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the results (default: runs/score-NAME, with a number if it exists)",
    )
    add_resume(parser)
    parser.add_argument(
        "--test-sets",
        type=name_list,
        metavar="A,B",
        help="test sets, such as lengths (default: all)",
    )
    parser.add_argument(
        "--count",
        type=count,
        default=200,
        metavar="N",
        help="prompts of each test set (default: 200)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument(
        "--answers",
        choices=("forced", "generated"),
        help="read the answer from one teacher-forced pass, or generate it token by token "
        "(default: forced; exact match is the same); "
        f"{RULER}, {FEW_SHOT} and {HARNESS}NAME always generate",
    )
    add_scaling(parser)
    parser.add_argument(
        "--task-size",
        metavar="NAME",
        help="size of the task (default: the size in training, else small)",
    )
    add_settings(
        parser,
        "task_options",
        f"an option of the task; of {RULER}, such as variant=multivalue or ruler.dialect=repo; of "
        f"{FEW_SHOT}, shots=1,5 and rows=FILE, a table like GLUE's",
    )
    add_device(parser)
    add_scheme_files(parser)
    add_batch_size(parser, default=32)
    add_formats(parser)


def run(arguments: argparse.Namespace) -> int:
    """Score, write and print.

    Args:
        arguments: Parsed options.

    Returns:
        0; 1 if a figure or the page failed.
    """
    from repo_interp.checkpoint_files.directories import directory_of
    from repo_interp.cli.results import ASKED, Command, draw_results, print_results
    from repo_interp.runtime.console import Console

    # The content of the files is part of the recorded options
    arguments.scheme = read_scheme_files(arguments.scheme)
    # Before the imports below, which take seconds
    path = find_readable(arguments.checkpoint)
    _require_fitting_options(arguments)
    load_kwargs(arguments)
    console = Console()
    command = Command(arguments, arguments.checkpoint, "scores")
    command.require_claimable()
    # The task follows from how the checkpoint was trained, so its files are read before the model.
    task = None if _generates(arguments.task) else _task(arguments, directory_of(path, {}))
    from torch.nn.modules.module import register_module_forward_hook

    from repo_interp.analysis.notes import notes_on
    from repo_interp.analysis.publication import claim_results
    from repo_interp.cli.console_tables import print_tables
    from repo_interp.cli.threads import use_threads
    from repo_interp.models.checkpoints import identify
    from repo_interp.models.decoder import as_decoder
    from repo_interp.models.load import open_model
    from repo_interp.models.rescaling import IdleScaling
    from repo_interp.runtime.progress import steps

    if (code := command.resume_finished(console)) is not None:
        return code
    scaling = rope_scaling(arguments.scaling, identify(path).config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdleScaling)  # the notes have it
        bridge = open_model(path, rope_scaling=scaling, **load_kwargs(arguments))
    use_threads(bridge, arguments.threads)
    # Scaling and rounded positions matter for scores too.
    for note in notes_on(as_decoder(bridge)):
        console.print(note, style="yellow")
    scored = _scoring(arguments, bridge, task)
    with (
        claim_results(
            command.out, f"score-{stem(arguments.checkpoint)}", command.replaces
        ) as results,
        command.same_question(console),
        steps(console) as step,
    ):
        step("making prompts")
        shown = _Shown(console, arguments.checkpoint, bridge, step)
        # The layer within a pass is shown, since a pass over a long prompt takes minutes.
        with register_module_forward_hook(shown.layer):  # of torch, so the model is unchanged
            scores = scored(store=results.store, progress=shown.progress, announce=shown.announce)
        # A scaling without effect is only in the notes
        scaled = arguments.scaling if "scaling" in scores.attrs else "none"
        scores.attrs |= {"scaling": scaled, ASKED: command.asked}
        # Kept answers were shared, and the first process writes and draws.
        if not processes.is_first():
            return 0
        # The numbers are safe before anything is drawn; the kept answers go.
        results.write(scores)
        results.withdraw()
        published = draw_results(results, scores, step, command.formats)
    console.print(f"prompts from {scores.attrs['prompts_from']}")
    print_tables(console, scores)
    return print_results(console, results, published)


class _Shown:
    """The cost of the scores, then how many prompts are done and which layer the pass is in."""

    def __init__(self, console: Console, checkpoint: str, model: Any, step: Step) -> None:
        self._console, self._checkpoint, self._step = console, checkpoint, step
        self._device, self._layers = model.device, model.config.num_hidden_layers
        self._done = (0, 0)

    def announce(self, cost: Cost) -> None:
        from repo_interp.runtime.console import bold

        line = (
            f": {cost.prompts:,} prompts of up to {cost.longest:,} tokens, {cost.tokens:,} tokens "
            f"and {cost.passes:,} forward passes in all, on {self._device}"
        )
        self._console.print(bold(self._checkpoint, line))
        self.progress(0, cost.prompts)

    def progress(self, done: int, total: int) -> None:
        self._done = (done, total)
        self._step("scoring prompts", done, total)

    def layer(self, module: Any, *_: Any) -> None:
        layer = getattr(module, "layer_idx", None)
        # Other modules of a layer may have the same number, which gives the same line.
        if layer is not None and self._done[1]:
            self._step("scoring prompts", *self._done, f"layer {layer + 1} of {self._layers}")


def _task(arguments: argparse.Namespace, directory: Path) -> Task:
    """The task that the checkpoint in `directory` is scored on.

    Raises InputError for names that it does not know.
    """
    from repo_interp.analysis.trained_task import task_name, task_of
    from repo_interp.tasks import make_task

    name = task_name(directory, arguments.task)
    changes = field_values(
        without_owner(arguments.task_options, name), make_task(name), f"task {name}"
    )
    task = task_of(directory, name, arguments.task_size, **changes)
    for name in arguments.test_sets or ():
        # A wrong test set is refused by making one prompt of it, before the model is loaded.
        task.prompts(1, arguments.seed, name)
    return task


def _scoring(
    arguments: argparse.Namespace, bridge, task: Task | None
) -> Callable[..., xr.DataTree]:
    """Return a function that scores the task, ruler, few_shot or a task of the harness.

    Its arguments are `store`, the directory that keeps answers, and the functions `progress` and
    `announce`, which report progress and cost.

    Raises:
        InputError: The task or an option is refused, before the function is called.
    """
    from repo_interp.analysis.score import score, score_few_shot, score_harness, score_needles

    amount = {"count": arguments.count, "seed": arguments.seed, "batch_size": arguments.batch_size}
    if task is not None:
        answers = arguments.answers or "forced"
        return partial(score, bridge, task, arguments.test_sets, answers=answers, **amount)
    # Generated answers need no `Task`: the tokenizer and lengths are enough.
    lengths = None if arguments.test_sets is None else list(map(int, arguments.test_sets))
    if arguments.task not in _OPTIONS:
        name = arguments.task.removeprefix(HARNESS)
        return partial(score_harness, bridge, name, lengths, **amount)
    made = score_needles if arguments.task == RULER else score_few_shot
    return partial(made, bridge, lengths, **amount, **_options(arguments))


def _require_fitting_options(arguments: argparse.Namespace) -> None:
    """Raises InputError if an option needs another one, or does not apply to this task."""
    from repo_interp.tasks.harness import require_task

    scaling_of(arguments.scaling)
    task = arguments.task
    if not _generates(task):
        require_names(TASKS, [] if task is None else [task], RULER, FEW_SHOT, f"{HARNESS}NAME")
        return
    # Refused rather than ignored, since a user would believe in their effect
    for name, value in (("--task-size", arguments.task_size), ("--answers", arguments.answers)):
        if value is not None:
            raise InputError(
                f"{name} is for other tasks; {task} has no sizes, and its answers are always "
                "generated"
            )
    for name in arguments.test_sets or ():
        if not (name.isascii() and name.isdecimal() and int(name)):
            raise InputError(
                f"test sets of {task} are lengths in tokens, such as 4096; got {name!r}"
            )
    if task in _OPTIONS:
        _options(arguments)
        return
    if arguments.task_options:
        raise InputError(f"{task} takes no --set; the harness has the task's options")
    require_task(task.removeprefix(HARNESS))


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the options of ruler or few_shot and their files; raises InputError for others."""
    from repo_interp.tasks.essay import essay
    from repo_interp.tasks.few_shot_text import read_rows
    from repo_interp.tasks.niah import DIALECTS, VARIANTS, one_of, require_depth

    task, options = arguments.task, {}
    known = {"variant": VARIANTS, "dialect": DIALECTS}
    for name, text in without_owner(arguments.task_options, task):
        if name not in _OPTIONS[task]:
            raise InputError(f"{task} has no option {name!r}; it has {', '.join(_OPTIONS[task])}")
        # one_of refuses unknown words; options without a list of words pass.
        one_of(name, text, known.get(name, {text: None}))
        options[name] = value_of(text, _OPTIONS[task][name], f"{task}.{name}")
    # Called for their errors
    if "rows" in options:
        read_rows(options["rows"])
    if "essay" in options:
        essay(options["essay"])
    if "depth" in options:
        require_depth(options["depth"], options.get("variant", "multikey_1"))
    return options


def _generates(task: str | None) -> bool:
    """Whether answers to a task are always generated: of ruler, few_shot or the harness."""
    return task is not None and (task in _OPTIONS or task.startswith(HARNESS))
