"""One decoder layer with random weights: its own forward pass, its attention inputs, and what every measure of them costs.

RMSNorm, QK-norm, SDPA as in OLMo-2 (width 2048, 16 heads of 128, MLP 8192). Positions are learned ones, one row per head: drifting and
jumping. The hidden states have a mean as large as their spread, as real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RotaryEmbedding

from repo_interp.benchmark import textbook
from repo_interp.benchmark.cost import Cost, cost
from repo_interp.benchmark.limits import limits
from repo_interp.benchmark.parts import ALL, FORWARD, TEXTBOOK_UP_TO, Line, Part, Shape, shape_of, textbook_of
from repo_interp.benchmark.prompt import prompt_of
from repo_interp.benchmark.textbook import Sample
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.attention_mass import AttentionMass
from repo_interp.measures.components import Components
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.patterns import Patterns
from repo_interp.measures.positions import Positions
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.statistics import Measure, share
from repo_interp.measures.three_axis import ThreeAxis

MEASURES: Mapping[str, Measure] = {
    "positions": Positions(),
    "patterns": Patterns(),
    "attention_mass": AttentionMass(),
    "components": Components(training_length=4096),
    "three_axis": ThreeAxis(extras=()),
    "fake_distance": FakeDistance(axes="none"),
    "rotation": Rotation(training_length=4096),
}
"""All measures that a whole prompt is reduced by; the others look at some rows of the first prompt, or were asked for by name."""
_TEXTBOOK: Mapping[str, Callable[[AttentionInputs, Spans], list[Sample]]] = {
    "attention_mass": textbook.attention_mass,
    "components": textbook.components,
    "three_axis": textbook.three_axis,
    "fake_distance": textbook.fake_distance,
}
"""Those that a textbook would make maps for."""
_LONG = 4096
"""Tokens from which a call takes long enough to be timed once, without one to warm up."""


class Layer:
    """A layer and hidden states of one prompt of `tokens` tokens."""

    def __init__(self, shape: Shape, tokens: int, device: str = "cpu", dtype: str = "float32") -> None:
        config = Olmo2Config(
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.intermediate,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        precision = getattr(torch, dtype)
        self._layer = Olmo2DecoderLayer(config, layer_idx=0).eval().to(device, precision)
        self._rotary = Olmo2RotaryEmbedding(config).to(device)
        self._hidden = (torch.randn(1, tokens, shape.width) + torch.randn(shape.width)).to(device, precision)
        self._shape = shape

    def forward(self) -> Callable[[], Tensor]:
        """The layer's own forward pass, as a call."""
        positions = torch.arange(self._hidden.shape[1], device=self._hidden.device)[None]
        tables = self._rotary(self._hidden, positions)
        return lambda: self._layer(self._hidden, position_embeddings=tables, position_ids=positions)

    def inputs(self) -> AttentionInputs:
        """What the layer's attention computes with, at learned positions, in float32 as capture gives it."""
        attention, tokens, device = self._layer.self_attn, self._hidden.shape[1], self._hidden.device
        d_head = self._shape.width // self._shape.heads
        rows = self._shape.kv_heads
        drift = 0.3 * torch.randn(1, rows, tokens).cumsum(-1)

        def split(flat: Tensor) -> Tensor:
            return flat.float().view(1, tokens, -1, d_head).transpose(1, 2)

        return AttentionInputs(
            layer=0,
            scheme="repo",
            queries=split(attention.q_norm(attention.q_proj(self._hidden))),
            keys=split(attention.k_norm(attention.k_proj(self._hidden))),
            positions=(drift + 4 * torch.randn(1, rows, tokens)).to(device),
            frequencies=self._rotary.inv_freq,
            attention_scaling=1.0,
            logit_scale=d_head**-0.5,
            valid=torch.ones(1, tokens, dtype=torch.bool, device=device),
            prompts=torch.arange(1),
        )

    def spans(self) -> Spans:
        """Those of the benchmark's prompt: needle, query, generated tokens and the rest."""
        tokens = self._hidden.shape[1]
        masks = {name: torch.zeros(1, tokens, dtype=torch.bool) for name in ("needle", "query", "generated", "rest")}
        for name, places in prompt_of(tokens, 4).all_spans().items():
            masks[name][:, list(places)] = True
        return {name: mask.to(self._hidden.device) for name, mask in masks.items()}


@torch.inference_mode()
def lines(part: Part, folder: Path) -> list[Line]:
    """The forward pass; every measure, and all of them together as an analysis takes them; the textbook way of each."""
    shape, device = shape_of(part.subject), part.device
    layer, repeats = Layer(shape, part.tokens, device, part.dtype), 1 if part.tokens > _LONG else 2
    operations = shape.layer_operations(part.tokens)
    measured = [Line(FORWARD, cost(layer.forward(), repeats, device), operations=operations)]
    inputs, spans = layer.inputs(), layer.spans()
    for name, measure in MEASURES.items():
        measured.append(
            Line(name, cost(lambda measure=measure: measure.observe(replace(inputs), spans), repeats, device), FORWARD)
        )
    measured.append(Line(ALL, cost(lambda: observed_together(inputs, spans), repeats, device), FORWARD))
    measured += limits(shape, inputs, repeats, device)
    if part.tokens > TEXTBOOK_UP_TO:
        return measured
    book: list[Line] = []
    for name, way in _TEXTBOOK.items():
        samples = way(inputs, spans)
        whole = _sum([sample.times * cost(sample.call, 1, device) for sample in samples])
        note = f"made: {' and '.join(sample.what for sample in samples)}; time multiplied"
        book.append(Line(textbook_of(name), whole, name, note=note))
    return [*measured, *book, Line(textbook_of(ALL), _sum([line.cost for line in book]), ALL)]


def observed_together(inputs: AttentionInputs, spans: Spans) -> object:
    """The statistics of all measures of a layer, as an analysis has them observed: what they share is made once."""
    afresh, measures = replace(inputs), list(MEASURES.values())  # a copy remembers nothing of what was made before
    share(measures, afresh, spans)
    return [measure.observe(afresh, spans) for measure in measures]


def _sum(costs: list[Cost]) -> Cost:
    total = costs[0]
    for each in costs[1:]:
        total = total + each
    return total
