"""Runs with the groups `gates` and `segments` for the tests of their figures: made by the measures
from heads of known behaviour.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import xarray as xr
from attention_inputs import random_inputs

from repo_interp.analysis.batches import describe_prompts, make_batches
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.positions import Positions
from repo_interp.measures.statistics import merge
from repo_interp.plugins.cope.gates import Gates
from repo_interp.plugins.segments.segments import Segments
from repo_interp.positions.contextual import ContextualPositions, InterpolatedEmbedding
from repo_interp.run import make_run, with_schemes
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.structure import KINDS, prompt_structure

WORDS = [
    "The",
    " river",
    " runs",
    " past",
    " an",
    " old",
    " mill",
    " where",
    " nobody",
    " lives",
    " now",
]
"""Text is made of these."""


MEASURES = (
    *("positions", "patterns", "position_sources", "attention_mass", "attention_rows"),
    *("predictions", "components", "three_axis", "fake_distance", "rotation"),
)
"""Measures all of whose variables are shown."""


def prompts(lengths=(96, 80), seed=0) -> list[Prompt]:
    """Sentences in lines in paragraphs, as tokens of text."""
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        texts: list[str] = []
        while len(texts) < length:
            for sentence in range(int(random.integers(2, 4))):
                texts += [WORDS[random.integers(len(WORDS))] for _ in range(random.integers(4, 9))]
                texts += ["."] if sentence % 2 else [".", "\n"]
            texts += ["\n\n"]
        made.append(
            Prompt(tuple(random.integers(3, 60, length).tolist()), token_text=tuple(texts[:length]))
        )
    return made


def run(cope_layers=(1, 2), maps=1, asked=None) -> xr.DataTree:
    """Layer 0: RoPE; 1, 2: CoPE whose heads count, one after the other, line breaks, sentence ends,
    everything a little, and at random; 3: RePo whose heads step with lines, drift, are random and
    constant.
    """
    asked = prompts() if asked is None else asked
    structure = [
        prompt_structure(KINDS, len(one.tokens), one.spans, one.token_text) for one in asked
    ]
    (batch,) = make_batches(asked, len(asked), structure=structure)
    spans = {**batch.spans, **batch.structure}
    tokens = batch.valid.shape[1]
    texts = np.array([[*one.token_text, *[""] * (tokens - len(one.tokens))] for one in asked])
    plain = random_inputs(prompts=len(asked), tokens=tokens, valid=batch.valid)
    index = torch.arange(tokens).double()
    layers = [
        replace(
            plain, layer=0, scheme="rope", learned=False, positions=index.expand(len(asked), 1, -1)
        )
    ]
    layers += [
        _cope(replace(plain, layer=layer, positions=None, frequencies=None), texts, layer)
        for layer in cope_layers
    ]
    layers.append(_repo(replace(plain, layer=max(cope_layers) + 1), spans))
    schemes = [inputs.scheme for inputs in layers]
    groups = {}
    for measure in (Positions(), Gates(maps=maps), Segments()):
        group = measure.conclude(merge([measure.observe(inputs, spans) for inputs in layers]))
        groups[measure.name] = with_schemes(group, schemes).assign_attrs(dict(measure.parameters))
    groups["positions"] = groups["positions"].merge(describe_prompts(asked))
    return make_run(
        groups, {"layout": ",".join(schemes), "training_length": 128, "prompts": len(asked)}
    )


def _cope(inputs: AttentionInputs, texts: np.ndarray, layer: int) -> AttentionInputs:
    generator = torch.Generator().manual_seed(layer)
    chosen = [np.char.find(texts, "\n") >= 0, texts == ".", np.zeros(texts.shape, bool)]
    noise = torch.randn(inputs.keys.shape[:3], generator=generator, dtype=torch.float64)
    scores = (
        torch.stack([torch.as_tensor(np.where(one, 4.0, -5.0)) for one in chosen], dim=1)
        + noise[:, :3] / layer
    )
    scores = torch.cat([scores, 2 * noise[:, 3:]], dim=1)
    scores[:, 2] = -2.0
    width = inputs.queries.shape[-1]
    queries = torch.zeros_like(inputs.queries)
    queries[..., 0] = width**0.5
    features = torch.zeros_like(inputs.keys)
    features[..., 0] = scores
    table = InterpolatedEmbedding(16, width).double()
    table.weight.data = -(torch.arange(16)[:, None] * torch.eye(width)[:1]).double()
    scheme, visible = ContextualPositions(table, "values"), inputs.visible
    every = torch.arange(texts.shape[1])[None]

    @torch.no_grad()
    def position_logits(rows):
        seen = visible(rows)[:, None]
        return scheme(
            queries[:, :, rows], features, every, every, seen, inputs.logit_scale, features
        )

    return replace(
        inputs,
        scheme="cope",
        queries=queries,
        gate_features=features,
        largest_position=15.0,
        position_logits=position_logits,
    )


def _repo(inputs: AttentionInputs, spans) -> AttentionInputs:
    generator = torch.Generator().manual_seed(9)
    line = spans["segments.lines.starts"].cumsum(1).double()
    noise = torch.randn(line.shape, generator=generator, dtype=torch.float64)
    index = torch.arange(line.shape[1]).double().expand_as(line)
    heads = [
        5 * torch.sin(3 * line) + 0.2 * noise,
        0.1 * index + 0.3 * noise,
        noise,
        torch.ones_like(noise),
    ]
    return replace(inputs, scheme="repo", learned=True, positions=torch.stack(heads, dim=1))
