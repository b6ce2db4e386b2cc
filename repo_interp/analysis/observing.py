"""Batches through a model, each observed once and merged with those before it: what `analyze` and
`stream` share.

    total <- merge(total, observe(batch))

Sums are merged as they come, so that they take the memory of one batch; what belongs to single
prompts is put side by side. `stream` takes any number of prompts in constant memory: they are drawn
from an iterator as they are needed, and every measure's statistics are sums
(`Components(prompts="mean")`), since those of single prompts would pile up.

Knows nothing about how prompts are made or what is measured.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

from repo_interp import processes
from repo_interp.analysis.batches import Batch, make_batches
from repo_interp.analysis.finite import Faults, fault_in, fault_of_outputs
from repo_interp.analysis.request import Request
from repo_interp.entry_points import MEASURES, OWN, called
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans, select_heads
from repo_interp.measures.labels import Arrays, parameter_attributes
from repo_interp.measures.statistics import (
    STATISTICS,
    Measure,
    Statistics,
    checked_statistics,
    merge,
    read_only,
    share,
)
from repo_interp.models.capture import decode, observing, predictions_of
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import batch_limits
from repo_interp.run import checked_group, read_netcdf, with_schemes, write_netcdf
from repo_interp.store import Form, Store
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


@dataclass
class Observation:
    """What came of one batch."""

    statistics: dict[str, Statistics]
    """By measure; of those that stopped, nothing."""
    faults: Faults = field(default_factory=Faults)


def _write_observation(observation: Observation, file: Path) -> None:
    groups = {
        f"/{name}/{part}": getattr(of, part)
        for name, of in observation.statistics.items()
        for part in STATISTICS
    }
    tree = xr.DataTree.from_dict({"/": xr.Dataset(), **groups})
    tree.attrs["faults"] = json.dumps([observation.faults.stopped, observation.faults.outputs])
    write_netcdf(tree, file)


def _read_observation(file: Path) -> Observation:
    tree = read_netcdf(file)
    stopped, outputs = json.loads(tree.attrs.get("faults", "[{}, []]"))
    statistics = {
        name: Statistics(**{part: node[part].to_dataset() for part in node.children})
        for name, node in tree.children.items()
    }
    return Observation(statistics, Faults(stopped, outputs))


BATCHES = Form(".nc", _write_observation, _read_observation)
"""How observations are kept, by measure and part."""


def observations(request: Request, store: Store, stopped: Collection[str]) -> Iterator[Observation]:
    """Every batch of `request` observed, in order; finished ones come from `store`.

    One process observes each when it is asked for it, and leaves out what has `stopped` by then;
    several share them beforehand.
    """
    layers, progress, several = (
        len(request.layers),
        request.execution.progress,
        processes.count() > 1,
    )
    device = request.decoder.device
    batches = (
        make_batches(request.prompts, request.size, device, request.structure)
        if request.measures
        else []
    )

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, len(batches) * layers)

    def observe(number: int) -> Observation:
        return observe_batch(
            request,
            batches[number],
            lambda layer: None if several else tell(number * layers + layer),
            stopped,
        )

    computations = {
        f"batch-{number:05d}": partial(observe, number) for number in range(len(batches))
    }
    return store.stream(computations, lambda done, _: tell(done * layers), BATCHES)


@torch.no_grad()
def observe_batch(
    request: Request,
    batch: Batch,
    advance: Callable[[int], None] = lambda observed: None,
    stopped: Collection[str] = (),
) -> Observation:
    """What one forward pass of `batch` shows.

    `advance` is called with the number of layers observed.

    Measures that have `stopped` are left out; one that meets numbers that are not finite stops, and
    is told to the faults.
    """
    measures, layers = (
        [measure for measure in request.measures if measure.name not in stopped],
        request.layers,
    )
    parts: dict[str, list[Statistics]] = {measure.name: [] for measure in measures}
    found, observed, padded = Faults(), 0, not bool(batch.valid.all())
    judged: list[tuple[str, Callable[[], str | None]]] = []

    def settle() -> None:
        # On an accelerator after the pass: statistics leave it once, and no layer waits for those
        # before it.
        for name, fault_of in judged:
            if name not in found.stopped and (fault := fault_of()) is not None:
                found.stop(name, fault)
        judged.clear()

    def receive(inputs: AttentionInputs) -> None:
        nonlocal observed
        whole = replace(inputs, tokens=batch.tokens.to(inputs.queries.device))
        common = _of_heads(whole, request.heads)
        going_on = [measure for measure in measures if measure.name not in found.stopped]
        sound = [
            each for each in going_on if each.needs.heads is None and common.fault(each) is None
        ]
        share(sound, common.inputs, common.on_device(batch.spans))
        for measure in going_on:
            own = measure.needs.heads
            if own is not None and inputs.layer not in own:
                continue
            of = common if own is None else _of_heads(whole, own[inputs.layer])
            if (fault := of.fault(measure)) is None:
                statistics = of.observed_by(measure, batch)
                parts[measure.name].append(statistics)
                without = inputs.positions is None or inputs.frequencies is None
                judged.append(
                    (measure.name, partial(fault_in, statistics, measure, without, padded))
                )
            else:
                judged.append((measure.name, partial(str, fault)))
            if inputs.queries.device.type == "cpu":
                settle()
        observed += 1
        advance(observed)

    numbers = torch.as_tensor(batch.numbers)
    reading = [measure for measure in measures if measure.needs.predictions]
    with observing(request.bridge, batch.valid, numbers, receive, layers):
        hidden = decode(
            request.bridge,
            batch.tokens,
            batch.valid,
            None if reading else max(layers, default=None),
        )
    settle()
    fault = fault_of_outputs(hidden, batch.valid, batch.numbers)
    if fault is not None and not found.stopped:
        found.outputs.append(fault)
    for measure in reading:
        if fault is not None:
            found.stop(measure.name, fault)
            continue
        predictions = predictions_of(
            request.bridge, hidden.to(batch.tokens.device), batch.tokens, batch.valid, numbers
        )
        with read_only(measure, predictions, batch.spans):
            parts[measure.name].append(measure.observe_predictions(predictions, batch.spans))
    return Observation(
        {
            name: merge(statistics)
            for name, statistics in parts.items()
            if name not in found.stopped
        },
        found,
    )


def group_of(measure: Measure, statistics: Statistics, schemes: Sequence[str]) -> xr.Dataset:
    """The group of a run that `measure` concludes from merged statistics, with its parameters;
    `schemes` names every layer's.
    """
    group = checked_group(measure.conclude(statistics), called(MEASURES, measure.name))
    return with_schemes(group, schemes).assign_attrs(parameter_attributes(measure.parameters))


def stream(
    bridge: nn.Module,
    prompts: Iterable[Prompt],
    measures: Sequence[Measure],
    batch_size: int = 8,
    layers: Sequence[int] | None = None,
) -> dict[str, xr.Dataset]:
    """Groups of a run over `prompts`, by measure, as `analyze` makes them.

    `layers`: which are observed, None: all; a pass ends after the last of them.

    Raises InputError where there is no prompt, and for a measure that keeps something of every
    single one.
    """
    schemes, device = as_decoder(bridge).schemes, as_decoder(bridge).device
    merged = {measure.name: MergedStatistics() for measure in measures}
    source, begun = iter(prompts), 0
    chosen: Sequence[Measure] = ()
    while some := list(itertools.islice(source, batch_size)):
        request = Request(bridge, some, measures, layers)
        chosen = request.measures
        for batch in make_batches(some, batch_limits(bridge, batch_size), device):
            observation = observe_batch(
                request, replace(batch, numbers=tuple(begun + number for number in batch.numbers))
            )
            observation.faults.require_none()
            for name, statistics in observation.statistics.items():
                if kept := statistics.arrays["per_prompt"].values:
                    raise InputError(
                        f"{name} keeps {', '.join(kept)} of every prompt: use analyze, or sums"
                    )
                merged[name].add(statistics)
        begun += len(some)
    if not begun:
        raise InputError("there are no prompts to measure")
    return {
        measure.name: group_of(measure, merged[measure.name].total(), schemes) for measure in chosen
    }


@dataclass(frozen=True)
class _Observed:
    """A layer's inputs for some `heads` (None: all), and which of their tensors are `broken`."""

    inputs: AttentionInputs
    heads: Sequence[int] | None
    broken: Mapping[str, str]

    def fault(self, measure: Measure) -> str | None:
        """What is wrong with the first tensor that `measure` reads and that is broken; None where
        none is.
        """
        return next(
            (self.broken[name] for name in measure.needs.tensors if name in self.broken), None
        )

    def on_device(self, masks: Spans) -> Spans:
        """`masks` where the inputs are."""
        return {name: mask.to(self.inputs.queries.device) for name, mask in masks.items()}

    def observed_by(self, measure: Measure, batch: Batch) -> Statistics:
        """Statistics of a measure in this layer, with the numbers of its heads."""
        named = {**batch.spans, **batch.structure} if measure.needs.segments else batch.spans
        given = self.inputs, self.on_device(named)
        if measure.name not in OWN[MEASURES]:
            # Torch does not count what is written through numpy, or into what was made of the
            # inputs: another package has its own.
            given = copy.deepcopy(given)
        with read_only(measure, *given):
            observed = measure.observe(*given)
        statistics = checked_statistics(observed, measure.name)
        if self.heads is None:
            return statistics
        number = {"head": np.asarray(self.heads)}
        parts = {
            name: replace(part, labels={**part.labels, **number}) if "head" in part.labels else part
            for name, part in statistics.arrays.items()
        }
        return Statistics(**parts)


def _of_heads(whole: AttentionInputs, heads: Sequence[int] | None) -> _Observed:
    if heads is None:
        return _Observed(whole, None, whole.faults)
    inputs = select_heads(whole, heads)
    # else of heads that nobody asked for
    return _Observed(inputs, heads, whole.faults if inputs.faults else {})
