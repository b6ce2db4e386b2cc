"""The estimated cost of an analysis, before it starts, from one short prompt through few layers.

    operations of a layer (n) = 2 P n + 2 H d n^2         P parameters per layer, n tokens, H heads of d dimensions
    seconds = passes + measures + merging
    passes    operations of all layers and prompts / speed, the speed from a timed pass through the first layers
    measures  the time of each on the first layer of every scheme; beyond the probe's length it grows as between half of it and all, by
              at most the power that the measure declares; once where all that it keeps is of the first prompt
    merging   per batch, from the probe's statistics
    bytes     `room.bytes_of_run`, with the statistics of all prompts as they grow from the probe's

An experiment's passes come on top, each with its unembedding, 2 V d per token. Knows nothing about what measures and experiments do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from repo_interp import side_by_side
from repo_interp.analysis.observing import measures_for
from repo_interp.analysis.probe import Probe, Together, probe, shortened
from repo_interp.analysis.room import batch_limit, bytes_of_run
from repo_interp.measures.statistics import Measure
from repo_interp.models.reposition import attentions, decoder_of, layout
from repo_interp.side_by_side import BatchSize
from repo_interp.tasks.prompt import Prompt
from repo_interp.values import duration

_LONGEST_PROBE = 512
"""Tokens of a probe at most."""
_SHORTEST_PROBE = 64
_PROBE_SECONDS = 0.7
"""Seconds that the longest probe may take, judged by the shortest."""
_PASS_BOOKKEEPING = 0.0004
"""Seconds that a layer's hooks take in one prompt of an experiment's pass."""


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
    chosen = [Together(alone), *alone] if alone else []

    def of_length(length: int) -> Probe:
        return probe(bridge, shortened(longest, length), chosen, probed, heads)

    of_length(_SHORTEST_PROBE)  # first calls allocate and compile
    first = of_length(_SHORTEST_PROBE)
    full = first
    for length in (2 * _SHORTEST_PROBE, 4 * _SHORTEST_PROBE, _LONGEST_PROBE):
        if full.tokens < min(length, len(longest.tokens)) and full.seconds * (length / full.tokens) < _PROBE_SECONDS:
            first, full = full, of_length(length)
    speed = (probed[-1] + 1) * operations(full.tokens) / max(full.passing, 1e-6)
    depth = layers[-1] + 1 if chosen else 0
    if any(measure.needs.predictions for measure in chosen):
        depth = len(schemes)
    alike = [[layer for layer in layers if schemes[layer] == schemes[place]] for place in probed]
    seconds = sum(depth * operations(len(prompt.tokens)) / speed for prompt in prompts)
    for measure, before, after in zip(chosen, first.measuring, full.measuring, strict=True):
        lengths = [len(prompt.tokens) for prompt in (prompts[:1] if measure.name in full.once else prompts)]
        counts = [_times_probed(measure, like) for like in alike] + [1]
        seconds += sum(
            count * _at_length(length, (first.tokens, short), (full.tokens, long))
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
    statistics = len(layers) / len(probed) * (full.bytes * sum(lengths) / full.tokens + full.bounded)
    return Cost(seconds, bytes_of_run(bridge, lengths, size, passes, statistics))


def _times_probed(measure: Measure, layers: Sequence[int]) -> int:
    """How often `measure` does in `layers` what it does in a layer that is probed: there, of heads that it chooses, it takes one."""
    chosen = measure.needs.heads
    return len(layers) if chosen is None else sum(len(chosen.get(layer, ())) for layer in layers)


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
