"""Batches through a model, each observed once and merged with those before it: what `analyze` and `stream` share.

    total <- merge(total, observe(batch))

Sums are merged as they come, so that they take the memory of one batch; what belongs to single prompts is put side by side. `stream`
takes any number of prompts in constant memory: they are drawn from an iterator as they are needed, and every measure's statistics are
sums (`Components(prompts="mean")`), since those of single prompts would pile up.

Knows nothing about how prompts are made or what is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray as xr
from torch import nn

from repo_interp.analysis.batches import Batch, make_batches
from repo_interp.analysis.finite import Faults, fault_in, fault_of_outputs
from repo_interp.entry_points import MEASURES, called
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, select_heads
from repo_interp.measures.labels import Arrays, parameter_attributes
from repo_interp.measures.statistics import (
    Measure,
    Statistics,
    as_measure,
    checked_statistics,
    merge,
    of_training_length,
    require_declared,
    share,
)
from repo_interp.models.capture import decode, observing, predictions_of
from repo_interp.models.provenance import length_trained
from repo_interp.models.reposition import layout
from repo_interp.run import checked_group, with_schemes
from repo_interp.tasks.prompt import Prompt


class MergedStatistics:
    """The statistics of one measure over the batches so far."""

    def __init__(self) -> None:
        self._of_prompts: list[Statistics] = []
        self._sums = Statistics()

    def add(self, statistics: Statistics) -> None:
        """Merge in the statistics of one more batch."""
        of_prompts, sums = dict(statistics.arrays), statistics.arrays["sums"]
        if of_prompts["per_prompt"].values or of_prompts["first_prompt"].values:
            self._of_prompts.append(Statistics(**(of_prompts | {"sums": Arrays()})))
        self._sums = merge([self._sums, Statistics(sums=sums)])

    def total(self) -> Statistics:
        """The statistics of all batches."""
        return merge([*self._of_prompts, self._sums])


def measures_for(bridge: nn.Module, measures: Sequence[Measure]) -> list[Measure]:
    """`measures` - ours, or objects of other packages - for a model, with the length that it was trained on."""
    chosen = [of_training_length(as_measure(measure), length_trained(bridge)) for measure in measures]
    for measure in chosen:
        require_declared(measure)
    return chosen


@torch.no_grad()
def observe_batch(
    bridge: nn.Module,
    batch: Batch,
    measures: Sequence[Measure],
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    advance: Callable[[int], None] | None = None,
    faults: Faults | None = None,
) -> dict[str, Statistics]:
    """Statistics of one batch by measure, from one forward pass. `advance` is called with the number of layers observed.

    A measure that meets numbers that are not finite stops, and is told to `faults`; None: NotFinite is raised.
    """
    parts: dict[str, list[Statistics]] = {measure.name: [] for measure in measures}
    found, observed = Faults() if faults is None else faults, 0

    def receive(inputs: AttentionInputs) -> None:
        nonlocal observed
        here = inputs.queries.device
        whole = replace(inputs, tokens=batch.tokens.to(here))
        common = _of_heads(whole, heads)
        sound = [
            measure
            for measure in measures
            if measure.name not in found.stopped
            and measure.needs.heads is None
            and not common.broken.keys() & set(measure.needs.tensors)
        ]
        share(sound, common.inputs, {name: mask.to(here) for name, mask in batch.spans.items()})
        for measure in measures:
            own = measure.needs.heads
            if measure.name in found.stopped or (own is not None and inputs.layer not in own):
                continue
            of = common if own is None else _of_heads(whole, own[inputs.layer])
            statistics, fault = _observe_layer(measure, of, batch)
            if statistics is not None:
                parts[measure.name].append(statistics)
            if fault is not None:
                found.stop(measure.name, fault)
        observed += 1
        if advance is not None:
            advance(observed)

    numbers = torch.as_tensor(batch.numbers)
    reading = [measure for measure in measures if measure.needs.predictions]
    with torch.no_grad():
        with observing(bridge, batch.valid, numbers, receive, layers):
            hidden = decode(bridge, batch.tokens, batch.valid, None if reading else max(layers, default=None))
        fault = fault_of_outputs(hidden, batch.valid, batch.numbers)
        if fault is not None and not found.stopped:
            found.outputs.append(fault)
        for measure in reading:
            if fault is not None:
                found.stop(measure.name, fault)
                continue
            predictions = predictions_of(bridge, hidden.to(batch.tokens.device), batch.tokens, batch.valid, numbers)
            parts[measure.name].append(measure.observe_predictions(predictions, batch.spans))
    if faults is None:
        found.require_none()
    return {name: merge(statistics) for name, statistics in parts.items() if name not in found.stopped}


def group_of(measure: Measure, statistics: Statistics, schemes: Sequence[str]) -> xr.Dataset:
    """The group of a run that `measure` concludes from merged statistics, with its parameters; `schemes` names every layer's."""
    group = checked_group(measure.conclude(statistics), called(MEASURES, measure.name))
    return with_schemes(group, schemes).assign_attrs(parameter_attributes(measure.parameters))


def stream(
    bridge: nn.Module,
    prompts: Iterable[Prompt],
    measures: Sequence[Measure],
    batch_size: int = 8,
    layers: Sequence[int] | None = None,
) -> dict[str, xr.Dataset]:
    """Groups of a run over `prompts`, by measure, as `analyze` makes them. `layers`: which are observed, None: all; a pass ends after
    the last of them.

    Raises InputError where there is no prompt, and for a measure that keeps something of every single one.
    """
    schemes = layout(bridge)
    measures = measures_for(bridge, measures)
    device = next(bridge.parameters()).device
    merged = {measure.name: MergedStatistics() for measure in measures}
    source, begun = iter(prompts), 0
    while some := list(itertools.islice(source, batch_size)):
        (batch,) = make_batches(some, batch_size, device)
        batch = replace(batch, numbers=tuple(begun + number for number in batch.numbers))
        for name, statistics in observe_batch(bridge, batch, measures, range(len(schemes)) if layers is None else layers).items():
            if kept := statistics.arrays["per_prompt"].values:
                raise InputError(f"{name} keeps {', '.join(kept)} of every prompt: use analyze, or sums")
            merged[name].add(statistics)
        begun += len(some)
    if not begun:
        raise InputError("there are no prompts to measure")
    return {measure.name: group_of(measure, merged[measure.name].total(), schemes) for measure in measures}


@dataclass(frozen=True)
class _Observed:
    """A layer's inputs for some `heads` (None: all), and which of their tensors are `broken`."""

    inputs: AttentionInputs
    heads: Sequence[int] | None
    broken: Mapping[str, str]


def _of_heads(whole: AttentionInputs, heads: Sequence[int] | None) -> _Observed:
    if heads is None:
        return _Observed(whole, None, whole.faults)
    inputs = select_heads(whole, heads)
    return _Observed(inputs, heads, whole.faults if inputs.faults else {})  # else of heads that nobody asked for


def _observe_layer(measure: Measure, observed: _Observed, batch: Batch) -> tuple[Statistics | None, str | None]:
    """Statistics of a measure in one layer, None where what it reads is broken; and what is wrong, None where nothing is."""
    fault = next((observed.broken[name] for name in measure.needs.tensors if name in observed.broken), None)
    if fault is not None:
        return None, fault
    named = {**batch.spans, **batch.structure} if measure.needs.segments else batch.spans
    spans = {name: mask.to(observed.inputs.queries.device) for name, mask in named.items()}
    statistics = checked_statistics(measure.observe(observed.inputs, spans), measure.name)
    statistics = _with_head_numbers(statistics, observed.heads)
    return statistics, fault_in(statistics, measure, observed.inputs)


def _with_head_numbers(statistics: Statistics, heads: Sequence[int] | None) -> Statistics:
    if heads is None:
        return statistics
    number = np.asarray(heads)
    return Statistics(
        **{
            name: replace(part, labels={**part.labels, "head": number}) if "head" in part.labels else part
            for name, part in statistics.arrays.items()
        }
    )
