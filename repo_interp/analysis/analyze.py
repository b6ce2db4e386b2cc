"""The main job: prompts through a model, every attention layer observed once, each measure's results in a run.

    prompts -> batches -> capture -> observe -> merge -> conclude -> run
    prompts, task -> plans of experiments -> run

A batch holds prompts of similar length, padded on the right. Statistics of finished batches, and finished points of an experiment, may
be kept on disk, so that an interrupted analysis goes on where it stopped and ends with the same run. Whether it is worth writing them is
decided by the time that has passed: a short analysis writes none, and an interrupted long one writes those that it still holds. Launched
as several processes (`processes`), each observes some of the batches and computes some points, and all end with the same run.

Brings together models, tasks, measures and experiments; knows nothing about how any of them works.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from torch import nn

from repo_interp.analysis.atlas import GROUP, joined
from repo_interp.analysis.batches import BatchStore, describe_predictions, describe_prompts, make_batches, structure_for
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.analysis.computed import computed
from repo_interp.analysis.finite import Faults
from repo_interp.analysis.notes import RoundedPositions, notes_kept, rounded_positions
from repo_interp.analysis.observed import ObservedBatches, Progress, kept
from repo_interp.analysis.observing import MergedStatistics, group_of, measures_for
from repo_interp.analysis.room import batch_limit
from repo_interp.entry_points import EXPERIMENTS, called
from repo_interp.errors import InputError, NotFinite, one_line, warn
from repo_interp.experiments.catalogue import planned
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.experiments.resumable_grid import ResumableGrid
from repo_interp.failures import is_out_of_memory
from repo_interp.files import path_of
from repo_interp.measures.catalogue import measure_named
from repo_interp.measures.labels import parameter_attributes
from repo_interp.measures.statistics import Measure
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.bridge import tokenizer_of
from repo_interp.models.interventions.replacing import require_named_tokens
from repo_interp.models.provenance import identity
from repo_interp.models.reposition import attentions, layout
from repo_interp.positions.layouts import CONTEXTUAL, FIXED, ROTATED_BY_INDEX
from repo_interp.processes import from_first
from repo_interp.run import checked_group, make_run, versions
from repo_interp.side_by_side import BatchSize, SideBySide
from repo_interp.tasks.prompt import Prompt, main_span
from repo_interp.tasks.prompt import digest as prompts_digest
from repo_interp.tasks.task import Task
from repo_interp.values import PositiveOrZero, checked

ExperimentProgress = Callable[[str, int, int], None]
"""Called with the name of an experiment, and its points measured so far and in all."""


def analyze(
    bridge: nn.Module,
    prompts: Prompts,
    measures: Sequence[str | Measure] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: BatchSize | Literal["auto"] = 1,
    store: str | Path | None = None,
    progress: Progress | None = None,
    experiments: Sequence[str | Experiment | Plan] = (),
    task: Task | None = None,
    experiment_progress: ExperimentProgress | None = None,
    store_every: float = 0.0,
    finished: Callable[[xr.DataTree], None] | None = None,
) -> xr.DataTree:
    """A run of `prompts` on a repositioned model or bridge, with one node per measure, and those of each experiment.

    `prompts`: Prompts, texts or tokens, one or many (see `analysis.coercion`). `measures` are names of the catalogue or objects like
    a `Measure`; None: `default_measures`, positions and patterns whatever the layout, while `repo-interp analyze` takes what
    says something about the checkpoint's schemes: `gates` for CoPE, `components` and others where all positions are the token index.
    `experiments`: names ("perturbation", "extrapolation", "effects", "saliency", "atlas"),
    objects that follow `Experiment`, or what `planned` made of them. `layers` and `heads` (numbers; None: all) restrict what is
    measured. `task`: what experiments score `prompts` by; None: their generated tokens where all have some, else the log perplexity
    of every token. `batch_size`: prompts of a forward pass, limits of it, or "auto": as much as is worthwhile and fits into memory.
    `store`, a directory, keeps finished batches so that a repeated call goes on after an interruption; it is emptied at the end,
    after `finished`, where it is given, has taken the run. Batches are written there together, once `store_every` seconds have passed
    since the last ones were (0: each at once), and whenever the analysis ends early. What meets NaN or infinity stops alone, and the
    run's attribute `stopped` says where, and so does a measure that cannot conclude, for which `store` keeps what was observed; `notes` has
    lines about the whole. Raises InputError where prompts, layers or heads do not
    fit the model, the measures or the experiments, and NotFinite where everything stopped.
    """
    schemes = layout(bridge)
    prompts = as_prompts(prompts, bridge)
    store = None if store is None else path_of(store, "the directory of a store")
    store_every = checked(store_every, PositiveOrZero, "store_every")
    if task is not None and not isinstance(task, Task):
        raise InputError(f"task is {one_line(repr(task), 80)}; wanted a task, as ri.tasks.make_task returns it")
    chosen = measures_for(bridge, measures_named(default_measures(prompts, (), layers) if measures is None else measures))
    layers, heads = require_measurable(bridge, prompts, chosen, layers, heads)
    plans = planned(bridge, prompts, _experiments(experiments), task)
    lengths = [len(prompt.tokens) for prompt in prompts if chosen] + [n for plan in plans for n in plan.passes]
    require_named_tokens(bridge, len(prompts), lengths)
    structure = structure_for(prompts, chosen, tokenizer_of(bridge))
    size = batch_limit(bridge, batch_size)
    batches = make_batches(prompts, size, next(bridge.parameters()).device, structure) if chosen else []
    asked = (prompts, chosen, layers, heads, size, structure, plans, task)
    batch_store = BatchStore(store, "" if store is None else _fingerprint(bridge, *asked))
    notes, side_by_side = notes_kept(bridge, prompts, chosen), batch_size if isinstance(batch_size, int) else 1
    if (rounded := rounded_positions(bridge)) is not None:
        warn(rounded, RoundedPositions)
    with kept(batch_store, store_every) as (keep, keep_all):
        observed = ObservedBatches(bridge, batches, chosen, layers, heads, batch_store, keep, progress)
        groups, faults = from_first(lambda: _concluded(observed, chosen, schemes, nothing_else=not plans))
        groups |= _described(groups, prompts, tokenizer_of(bridge))
        for plan in plans:
            name = plan.experiment.name
            grid = ResumableGrid(None if store is None else Path(store) / name, store_every)
            try:
                groups |= _made_by(plan, side_by_side, grid, _of_experiment(experiment_progress, name))
            except NotFinite as error:
                faults.stop(name, str(error))
        faults.require_some([*(measure.name for measure in chosen), *(plan.experiment.name for plan in plans)])
        if faults.unconcluded:
            keep_all()
    if GROUP in groups:
        groups[GROUP] = joined(groups)
    said = {"notes": "\n".join((*notes, *faults.outputs))} if notes or faults.outputs else {}
    run = make_run(groups, _provenance(bridge, prompts) | said | faults.attributes)
    if finished is not None:
        finished(run)
    if not faults.unconcluded:
        batch_store.clear()
    return run


def default_measures(
    prompts: Sequence[Prompt], schemes: Sequence[str] = (), layers: Sequence[int] | None = None
) -> tuple[str, ...]:
    """What is measured on `prompts` when no measure is named: what the positions say, where tokens look, and what the model expects next.

    `schemes`: those of a checkpoint's layers, where the measures are to follow them: of gates, what they count; where every layer's
    positions are the token index, or none, they say nothing, and what they do to the logits is measured instead. `layers`: those that are
    measured; where these are some, predictions would need the others too.
    """
    mass = ("attention_mass",) if all(prompt.generated for prompt in prompts) else ()
    tokens = ("attention_rows", *(("predictions",) if layers is None else ()))
    if schemes and set(schemes) <= set(FIXED):
        rotated = (
            ("fake_distance", "rotation") if set(schemes) & set(ROTATED_BY_INDEX) else ()
        )  # of a sum the fit is 1, whatever is added
        return ("components", "three_axis", *rotated, *mass, *tokens)
    of_positions = ("positions", "patterns") if not schemes or set(schemes) - {*FIXED, *CONTEXTUAL} else ()
    return (*of_positions, *(("gates",) if set(schemes) & set(CONTEXTUAL) else ()), *mass, *tokens)


def measures_named(measures: Sequence[str | Measure]) -> list[Measure]:
    """`measures` as objects. Beside `maps`, a `three_axis` that is only named keeps the axes that its figure shows."""
    if not isinstance(measures, str | Iterable):
        raise InputError(f"measures are {one_line(repr(measures), 160)}; wanted names, or objects like a Measure")
    measures = [measures] if isinstance(measures, str) else list(measures)
    objects = [measure_named(measure) if isinstance(measure, str) else measure for measure in measures]
    for measure in objects:
        if isinstance(measure, type):
            raise InputError(f"the measure {measure.__name__} is a class; make one, {measure.__name__}(), or give its name")
        if not all(hasattr(measure, part) for part in ("name", "observe", "conclude")):
            raise InputError(f"{one_line(repr(measure), 160)} is no measure; wanted names, or objects like a Measure")
    names = [measure.name for measure in objects]
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise InputError(f"the measure {twice[0]!r} was asked for twice; name it once")
    beside_maps = any(measure.name == "maps" for measure in objects)
    return [
        ThreeAxis(axes="first_prompt") if beside_maps and asked == "three_axis" else made
        for asked, made in zip(measures, objects, strict=True)
    ]


def _experiments(given: Sequence[str | Experiment | Plan] | str) -> list[str | Experiment | Plan]:
    """Experiments as a list. Raises InputError for what is none: a class in place of an object among them."""
    if not isinstance(given, str | Iterable):
        raise InputError(f"experiments are {one_line(repr(given), 160)}; wanted names, or objects like an Experiment")
    experiments: list[str | Experiment | Plan] = [given] if isinstance(given, str) else list(given)
    for each in experiments:
        if isinstance(each, type):
            raise InputError(f"the experiment {each.__name__} is a class; make one, {each.__name__}(), or give its name")
        if not isinstance(each, str | Experiment | Plan):
            raise InputError(f"{one_line(repr(each), 160)} is no experiment; wanted names, or objects like an Experiment")
    return experiments


def require_measurable(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> tuple[list[int], list[int] | None]:
    """The numbers of the layers (None: all) and heads (None: all) that are measured, sorted.

    Raises InputError where prompts, layers or heads do not fit the model or the measures, and where an intervention is under way whose
    attention they cannot see.
    """
    changed = [attention.layer_idx for attention in attentions(bridge) if not attention.attends_as_built]
    blind = [each.name for each in measures if {"queries", "keys"} & set(each.needs.tensors) and not each.needs.predictions]
    if changed and blind:
        raise InputError(
            f"layer {changed[0]} attends otherwise while an intervention lasts (LM-Infinite), which {blind[0]} cannot see; measure outside "
            "of it, or read blocks.N.attn.hook_pattern under run_with_cache"
        )
    layers = _within(layers, len(layout(bridge)), "layer")
    heads = None if heads is None else _within(heads, next(attentions(bridge)).config.num_attention_heads, "head")
    for measure in measures:
        _require_chosen(measure, layers, next(attentions(bridge)).config.num_attention_heads)
    _require_prompts(prompts, measures, _vocabulary(bridge))
    return layers, heads


def _concluded(
    observed: ObservedBatches, measures: Sequence[Measure], schemes: Sequence[str], nothing_else: bool
) -> tuple[dict[str, xr.Dataset], Faults]:
    """The groups of `measures` from all batches, and what was not finite.

    Raises NotFinite where all of them stopped and `nothing_else` was asked for.
    """
    faults, names = Faults(), [measure.name for measure in measures]
    merged = {name: MergedStatistics() for name in names}
    for statistics in observed.statistics(faults, names if nothing_else else []):
        for name, each in statistics.items():
            merged[name].add(each)
    groups: dict[str, xr.Dataset] = {}
    for measure in measures:
        if measure.name in faults.stopped:
            continue
        try:
            groups[measure.name] = group_of(measure, merged[measure.name].total(), schemes)
        except InputError:
            raise
        except Exception as error:  # of another package, after what may be hours of observing
            if is_out_of_memory(error):
                raise
            faults.stop(measure.name, f"it cannot conclude ({one_line(f'{type(error).__name__}: {error}')})")
            faults.unconcluded.add(measure.name)
    return groups, faults


def _described(groups: Mapping[str, xr.Dataset], prompts: Sequence[Prompt], tokenizer: Any) -> dict[str, xr.Dataset]:
    """Those of `groups` that go with tokens, with the tokens of their prompts."""
    described = {
        name: groups[name].merge(describe_prompts(of_group, tokenizer))
        for name, of_group in (("positions", prompts), ("attention_rows", prompts[:1]))
        if name in groups
    }
    if "predictions" in groups:
        described["predictions"] = describe_predictions(groups["predictions"], prompts[0], tokenizer)
    return described


def _made_by(plan: Plan, batch_size: int, grid: ResumableGrid, progress: Progress | None) -> dict[str, xr.Dataset]:
    """The groups of an experiment, with its parameters. Raises NotFinite where it met such numbers."""
    parameters = parameter_attributes(plan.experiment.parameters)
    made, what = plan.run(batch_size, grid, progress), called(EXPERIMENTS, plan.experiment.name)
    if not isinstance(made, Mapping):
        raise InputError(f"{what} gives {type(made).__name__}; wanted groups of a run by name")
    groups = {name: checked_group(group, what) for name, group in made.items()}
    return {name: group.assign_attrs(parameters | group.attrs) for name, group in groups.items()}


def _of_experiment(progress: ExperimentProgress | None, name: str) -> Progress | None:
    return None if progress is None else lambda done, total: progress(name, done, total)


def _require_chosen(measure: Measure, layers: Sequence[int], heads: int) -> None:
    for layer, chosen in (measure.needs.heads or {}).items():
        if layer not in layers:
            measured = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{len(layers)} of {layers[0]} to {layers[-1]}"
            raise InputError(f"{measure.name} was asked for in layer {layer}; the layers that are measured: {measured}")
        _within(chosen, heads, f"{measure.name} in layer {layer}: head")


def _within(chosen: Sequence[int] | None, count: int, what: str) -> list[int]:
    if chosen is None:
        return list(range(count))
    try:
        if any(isinstance(number, bool | np.bool_) for number in chosen):
            raise TypeError("a mask")
        chosen = [operator.index(number) for number in chosen]
    except TypeError:
        raise InputError(f"{what} {chosen!r} was asked for; wanted whole numbers from 0 to {count - 1}") from None
    for number in chosen:
        if not 0 <= number < count:
            raise InputError(f"{what} {number} was asked for; the model's are 0 to {count - 1}")
    if not chosen:
        raise InputError(f"no {what} was asked for; the model's are 0 to {count - 1}")
    return sorted(set(chosen))


def _require_prompts(prompts: Sequence[Prompt], measures: Sequence[Measure], vocabulary: int) -> None:
    if not prompts:
        raise InputError("there are no prompts to analyse")
    for number, prompt in enumerate(prompts):
        if max(prompt.tokens) >= vocabulary:
            raise InputError(f"prompt {number} has token {max(prompt.tokens)}; the model's tokens are 0 to {vocabulary - 1}")
        for measure in measures:
            if len(prompt.tokens) < measure.needs.tokens:
                raise InputError(
                    f"prompt {number} has {len(prompt.tokens)} tokens, and {measure.name} with these parameters needs "
                    f"{measure.needs.tokens}; give longer prompts, or other parameters"
                )
            absent = [name for name in measure.needs.spans if not prompt.all_spans().get(name)]
            if absent:
                raise InputError(
                    f"prompt {number} has no span {absent[0]!r}, which the measure {measure.name!r} needs; "
                    f"mark it in the prompt or leave the measure out"
                )


def _vocabulary(bridge: nn.Module) -> int:
    return int(next(attentions(bridge)).config.vocab_size)


def _provenance(bridge: nn.Module, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        **identity(bridge),
        "prompts": len(prompts),
        "prompts_digest": prompts_digest(prompts),
        "main_span": main_span(prompts) or "",
        **{f"version_{name}": number for name, number in versions().items()},
    }


def _fingerprint(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    layers: Sequence[int],
    heads: Sequence[int] | None,
    batch_size: SideBySide,
    structure: object,
    plans: Sequence[Plan],
    task: Task | None,
) -> str:
    decisive = {
        "provenance": _provenance(bridge, prompts),
        "measures": {measure.name: parameter_attributes(measure.parameters) for measure in measures},
        "layers": list(layers),
        "heads": None if heads is None else list(heads),
        "batch_size": str(batch_size),
        "structure": structure,
        "experiments": {plan.experiment.name: dict(plan.experiment.parameters) for plan in plans},
        "task": None if task is None else {"name": task.name, **task.options()},
        "computes": computed(bridge, prompts[0]),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()
