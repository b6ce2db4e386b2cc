"""A short prompt taken through the first layers, timed part by part: what the estimate of an analysis is made from.

    passing     the forward pass alone, the faster of two
    measuring   every measure in every layer that is probed, and what it takes for predictions; what measures share stands by itself
    labelling   what is left of a pass that is observed
    merging     statistics of a batch added to those before it, and groups concluded

Knows nothing about other lengths, layers and numbers of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import xarray as xr
from torch import nn

from repo_interp.analysis.batches import make_batches, structure_for
from repo_interp.analysis.finite import Faults
from repo_interp.analysis.observing import MergedStatistics, group_of, observe_batch
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.statistics import Measure, Needs, Statistics, share
from repo_interp.models.bridge import tokenizer_of
from repo_interp.models.capture import decode, predictions_of
from repo_interp.models.reposition import layout
from repo_interp.tasks.prompt import Prompt

Result = TypeVar("Result")


@dataclass(frozen=True)
class Probe:
    """Seconds of one prompt of `tokens` tokens through the first layers."""

    tokens: int
    passing: float
    """The forward pass alone."""
    measuring: tuple[tuple[float, ...], ...]
    """Of every measure, for every layer that is probed; and last what it takes for predictions."""
    labelling: float
    """Statistics of layers and measures put together."""
    merging: float
    """Statistics of one batch merged with those before it, and groups concluded from them."""
    bytes: float
    """Of the statistics that grow with prompts and tokens."""
    bounded: float = 0.0
    """Bytes of the statistics of the first prompt alone, which have a largest size."""
    once: frozenset[str] = frozenset()
    """Names of the measures that keep something of the first prompt alone."""

    @property
    def seconds(self) -> float:
        """What all that was timed took."""
        return 2 * self.passing + sum(map(sum, self.measuring)) + self.labelling + self.merging


def probe(
    bridge: nn.Module, prompt: Prompt, measures: Sequence[Measure], layers: Sequence[int], heads: Sequence[int] | None
) -> Probe:
    """Seconds and bytes of `measures` in `layers` (the last is as deep as the pass goes) and `heads` (None: all) on `prompt`."""
    device = next(bridge.parameters()).device
    structure = structure_for([prompt], measures, tokenizer_of(bridge))
    (batch,) = make_batches([prompt], 1, device, structure)
    passed = [_timed(lambda: decode(bridge, batch.tokens, batch.valid, layers[-1]), device) for _ in range(2)]
    passing = min(seconds for seconds, _ in passed)
    if not measures:
        return Probe(len(prompt.tokens), passing, (), 0.0, 0.0, 0.0)
    timed = [_Timed(measure, [0.0] * len(layers), layers) for measure in measures]
    whole, observed = _timed(
        lambda: observe_batch(bridge, batch, cast(Sequence[Measure], timed), layers, heads, None, Faults()), device
    )
    measuring = [list(measure.seconds) for measure in timed]
    labelling = max(0.0, whole - passing - sum(map(sum, measuring)))
    predictions = predictions_of(bridge, passed[0][1], batch.tokens, batch.valid, torch.as_tensor(batch.numbers))
    for measure, seconds in zip(measures, measuring, strict=True):
        predicting, seen = _timed(lambda measure=measure: measure.observe_predictions(predictions, batch.spans), device)
        seconds.append(predicting)
        if measure.needs.predictions:
            observed[measure.name] = seen

    measures = [measure for measure in measures if measure.name in observed]  # what stops takes no time
    batches = {measure.name: MergedStatistics() for measure in measures}

    def add() -> None:
        for measure in measures:
            batches[measure.name].add(observed[measure.name])

    def conclude() -> None:
        for measure in measures:
            alone = MergedStatistics()
            alone.add(observed[measure.name])
            group_of(measure, alone.total(), layout(bridge))

    add()  # sums of the second batch are merged with those of the first
    merging = _timed(add, device)[0] + _timed(conclude, device)[0]
    once = frozenset(
        name
        for name, each in observed.items()
        if each.arrays["first_prompt"].values and not each.arrays["per_prompt"].values and not each.arrays["sums"].values
    )
    size, bounded = (float(sum(observed[name].nbytes for name in names)) for names in (set(observed) - once, once))
    return Probe(len(prompt.tokens), passing, tuple(map(tuple, measuring)), labelling, merging, size, bounded, once)


class Together(Measure):
    """What measures share, timed as if it were one of them."""

    name = "together"

    def __init__(self, measures: Sequence[Measure]) -> None:
        self._measures = measures

    @property
    def parameters(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def needs(self) -> Needs:
        """Nothing by itself."""
        return Needs(tensors=())

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Nothing: the measures find what they share made."""
        share(self._measures, inputs, spans)
        return Statistics()

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """An empty group."""
        return xr.Dataset()


@dataclass(frozen=True)
class _Timed:
    """A measure that notes the seconds it takes in each layer of `layers`."""

    measure: Measure
    seconds: list[float]
    layers: Sequence[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.measure, name)

    @property
    def needs(self) -> Needs:
        """One head of every layer, where the measure chooses its heads (`cost` counts them); predictions are timed apart."""
        needs = self.measure.needs
        return replace(needs, predictions=False, heads=None if needs.heads is None else dict.fromkeys(self.layers, (0,)))

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[()]:
        """None, for `Together` makes them."""
        return ()

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        seconds, statistics = _timed(lambda: self.measure.observe(inputs, spans), inputs.queries.device)
        self.seconds[list(self.layers).index(inputs.layer)] += seconds
        return statistics


def _timed(call: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds that `call` takes, with what an accelerator still has to do, and what it returns."""
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def shortened(prompt: Prompt, length: int) -> Prompt:
    """`prompt` with its last `length` tokens alone; a span that lies before them has the first of these, so that every span is there."""
    cut = len(prompt.tokens) - length
    if cut <= 0:
        return prompt
    generated = tuple(place - cut for place in prompt.generated if place > cut)  # a token is predicted from the one before
    spans = {name: tuple(place - cut for place in places if place >= cut) for name, places in prompt.spans.items()}
    free = iter(sorted(set(range(1, length)).difference(generated, *spans.values())))
    if prompt.generated and not generated:
        generated = tuple(islice(free, 1))
    spans = {name: places or (() if "." in name else tuple(islice(free, 1))) for name, places in spans.items()}
    text = None if prompt.token_text is None else prompt.token_text[cut:]
    return replace(
        prompt,
        tokens=prompt.tokens[cut:],
        spans={name: places for name, places in spans.items() if places},
        generated=generated,
        token_text=text,
        text=None,
        characters=None,
    )
