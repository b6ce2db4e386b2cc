"""The main job: prompts through a model, every attention layer observed once, each measure's results in a run.

    prompts -> batches -> capture -> observe -> merge -> conclude -> run
    prompts, task -> experiments -> run

A batch holds prompts of similar length, padded on the right. Statistics of a finished batch, and finished points of an experiment, may
be kept on disk, so that an interrupted analysis goes on where it stopped and ends with the same run.

Brings together models, tasks, measures and experiments; knows nothing about how any of them works.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import nn

from repo_interp.analysis.batch_store import BatchStore
from repo_interp.analysis.batches import Batch, describe_prompts, make_batches, structure_for
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.errors import InputError
from repo_interp.experiments.catalogue import Experiment, planned
from repo_interp.experiments.points import Points
from repo_interp.inputs import AttentionInputs, select_heads
from repo_interp.measures.catalogue import for_training_length, measure_named, with_parameter
from repo_interp.measures.statistics import Measure, Statistics, merge
from repo_interp.models.capture import capture
from repo_interp.models.provenance import identity, length_trained
from repo_interp.models.reposition import attentions, layout
from repo_interp.run import make_run, versions, with_schemes
from repo_interp.tasks.prompts import Prompt
from repo_interp.tasks.prompts import digest as prompts_digest
from repo_interp.tasks.task import Task

Progress = Callable[[int, int], None]
"""Called with layers observed so far and in all."""
ExperimentProgress = Callable[[str, int, int], None]
"""Called with the name of an experiment, and its points measured so far and in all."""


def analyze(
    bridge: nn.Module,
    prompts: Prompts,
    measures: Sequence[str | Measure] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: int = 1,
    store: str | Path | None = None,
    progress: Progress | None = None,
    experiments: Sequence[str | Experiment] = (),
    task: Task | None = None,
    experiment_progress: ExperimentProgress | None = None,
) -> xr.DataTree:
    """Measure `prompts` on a repositioned model or bridge; the run has one node a measure, and those of each experiment.

    `prompts`: Prompts, texts or tokens, one or many (see `analysis.coercion`). `measures` are names of the catalogue or objects that follow
    the protocol `Measure`; None: positions, patterns and, where every prompt marks generated tokens, attention_mass.
    `experiments` names ("perturbation",
    "extrapolation") or objects that follow `Experiment`. `layers` and `heads` (numbers; None: all) restrict what is measured.
    `task`: what experiments score `prompts` by; None: their generated tokens where all have some, else the log perplexity of every
    token. `store`, a directory, keeps finished batches so that a repeated call goes on after an interruption; it is emptied at the
    end. Raises InputError where prompts, layers or heads do not fit the model, the measures or the experiments.
    """
    prompts = as_prompts(prompts, bridge)
    named = measures_named(default_measures(prompts) if measures is None else measures)
    chosen = [for_training_length(measure, length_trained(bridge)) for measure in named]
    schemes = layout(bridge)
    layers = _within(layers, len(schemes), "layer")
    heads = None if heads is None else _within(heads, next(attentions(bridge)).config.num_attention_heads, "head")
    _require_prompts(prompts, chosen, _vocabulary(bridge))
    plans = planned(bridge, prompts, experiments, task)
    structure = structure_for(prompts, chosen, getattr(bridge, "tokenizer", None))
    batches = make_batches(prompts, batch_size, next(bridge.parameters()).device, structure) if chosen else []
    kept = BatchStore(store, _fingerprint(bridge, prompts, chosen, layers, heads, batch_size, structure, plans, task))
    gathered = {measure.name: Gathered() for measure in chosen}
    for number, batch in enumerate(batches):
        found = kept.read(number)
        if found is None:
            found = observe_batch(bridge, batch, chosen, layers, heads, _advance(progress, number, len(batches), len(layers)))
            kept.write(number, found)
        for name, statistics in found.items():
            gathered[name].add(statistics)
        if progress is not None:
            progress((number + 1) * len(layers), len(batches) * len(layers))
    groups = {measure.name: _group(measure, gathered[measure.name].whole(), schemes) for measure in chosen}
    if "positions" in groups:
        groups["positions"] = groups["positions"].merge(describe_prompts(prompts, getattr(bridge, "tokenizer", None)))
    for experiment, plan in plans:
        points = Points(None if store is None else Path(store) / experiment.name)
        found = plan.run(batch_size, points, _of_experiment(experiment_progress, experiment.name))
        stated = {name: _plain(value) for name, value in experiment.parameters.items()}
        groups |= {name: group.assign_attrs(stated | group.attrs) for name, group in found.items()}
    kept.clear()
    return make_run(groups, _provenance(bridge, prompts))


def default_measures(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """What is measured on `prompts` when no measure is named."""
    always = ("positions", "patterns")
    return (*always, "attention_mass") if all(prompt.generated for prompt in prompts) else always


def measures_named(measures: Sequence[str | Measure]) -> list[Measure]:
    """`measures` with names as objects. Beside `maps`, a `three_axis` that is only named keeps the axes that its figure shows."""
    beside_maps = any(measure == "maps" or getattr(measure, "name", "") == "maps" for measure in measures)
    found = []
    for measure in measures:
        made = measure_named(measure) if isinstance(measure, str) else measure
        found.append(with_parameter(made, "axes", "first_prompt") if beside_maps and measure == "three_axis" else made)
    return found


class Gathered:
    """What a measure has kept so far: sums added up as they come, so that they take the memory of one batch; prompts side by side."""

    def __init__(self) -> None:
        self._per_prompt: list[xr.Dataset] = []
        self._sums = xr.Dataset()

    def add(self, statistics: Statistics) -> None:
        """Take in the statistics of one more batch."""
        self._per_prompt.append(statistics.per_prompt)
        self._sums = merge([Statistics(sums=self._sums), Statistics(sums=statistics.sums)]).sums

    def whole(self) -> Statistics:
        """All batches merged."""
        return merge([*(Statistics(per_prompt=one) for one in self._per_prompt), Statistics(sums=self._sums)])


def observe_batch(
    bridge: nn.Module,
    batch: Batch,
    measures: Sequence[Measure],
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Statistics]:
    """What each measure keeps of one batch: one forward pass. `advance` is called with the number of layers observed."""
    parts: dict[str, list[Statistics]] = {measure.name: [] for measure in measures}

    def receive(inputs: AttentionInputs) -> None:
        if heads is not None:
            inputs = select_heads(inputs, heads)
        for measure in measures:
            spans = {**batch.spans, **batch.structure} if hasattr(measure, "segment_kinds") else batch.spans
            parts[measure.name].append(_with_head_numbers(measure.observe(inputs, spans), heads))
        if advance is not None:
            advance(len(parts[measures[0].name]))

    capture(bridge, batch.tokens, batch.valid, torch.as_tensor(batch.numbers), receive, layers)
    return {name: merge(found) for name, found in parts.items()}


def _group(measure: Measure, statistics: Statistics, schemes: Sequence[str]) -> xr.Dataset:
    group = with_schemes(measure.conclude(statistics), schemes)
    return group.assign_attrs({name: _plain(value) for name, value in measure.parameters.items()})


def _with_head_numbers(statistics: Statistics, heads: Sequence[int] | None) -> Statistics:
    if heads is None:
        return statistics
    numbered = [
        dataset.assign_coords(head=list(heads)) if "head" in dataset.dims else dataset
        for dataset in (statistics.per_prompt, statistics.sums)
    ]
    return Statistics(*numbered)


def _advance(progress: Progress | None, batch: int, batches: int, layers: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda observed: progress(batch * layers + observed, batches * layers)


def _of_experiment(progress: ExperimentProgress | None, name: str) -> Progress | None:
    return None if progress is None else lambda done, total: progress(name, done, total)


def _within(chosen: Sequence[int] | None, count: int, what: str) -> list[int]:
    if chosen is None:
        return list(range(count))
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
            absent = [name for name in measure.required_spans if not prompt.all_spans().get(name)]
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
        **{f"version_{name}": number for name, number in versions().items()},
    }


def _fingerprint(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    layers: Sequence[int],
    heads: Sequence[int] | None,
    batch_size: int,
    structure: object,
    experiments: Sequence[tuple[Experiment, object]],
    task: Task | None,
) -> str:
    stated = {
        "provenance": _provenance(bridge, prompts),
        "measures": {measure.name: {name: _plain(value) for name, value in measure.parameters.items()} for measure in measures},
        "layers": list(layers),
        "heads": None if heads is None else list(heads),
        "batch_size": batch_size,
        "structure": structure,
        "experiments": {one.name: dict(one.parameters) for one, _ in experiments},
        "task": None if task is None else {"name": task.name, **task.options()},
    }
    return hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
