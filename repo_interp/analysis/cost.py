"""The estimated cost of an analysis, before it starts, from one short prompt through few layers.

    operations of a layer (n) = 2 P n + 2 H d n^2         P parameters per layer, n tokens, H heads of d dimensions
    seconds = passes + measures + merging
    passes    operations of all layers and prompts / speed, the speed from a timed pass through the first layers
    measures  the time of each on the first layer of every scheme; beyond the probe's length it grows as between half of it and all, by
              at most the power that the measure declares; once where all that it keeps is of the first prompt
    merging   per batch, from the probe's statistics
    bytes     the larger of the peak so far (loading) and what is held now + activations + statistics of all prompts + drawing

An experiment's passes come on top, each with its unembedding, 2 V d per token. Knows nothing about what measures and experiments do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import xarray as xr
from torch import nn

from repo_interp import side_by_side
from repo_interp.analysis.batches import make_batches, structure_for
from repo_interp.analysis.finite import Faults
from repo_interp.analysis.observing import MergedStatistics, group_of, measures_for, observe_batch
from repo_interp.analysis.room import batch_limit
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.statistics import Measure, Statistics, share
from repo_interp.models.bridge import tokenizer_of
from repo_interp.models.capture import decode, predictions_of
from repo_interp.models.feed_forward import block_of
from repo_interp.models.reposition import attentions, decoder_of, layout
from repo_interp.side_by_side import BatchSize, SideBySide
from repo_interp.tasks.prompt import Prompt
from repo_interp.values import duration

Result = TypeVar("Result")
_LONGEST_PROBE = 512
"""Tokens of a probe at most."""
_SHORTEST_PROBE = 64
_PROBE_SECONDS = 0.7
"""Seconds that the longest probe may take, judged by the shortest."""
_PASS_BOOKKEEPING = 0.0004
"""Seconds that a layer's hooks take in one prompt of an experiment's pass."""
_DRAWING_BYTES = 110 * 2**20
"""Memory of drawing: the libraries that draw, and the figures and the page while they are made."""


@dataclass(frozen=True)
class Cost:
    """An estimate: seconds to about a quarter, memory to about a tenth."""

    seconds: float
    bytes: float
    """The largest that the process holds at a time, while loading or later; on an accelerator, what the model holds there."""

    def __str__(self) -> str:
        return f"about {duration(self.seconds)} and {self.bytes / 2**30:.1f} GiB of memory"


@torch.no_grad()
def estimate(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    measures: Sequence[Measure],
    batch_size: BatchSize | Literal["auto"] = 1,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    passes: Sequence[int] = (),
) -> Cost:
    """The cost of measuring `layers` and `heads` (None: all) of a repositioned model or bridge on `prompts`.

    `passes`: tokens of every prompt of every forward pass of the experiments. Raises InputError where a measure does not fit.
    """
    schemes = layout(bridge)
    layers = range(len(schemes)) if layers is None else sorted(layers)
    probed = [next(layer for layer in layers if schemes[layer] == scheme) for scheme in dict.fromkeys(schemes[i] for i in layers)]
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    alone, operations = measures_for(bridge, measures), _operations(bridge)
    chosen = [_Together(alone), *alone] if alone else []

    def probe(length: int) -> _Probe:
        return _probe(bridge, _shortened(longest, length), chosen, probed, heads)

    probe(_SHORTEST_PROBE)  # first calls allocate and compile
    first = probe(_SHORTEST_PROBE)
    full = first
    for length in (2 * _SHORTEST_PROBE, 4 * _SHORTEST_PROBE, _LONGEST_PROBE):
        if full.tokens < min(length, len(longest.tokens)) and full.seconds * (length / full.tokens) < _PROBE_SECONDS:
            first, full = full, probe(length)
    speed = (probed[-1] + 1) * operations(full.tokens) / max(full.passing, 1e-6)
    depth = layers[-1] + 1 if chosen else 0
    if any(measure.reads_predictions for measure in chosen):
        depth = len(schemes)
    alike = [[layer for layer in layers if schemes[layer] == schemes[place]] for place in probed]
    seconds = sum(depth * operations(len(prompt.tokens)) / speed for prompt in prompts)
    for measure, before, after in zip(chosen, first.measuring, full.measuring, strict=True):
        lengths = [len(prompt.tokens) for prompt in (prompts[:1] if measure.name in full.once else prompts)]
        counts = [_times_probed(measure, like) for like in alike] + [1]
        seconds += sum(
            count * _at_length(length, (first.tokens, short), (full.tokens, long), measure.growth)
            for length in lengths
            for count, short, long in zip(counts, before, after, strict=True)
        )
    size, lengths = batch_limit(bridge, batch_size), sorted((len(prompt.tokens) for prompt in prompts), reverse=True)
    batches = len(side_by_side.batches(range(len(lengths)), lengths, size))
    seconds += batches * (full.labelling * len(layers) / len(probed) + full.merging)
    config = next(attentions(bridge)).config
    unembedding = 2.0 * config.vocab_size * config.hidden_size
    seconds += sum((len(schemes) * operations(length) + unembedding * length) / speed for length in passes)
    seconds += _PASS_BOOKKEEPING * len(schemes) * len(passes)
    return Cost(seconds, _bytes(bridge, prompts, size, passes, full, len(layers) / len(probed)))


def _times_probed(measure: Measure, layers: Sequence[int]) -> int:
    """How often `measure` does in `layers` what it does in a layer that is probed: there, of heads that it chooses, it takes one."""
    chosen = measure.chosen_heads
    return len(layers) if chosen is None else sum(len(chosen.get(layer, ())) for layer in layers)


@dataclass(frozen=True)
class _Probe:
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
        return 2 * self.passing + sum(map(sum, self.measuring)) + self.labelling + self.merging


def _probe(
    bridge: nn.Module, prompt: Prompt, measures: Sequence[Measure], layers: Sequence[int], heads: Sequence[int] | None
) -> _Probe:
    device = next(bridge.parameters()).device
    structure = structure_for([prompt], measures, tokenizer_of(bridge))
    (batch,) = make_batches([prompt], 1, device, structure)
    passed = [_timed(lambda: decode(bridge, batch.tokens, batch.valid, layers[-1]), device) for _ in range(2)]
    passing = min(seconds for seconds, _ in passed)
    if not measures:
        return _Probe(len(prompt.tokens), passing, (), 0.0, 0.0, 0.0)
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
        if measure.reads_predictions:
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
    return _Probe(len(prompt.tokens), passing, tuple(map(tuple, measuring)), labelling, merging, size, bounded, once)


class _Together(Measure):
    """What measures share, timed as if it were one of them."""

    name = "together"

    def __init__(self, measures: Sequence[Measure]) -> None:
        self._measures = measures

    @property
    def parameters(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing by itself."""
        return ()

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
    reads_predictions: bool = False
    """What the model expects is timed apart, without the layers that are not probed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.measure, name)

    @property
    def chosen_heads(self) -> Mapping[int, Sequence[int]] | None:
        """One head of every layer, where the measure chooses its heads (`_times_probed`)."""
        return None if self.measure.chosen_heads is None else dict.fromkeys(self.layers, (0,))

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[()]:
        """None, for `_Together` makes them."""
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


def _shortened(prompt: Prompt, length: int) -> Prompt:
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


def _operations(bridge: nn.Module) -> Callable[[int], float]:
    """Operations of one layer, the mean of all, by tokens of a prompt."""
    config, first = next(attentions(bridge)).config, next(attentions(bridge))
    layers = decoder_of(bridge).layers
    parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters()) / len(layers)
    width = config.num_attention_heads * first.d_head
    return lambda tokens: 2.0 * max(parameters, config.hidden_size) * tokens + 2.0 * width * tokens**2


def _at_length(length: int, first: tuple[int, float], second: tuple[int, float], most: float = 2.0) -> float:
    """Seconds at `length` tokens, from (tokens, seconds) of two probes: a power between 0 and `most`, beyond them as between them."""
    (shorter, before), (longer, after) = first, second
    if shorter == longer:
        return after * (length / longer)
    if length <= longer:
        most = 2.0  # what is bounded beyond the probes need not be between them
    power = math.log(max(after, 1e-9) / max(before, 1e-9)) / math.log(longer / shorter)
    return after * (length / longer) ** min(max(power, 0.0), most)


def _bytes(
    bridge: nn.Module, prompts: Sequence[Prompt], size: SideBySide, passes: Sequence[int], probe: _Probe, layers: float
) -> float:
    """The peak so far, or that of running. `layers`: how many times more layers are measured than were probed."""
    config, parameters = next(attentions(bridge)).config, list(bridge.parameters())
    longest, elements = max(len(prompt.tokens) for prompt in prompts), parameters[0].element_size()
    batch_size = min(len(prompts), size.of_length(longest))
    tokens = batch_size * longest
    wide = min(tokens, block_of(config.intermediate_size)) * config.intermediate_size
    activations = float(elements) * (8 * tokens * config.hidden_size + 3 * wide)
    statistics = layers * (probe.bytes * sum(len(prompt.tokens) for prompt in prompts) / probe.tokens + probe.bounded)
    logits = 20.0 * config.vocab_size * max(passes, default=0) * batch_size
    running = max(activations, logits) + statistics
    if parameters[0].device.type != "cpu":
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters) + running
    held, peak = _held(), _peak()
    return max(peak, held + max(running, statistics + _DRAWING_BYTES))


def _held() -> float:
    """Bytes that this process holds now; its peak where the system does not say."""
    return _of_status("VmRSS") or _peak()


def _peak() -> float:
    """The most bytes that this process has held so far."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return _of_status("VmHWM") or float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _of_status(field: str) -> float:
    """A size of this process as the kernel says it; 0.0 where it says none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0.0)
