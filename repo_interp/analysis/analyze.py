"""The main job: observe every attention layer once and conclude measures into a run.

    prompts -> Job -> batches -> observe -> merge -> conclude -> run
    Job -> plans of experiments -> run

A batch has prompts of similar length, padded on the right. `store` keeps finished batches and
finished points of experiments on disk, so that an interrupted analysis continues where it stopped
and gives the same run. With several processes (`processes`), each observes some batches and
computes some points, and all return the same run.

Brings together models, tasks, measures and experiments; knows nothing about how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import xarray as xr
from torch import nn

from repo_interp.analysis.batches import LabelledPrompts
from repo_interp.analysis.coercion import Prompts
from repo_interp.analysis.computed import store_of
from repo_interp.analysis.faults import PASS, Fault, require_some
from repo_interp.analysis.job import Job
from repo_interp.analysis.notes import (
    Remark,
    RoundedPositions,
    SilentMeasure,
    padded_prompts,
    rounded_positions,
    run_notes,
)
from repo_interp.analysis.stored_statistics import BATCHES
from repo_interp.entry_points import EXPERIMENTS, called
from repo_interp.errors import InputError, NotFinite, warn
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.measures.labels import parameter_attributes
from repo_interp.measures.statistics import Measure, Statistics, accumulate, merge
from repo_interp.models.lasting import at_rest
from repo_interp.models.side_by_side import BatchSize
from repo_interp.run import KEPT, checked_group, make_run, require_name
from repo_interp.runtime import processes
from repo_interp.runtime.processes import from_first
from repo_interp.storage.store import Progress, Store
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Task

if TYPE_CHECKING:
    from repo_interp.runtime.progress import Step
from repo_interp.values import PositiveOrZero, checked

Results = Mapping[str, Statistics | Fault]
"""Result of `Job.observe` for a batch."""
Value = TypeVar("Value")


def analyze(
    bridge: nn.Module,
    prompts: Prompts | None = None,
    measures: Sequence[str | Measure] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: BatchSize | Literal["auto"] = "auto",
    store: str | Path | None = None,
    progress: Progress | None = None,
    experiments: Sequence[str | Experiment | Plan] | None = None,
    task: Task | None = None,
    experiment_progress: Callable[[str, int, int], None] | None = None,
    store_every: float = 0.0,
    finished: Callable[[xr.DataTree], None] | None = None,
) -> xr.DataTree:
    """Measure prompts on a model, as `repo-interp analyze` does.

    A Hugging Face model that is not repositioned is observed without changing it. A measure or
    experiment that finds NaN or infinity stops, while others continue; the run's attribute
    `stopped` says where. The same holds for a measure that cannot conclude; `store` then keeps the
    observations. `notes` has lines about the whole run; some are warnings too (missing prompts,
    padding).

    Args:
        bridge: Bridge, Hugging Face model or repositioned model.
        prompts: Prompts, texts or tokens, one or many (see `analysis.coercion`); None: of the task
            that the checkpoint was trained on, else a short text (`defaults.default_prompts`).
        measures: Names of the catalogue, or objects like a `Measure`; None: those that fit the
            schemes of the layers (`defaults.default_measures`).
        layers: Layers to measure; None: all.
        heads: Heads to measure; None: all.
        batch_size: Prompts of a forward pass, limits of it, or "auto": as many as pay off and fit
            into memory.
        store: Directory that keeps finished batches, so that a repeated call continues after an
            interruption; it is emptied at the end. None: nothing is kept.
        progress: Called with layers observed so far and in all; None here and for
            `experiment_progress`: a bar on standard error, or lines where that is no terminal.
        experiments: Names of the catalogue, objects that follow `Experiment`, or plans that
            `planned` made; None: `defaults.default_experiments` if neither measures nor layers are
            named, else none.
        task: Task by which experiments score `prompts`; None: by generated tokens if all prompts
            have some, else by the log perplexity of every token.
        experiment_progress: Called with the name of an experiment, and its points measured so far
            and in all.
        store_every: Seconds between writes to `store`; 0: every batch at once. An analysis that
            ends early writes the batches that wait.
        finished: Called with the run before `store` is emptied.

    Returns:
        Run with one node per measure, and the nodes of the experiments.

    Raises:
        InputError: If prompts, layers or heads do not fit the model, the measures or the
            experiments.
        NotFinite: If everything stopped.
    """
    job = Job(bridge, prompts, measures, layers, heads, experiments, task, batch_size)
    with ExitStack() as shown:
        if progress is None and experiment_progress is None:
            # Only who sees a bar imports what draws it
            from repo_interp.runtime.console import Console
            from repo_interp.runtime.progress import steps

            step = shown.enter_context(steps(Console(stderr=True)))
            progress, experiment_progress = partial(layers_step, step), step
        return execute(job, store, store_every, progress, experiment_progress, finished=finished)


def layers_step(step: Step, done: int, total: int) -> None:
    """Report layers observed, and after the last that measures conclude, which may take minutes.

    Args:
        step: Function of `steps`.
        done: Layers observed so far.
        total: Layers in all.
    """
    if done < total:
        step("observing layers", done, total)
    else:
        step("concluding measures")


def execute(
    job: Job,
    store: str | Path | None = None,
    store_every: float = 0.0,
    progress: Progress | None = None,
    experiment_progress: Callable[[str, int, int], None] | None = None,
    finished: Callable[[xr.DataTree], None] | None = None,
) -> xr.DataTree:
    """Observe all batches of a job, conclude its measures and run its experiments.

    Args:
        job: Job to run.
        store: Directory for finished work; None: nothing is kept.
        store_every: Seconds between writes to `store`; 0: at once.
        progress: Called with layers observed so far and in all.
        experiment_progress: Called with the name of an experiment, and its points measured so far
            and in all.
        finished: Called with the run before `store` is emptied.

    Returns:
        The run.

    Raises:
        NotFinite: If everything stopped.
    """
    store_every = checked(store_every, PositiveOrZero, "store_every")
    provenance = job.provenance
    changed = provenance.get("changed", "")
    notes = run_notes(job.decoder, job.prompts, job.measures, changed, job.gaps)
    if (rounded := rounded_positions(job.decoder)) is not None:
        warn(rounded, RoundedPositions)
    if job.measures and (padded := padded_prompts(job.decoder, job.prompts)) is not None:
        warn(padded, Remark)
    if job.remark:
        notes = (job.remark, *notes)
        warn(job.remark, Remark)
    for silent in job.gaps.silent.values():
        warn(silent, SilentMeasure)
    # which experiments may need
    gradients = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    kept = store_of(job.decoder, job.prompts[0], job.question, store, store_every)
    with gradients, at_rest(job.decoder), kept:
        faults: dict[str, Fault] = {}
        # `_observe` is lazy and `_measure` adds to the same `faults`: a measure that stops in one
        # batch is not observed in the next
        observed = _observe(job, kept, faults, progress)
        # Merging is not shared: every process gets the groups of the first.
        groups, faults, passes = from_first(lambda: _measure(job, observed, faults))
        for plan in job.experiments:
            try:
                # Groups so far are passed, since a second group of a name would replace the first
                groups |= _run_experiment(job, plan, kept, experiment_progress, groups)
            except NotFinite as error:
                faults.setdefault(plan.experiment.name, Fault(str(error)))
        asked = [*(m.name for m in job.measures), *(p.experiment.name for p in job.experiments)]
        require_some(asked, faults, job.decoder.dtype)
        # Statistics of measures whose conclude() raised are kept until it is fixed.
        unconcluded = any(fault.concluding for fault in faults.values())
        if unconcluded:
            kept.write()
    for plan in job.experiments:
        groups |= plan.experiment.completed(groups)
    attributes = {
        "notes": "\n".join((*notes, *passes)),
        "stopped": "\n".join(f"{name}: {fault.reason}" for name, fault in faults.items()),
    }
    run = make_run(groups, provenance | {name: text for name, text in attributes.items() if text})
    if finished is not None:
        # The caller writes the run here, before the batches that could remake it are deleted
        finished(run)
    if not unconcluded:
        kept.clear()
    return run


def stream(
    bridge: nn.Module,
    prompts: Iterable[Prompt],
    measures: Sequence[Measure],
    batch_size: int = 8,
    layers: Sequence[int] | None = None,
) -> dict[str, xr.Dataset]:
    """Measure any number of prompts in constant memory.

    Prompts come from an iterator on demand. All statistics of the measures must be sums
    (`Components(prompts="mean")`), since statistics per prompt would accumulate.

    Args:
        bridge: Bridge, Hugging Face model or repositioned model.
        prompts: Prompts to measure.
        measures: Measures whose statistics are sums.
        batch_size: Prompts of a forward pass.
        layers: Layers to observe; None: all. A pass ends after the last of them.

    Returns:
        Groups of a run per measure, as `analyze` makes them.

    Raises:
        InputError: If there is no prompt, or a measure keeps something of every prompt.
        NotFinite: If a measure stopped, or a pass did not end in numbers.
    """
    parts: dict[str, list[Statistics]] = {measure.name: [] for measure in measures}
    source, begun, job = iter(prompts), 0, None
    while some := list(islice(source, batch_size)):
        # A job per chunk, since prompts of an iterator are checked as they come
        job = Job(bridge, some, measures, layers, batch_size=batch_size)
        for batch in job.batches:
            # A job numbers its prompts from 0; statistics and faults name them by the whole stream
            numbers = tuple(begun + number for number in batch.numbers)
            results = job.observe(replace(batch, numbers=numbers))
            for name, statistics in _sound(results, job).items():
                if kept := statistics.arrays["per_prompt"].values:
                    raise InputError(
                        f"{name} keeps {', '.join(kept)} of every prompt: use analyze, or sums"
                    )
                accumulate(parts[name], statistics)
        begun += len(some)
    if job is None:
        raise InputError("there are no prompts to measure")
    totals = {name: merge(of_measure) for name, of_measure in parts.items()}
    return _sound(job.conclude(totals), job)


def _sound(results: Mapping[str, Value | Fault], job: Job) -> dict[str, Value]:
    """`results` without faults; raises NotFinite where there is one."""
    faults = {name: result for name, result in results.items() if isinstance(result, Fault)}
    # The fault of a measure names layer and head; the fault of a pass says less, so it is last
    passed = faults.pop(PASS, None)
    require_some(list(faults)[:1], faults, job.decoder.dtype)
    if passed is not None:
        raise NotFinite(passed.reason)
    return {name: result for name, result in results.items() if not isinstance(result, Fault)}


def _observe(
    job: Job, store: Store, stopped: Collection[str], progress: Progress | None
) -> Iterator[Results]:
    """Yield the results of all batches in order; finished ones come from `store`.

    A single process observes a batch on demand, without measures that `stopped` so far. Several
    processes divide the batches beforehand.
    """
    batches, layers, several = job.batches, len(job.layers), processes.count() > 1

    def report(done: int) -> None:
        if progress is not None:
            progress(done, len(batches) * layers)

    def observe(number: int) -> Results:
        first = number * layers
        # Several processes finish batches in any order, so no layer is at a known place in all
        return job.observe(
            batches[number], stopped, lambda done: None if several else report(first + done)
        )

    return store.stream(
        # File names in the store; leading zeros make them sort in the order of the batches
        {f"batch-{number:05d}": partial(observe, number) for number in range(len(batches))},
        lambda done, _: report(done * layers),
        BATCHES,
    )


def _measure(
    job: Job, observed: Iterable[Results], faults: dict[str, Fault]
) -> tuple[dict[str, xr.Dataset], dict[str, Fault], list[str]]:
    """Return groups per measure, `faults` with new ones, and faults of passes.

    Groups hold the tokens of their prompts.

    Raises:
        NotFinite: All measures stopped, and there is no experiment.
    """
    parts: dict[str, list[Statistics]] = {measure.name: [] for measure in job.measures}
    passes: list[str] = []
    for results in observed:
        for name, result in results.items():
            if isinstance(result, Statistics):
                accumulate(parts[name], result)
            elif name != PASS:
                faults.setdefault(name, result)
            # Once a measure has met NaN, a pass that ends in NaN tells nothing new
            elif not faults:
                passes.append(result.reason)
        # Experiments can still give a run where all measures stopped
        if not job.experiments:
            require_some(parts, faults, job.decoder.dtype)
    totals = {name: faults.get(name) or merge(of_measure) for name, of_measure in parts.items()}
    groups: dict[str, xr.Dataset] = {}
    measures = {measure.name: measure for measure in job.measures}
    tokens = LabelledPrompts(job.prompts, job.decoder.tokenizer)
    for name, group in job.conclude(totals).items():
        if isinstance(group, Fault):
            faults.setdefault(name, group)
        else:
            groups[name] = measures[name].add_tokens(group, tokens)
    return groups, faults, passes


def _run_experiment(
    job: Job,
    plan: Plan,
    store: Store,
    progress: Callable[[str, int, int], None] | None,
    taken: Collection[str],
) -> dict[str, xr.Dataset]:
    """Groups of an experiment, with its parameters, none by a name that is `taken`.

    Raises NotFinite where it met such numbers.
    """
    name, parameters = plan.experiment.name, parameter_attributes(plan.experiment.parameters)
    source = called(EXPERIMENTS, name)
    if progress is not None:
        # Its first point may take minutes, under the name of the step before; how many there are
        # is only known to it
        progress(name, 0, 0)
    groups = plan.run(
        job.batch_size if isinstance(job.batch_size, int) else 1,
        store.part(name),
        None if progress is None else partial(progress, name),
    )
    if not isinstance(groups, Mapping):
        raise InputError(f"{source} gives {type(groups).__name__}; wanted groups of a run by name")
    for group in groups:
        require_name(group, f"a group of {source}", (*KEPT, *taken))
    groups = {name: checked_group(group, source) for name, group in groups.items()}
    # An experiment's attributes of its group override its parameters
    return {name: group.assign_attrs(parameters | group.attrs) for name, group in groups.items()}
