"""The estimated cost of an analysis, before it starts.

    operations(n) = 2 P n + 2 L H d n^2         P parameters of the layers, n tokens, L layers, H heads of d dimensions
    seconds = operations of all prompts / speed + bookkeeping, the speed from a short forward pass of the same model

An experiment's passes come on top, each with its unembedding, 2 V d per token. Knows nothing about measures and experiments; exact
measures add about a tenth to the forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from repo_interp.models.capture import decode
from repo_interp.models.reposition import attentions, decoder_of
from repo_interp.values import duration

_PROBE_TOKENS = 128
_PROBES = 3
_BOOKKEEPING = 0.006
"""Seconds to label and merge the statistics of one measure, layer and prompt: most of the time of small models."""
_MEASURES_SHARE = 0.1
_PASS_BOOKKEEPING = 0.0004
"""Seconds that a layer's hooks take in one prompt of an experiment's pass."""


@dataclass(frozen=True)
class Cost:
    """An estimate: good to a factor of two."""

    seconds: float
    bytes: float
    """Weights, the activations of one layer, and the statistics of all prompts."""

    def __str__(self) -> str:
        return f"about {duration(self.seconds)} and {self.bytes / 2**30:.1f} GiB of memory"


@torch.no_grad()
def estimate(model: nn.Module, lengths: Sequence[int], batch_size: int, measures: int, passes: Sequence[int] = ()) -> Cost:
    """The cost of analysing prompts of `lengths` tokens with `measures` measures, from a forward pass over a few tokens.

    `passes`: tokens of every prompt of every forward pass of the experiments.
    """
    config = next(attentions(model)).config
    parameters = list(model.parameters())
    device, width = parameters[0].device, config.hidden_size
    inner = sum(p.numel() for layer in decoder_of(model).layers for p in layer.parameters())
    heads, layers = config.num_attention_heads * next(attentions(model)).d_head, config.num_hidden_layers

    def operations(tokens: int) -> float:
        return 2.0 * max(inner, width) * tokens + 2.0 * layers * heads * tokens**2

    tokens = torch.zeros(1, min(_PROBE_TOKENS, max(lengths)), dtype=torch.long, device=device)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    decode(model, tokens, valid)  # first calls allocate and compile
    durations = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        decode(model, tokens, valid)
        durations.append(time.perf_counter() - start)
    speed = operations(tokens.shape[1]) / max(min(durations), 1e-6)
    seconds = (1 + _MEASURES_SHARE) * sum(operations(length) for length in lengths) / speed
    seconds += _BOOKKEEPING * measures * layers * len(lengths)
    unembedding = 2.0 * config.vocab_size * width
    seconds += sum(operations(length) + unembedding * length for length in passes) / speed
    seconds += _PASS_BOOKKEEPING * layers * len(passes)
    activations = 4.0 * batch_size * max(lengths) * (8 * width + 3 * config.intermediate_size)
    statistics = 6.0 * len(lengths) * max(lengths) * layers * config.num_attention_heads
    weights = sum(p.numel() * p.element_size() for p in parameters)
    longest = max(passes, default=0)
    logits = 20.0 * config.vocab_size * longest * batch_size if passes else 0.0
    return Cost(seconds, weights + max(activations, logits) + statistics)
