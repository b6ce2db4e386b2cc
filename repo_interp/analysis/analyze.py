"""The main job: prompts through a model, every attention layer observed once, each measure's
results in a run.

    prompts -> request -> batches -> observe -> merge -> conclude -> run
    request -> plans of experiments -> run

A batch holds prompts of similar length, padded on the right. Finished batches, and finished points
of an experiment, may be kept on disk (`store`), so that an interrupted analysis goes on where it
stopped and ends with the same run. Launched as several processes (`processes`), each observes some
of the batches and computes some points, and all end with the same run.

Brings together models, tasks, measures and experiments; knows nothing about how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import xarray as xr
from torch import nn

from repo_interp.analysis.atlas import GROUP, joined
from repo_interp.analysis.batches import describe_predictions, describe_prompts
from repo_interp.analysis.coercion import Prompts
from repo_interp.analysis.computed import store_of
from repo_interp.analysis.finite import Faults
from repo_interp.analysis.notes import RoundedPositions, notes_kept, rounded_positions
from repo_interp.analysis.observing import MergedStatistics, Observation, group_of, observations
from repo_interp.analysis.request import Execution, Request
from repo_interp.console import Console
from repo_interp.entry_points import EXPERIMENTS, called
from repo_interp.errors import InputError, NotFinite, one_line, warn
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.failures import is_out_of_memory
from repo_interp.measures.labels import parameter_attributes
from repo_interp.measures.statistics import Measure
from repo_interp.models.provenance import identity
from repo_interp.models.reposition import at_rest
from repo_interp.processes import from_first
from repo_interp.progress import steps
from repo_interp.run import KEPT, checked_group, make_run, require_name, versions
from repo_interp.side_by_side import BatchSize
from repo_interp.store import Progress, Store
from repo_interp.tasks.prompt import digest as prompts_digest
from repo_interp.tasks.prompt import main_span
from repo_interp.tasks.task import Task


def analyze(
    bridge: nn.Module,
    prompts: Prompts | None = None,
    measures: Sequence[str | Measure] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: BatchSize | Literal["auto"] = 1,
    store: str | Path | None = None,
    progress: Progress | None = None,
    experiments: Sequence[str | Experiment | Plan] | None = None,
    task: Task | None = None,
    experiment_progress: Callable[[str, int, int], None] | None = None,
    store_every: float = 0.0,
    finished: Callable[[xr.DataTree], None] | None = None,
) -> xr.DataTree:
    """A run of `prompts` on a bridge or a model, with one node per measure, and those of each
    experiment.

    Without anything else it does what `repo-interp analyze` does. A model of Hugging Face that was
    not repositioned is observed as it is, and stays as it is. `prompts`: Prompts, texts or tokens,
    one or many (see `analysis.coercion`); None: of the task that the checkpoint was trained on,
    else a short text (`defaults.default_prompts`). `measures` are names of the catalogue or objects
    like a `Measure`; None: what says something about the schemes of the layers
    (`request.default_measures`). `experiments`: names ("perturbation", "extrapolation", "effects",
    "kinds", "saliency", "atlas"), objects that follow `Experiment`, or what `planned` made of them;
    None: where no measures and layers are named either, what `defaults.default_experiments` says.
    `layers` and `heads` (numbers; None: all) restrict what is measured. `task`: what experiments
    score `prompts` by; None: their generated tokens where all have some, else the log perplexity of
    every token. `batch_size`: prompts of a forward pass, limits of it, or "auto": as much as is
    worthwhile and fits into memory. `progress` is called with layers observed and in all,
    `experiment_progress` with the name of an experiment and its points; None for both: a bar on
    standard error, or a line now and then where that is no terminal. `store`, a directory, keeps
    finished batches so that a repeated call goes on after an interruption; it is emptied at the
    end, after `finished`, where it is given, has taken the run. Batches are written there together,
    once `store_every` seconds have passed since the last ones were (0: each at once), and whenever
    the analysis ends early. What meets NaN or infinity stops alone, and the run's attribute
    `stopped` says where, and so does a measure that cannot conclude, for which `store` keeps what
    was observed; `notes` has lines about the whole. Raises InputError where prompts, layers or
    heads do not fit the model, the measures or the experiments, and NotFinite where everything
    stopped.
    """
    with ExitStack() as shown:
        if progress is None and experiment_progress is None:
            step = shown.enter_context(steps(Console(stderr=True)))
            progress, experiment_progress = partial(step, "observing layers"), step
        execution = Execution(
            batch_size, store, store_every, progress, experiment_progress, finished=finished
        )
        return carried_out(
            Request(bridge, prompts, measures, layers, heads, experiments, task, execution)
        )


def carried_out(request: Request) -> xr.DataTree:
    """The run that `request` asks for. Raises NotFinite where everything stopped."""
    bridge, execution = request.bridge, request.execution
    provenance = _provenance(request)
    notes = notes_kept(bridge, request.prompts, request.measures, provenance.get("changed", ""))
    if (rounded := rounded_positions(bridge)) is not None:
        warn(rounded, RoundedPositions)
    # which experiments may need
    gradients = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with gradients, at_rest(bridge), _store(request) as store:
        faults = Faults()
        observed = observations(request, store, faults.stopped)
        groups, faults = from_first(lambda: _concluded(request, observed, faults))
        if execution.measured is not None and groups and request.experiments:
            execution.measured(make_run(groups, provenance))
        for plan in request.experiments:
            try:
                groups |= _made_by(plan, execution, store.part(plan.experiment.name), groups)
            except NotFinite as error:
                faults.stop(plan.experiment.name, str(error))
        faults.require_some(request.names)
        if faults.unconcluded:
            store.write()
    if GROUP in groups:
        groups[GROUP] = joined(groups)
    said = {"notes": "\n".join((*notes, *faults.outputs))} if notes or faults.outputs else {}
    run = make_run(groups, provenance | said | faults.attributes)
    if execution.finished is not None:
        execution.finished(run)
    if not faults.unconcluded:
        store.clear()
    return run


def _concluded(
    request: Request, observed: Iterable[Observation], faults: Faults
) -> tuple[dict[str, xr.Dataset], Faults]:
    """The groups of all measures, with the tokens that they go with, and what was not finite.

    Raises NotFinite where all measures stopped and nothing else was asked for.
    """
    groups, schemes = {}, request.decoder.schemes
    merged = {measure.name: MergedStatistics() for measure in request.measures}
    for observation in observed:
        faults.add(observation.faults)
        if not request.experiments:
            faults.require_some(merged)
        for name, statistics in observation.statistics.items():
            merged[name].add(statistics)
    for measure in request.measures:
        if measure.name in faults.stopped:
            continue
        try:
            groups[measure.name] = group_of(measure, merged[measure.name].total(), schemes)
        except InputError:
            raise
        except Exception as error:  # of another package, after what may be hours of observing
            if is_out_of_memory(error):
                raise
            faults.stop(
                measure.name, f"it cannot conclude ({one_line(f'{type(error).__name__}: {error}')})"
            )
            faults.unconcluded.add(measure.name)
    return groups | _described(groups, request), faults


def _described(groups: Mapping[str, xr.Dataset], request: Request) -> dict[str, xr.Dataset]:
    """Those of `groups` that go with tokens, with the tokens of their prompts."""
    prompts, tokenizer = request.prompts, request.decoder.tokenizer
    described = {}
    if "positions" in groups:
        described["positions"] = groups["positions"].merge(describe_prompts(prompts, tokenizer))
    if "attention_rows" in groups:
        rows = groups["attention_rows"]
        count = 1 + int(rows["prompt"].max()) if "prompt" in rows else 1
        described["attention_rows"] = rows.merge(
            describe_prompts(prompts[:count], tokenizer), fill_value={"prompt_key": -1}
        )
    if "predictions" in groups:
        described["predictions"] = describe_predictions(
            groups["predictions"], prompts[0], tokenizer
        )
    return described


def _made_by(
    plan: Plan, execution: Execution, store: Store, taken: Collection[str]
) -> dict[str, xr.Dataset]:
    """The groups of an experiment, with its parameters, none by a name that is `taken`.

    Raises NotFinite where it met such numbers.
    """
    name, parameters, told = (
        plan.experiment.name,
        parameter_attributes(plan.experiment.parameters),
        execution.experiment_progress,
    )
    made = plan.run(
        execution.prompts_together,
        store,
        None if told is None else lambda done, total: told(name, done, total),
    )
    what = called(EXPERIMENTS, name)
    if not isinstance(made, Mapping):
        raise InputError(f"{what} gives {type(made).__name__}; wanted groups of a run by name")
    for group in made:
        require_name(group, f"a group of {what}", (*KEPT, *taken))
    groups = {name: checked_group(group, what) for name, group in made.items()}
    return {name: group.assign_attrs(parameters | group.attrs) for name, group in groups.items()}


def _provenance(request: Request) -> dict[str, Any]:
    return {
        **identity(request.bridge),
        "prompts": len(request.prompts),
        "prompts_digest": prompts_digest(request.prompts),
        "prompts_from": request.prompts_from,
        "main_span": main_span(request.prompts) or "",
        **{f"version_{name}": number for name, number in versions().items()},
    }


def _store(request: Request) -> Store:
    """What is kept of just this request."""
    question = {
        "prompts": prompts_digest(request.prompts),
        "measures": {
            measure.name: parameter_attributes(measure.parameters) for measure in request.measures
        },
        "layers": request.layers,
        "heads": request.heads,
        "batch_size": str(request.size),
        "structure": request.structure,
        "experiments": {
            plan.experiment.name: dict(plan.experiment.parameters) for plan in request.experiments
        },
        "task": None
        if request.task is None
        else {"name": request.task.name, **request.task.options()},
    }
    return store_of(
        request.bridge,
        request.prompts[0],
        question,
        request.execution.store,
        request.execution.store_every,
    )
