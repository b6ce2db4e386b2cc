"""How much attention the generated tokens pay to each span (RePo sec. 5.1, table 4).

    mass(span) = mean over generated rows i of sum_{j in span} A_ij          A = softmax of the logits, post-softmax weights
    mass per token = mass / number of tokens in the span;    table: mean over prompts, layers and heads, x 100

Rows are those that produced the generated tokens, one earlier (`rows="producing"`), where a model looks for its answer; or the generated
tokens' own rows (`rows="generated"`), the paper's literal wording, where the last one predicts nothing. With long answers the two nearly
agree. A head with a sink (gpt-oss) gives the rest of its attention to it: `sink_mass`. `chance` is what equal weights on all tokens that
a row sees would give a span. Only these rows are computed: O(rows n d) per head, no n x n map.

Knows nothing about what the spans mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans, select_prompts, weights_of
from repo_interp.measures.kernels.heads import HeadBlock, Reduction, Same, over_heads, reduced
from repo_interp.measures.kernels.memory import SHARED, memory_for
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics

Rows = Literal["generated", "producing"]
ROWS: tuple[Rows, ...] = get_args(Rows)
_TEXTS = {
    "mass": ("attention from generated tokens to each span", "1"),
    "mass_per_token": ("attention from generated tokens to each token of a span", "1"),
    "chance": ("attention to each span by equal weights on all tokens that a row sees", "1"),
    "span_tokens": ("tokens in each span", "tokens"),
    "table": ("mean attention to each token of a span (RePo table 4)", "0.01"),
    "sink_mass": ("attention from generated tokens to the sink", "1"),
}


def span_mass(inputs: AttentionInputs, rows: Int[Tensor, "row"], spans: Bool[Tensor, "span token"]) -> Float[Tensor, "head span"]:
    """Mean over `rows` of the attention weight on each span, for a batch of one prompt. float64; sums to 1 over a partition."""
    weights = inputs.pattern(rows)[0].sum(-2, dtype=torch.float64)
    return weights @ spans.to(torch.float64).T / len(rows)


@dataclass(frozen=True)
class SpanMass(Reduction):
    """Mean weight [prompt, head, span] of some rows on each span, float64."""

    rows: Same
    """[prompt, row]: the rows whose attention is wanted; -1 beyond those of a prompt."""
    masks: Same
    """[prompt, span, token]"""

    def start(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head span"]:
        masks = self.masks.tensor
        return torch.zeros(len(masks), inputs.heads, masks.shape[1], dtype=torch.float64, device=masks.device)

    def add(self, result: Float[Tensor, "prompt head span"], inputs: AttentionInputs, block: HeadBlock) -> None:
        prompt, tokens = block.prompt[:, 0], block.keys.shape[2]
        wanted, masks = self.rows.tensor[prompt], self.masks.tensor[prompt].to(torch.float64)
        sinks = None if inputs.sinks is None else inputs.sinks[block.head.flatten()]
        at_once = max(1, memory_for(wanted.device, SHARED) // (8 * block.head.numel() * tokens))
        weights = torch.zeros(*block.head.shape, tokens, dtype=torch.float64, device=wanted.device)
        for rows in wanted.split(at_once, -1):
            index = rows.clamp(min=0)[:, None, :, None]
            queries = block.queries.gather(2, index.expand(-1, block.head.shape[1], -1, block.queries.shape[-1]))
            logits = queries @ block.keys.mT * inputs.logit_scale
            logits.masked_fill_(~_seen(inputs, prompt, rows)[:, None], float("-inf"))
            of_rows = weights_of(logits.flatten(0, 1), sinks).view_as(logits)
            weights += of_rows.masked_fill((rows < 0)[:, None, :, None], 0).sum(-2, dtype=torch.float64)
        rows_of_prompt = (wanted >= 0).sum(-1)[:, None, None]
        over_heads(result, block, weights @ masks.mT / rows_of_prompt)

    def written_out(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head span"]:
        """The same for any logits, the rows of one prompt at a time."""
        prompts = (select_prompts(inputs, slice(number, number + 1)) for number in range(len(self.rows.tensor)))
        parts = zip(prompts, self.rows.tensor, self.masks.tensor, strict=True)
        return torch.stack([span_mass(prompt, rows[rows >= 0], mask) for prompt, rows, mask in parts])


def _seen(inputs: AttentionInputs, prompt: Int[Tensor, "any"], rows: Int[Tensor, "any row"]) -> Bool[Tensor, "any row key"]:
    """The keys that each of the rows of some prompts may attend to; none where a row is -1."""
    valid = inputs.valid[prompt]
    distance = rows[..., None] - torch.arange(valid.shape[1], device=rows.device)
    seen = (distance >= 0) & valid[:, None]
    return seen if inputs.window is None else seen & (distance < inputs.window)


@dataclass(frozen=True)
class AttentionMass(Measure, needs=Needs(spans=("generated",), nan=("mass", "chance"))):
    """The measure `attention_mass`."""

    rows: Rows = "producing"
    """`producing`: the rows that produced the generated tokens, one earlier each; `generated`: the rows of the generated tokens."""
    name: str = "attention_mass"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Mass [prompt, layer, head, span], chance and tokens [prompt, layer, span]; mass is NaN for a span that the prompt lacks."""
        names, asked = list(spans), self._asked(inputs, spans)
        (mass,) = reduced(inputs, [asked])
        masks, of_sinks = asked.masks.tensor, {}
        if inputs.sinks is not None:  # the last mask is that of all tokens
            of_sinks["sink_mass"] = (("prompt", "layer", "head"), 1.0 - mass[..., -1])
            mass, masks = mass[..., :-1], masks[:, :-1]
        rows, tokens = asked.rows.tensor, (masks & inputs.valid[:, None]).sum(-1)
        seen = _seen(inputs, torch.arange(len(rows), device=rows.device), rows).double()
        share = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).sum(1) / (rows >= 0).sum(-1)[:, None]
        absent = tokens == 0
        chance = (masks.double() @ share[..., None])[..., 0].masked_fill(absent, float("nan"))
        mass = mass.masked_fill(absent[:, None], float("nan"))
        return Statistics(
            per_prompt=arrays(
                inputs,
                {
                    "mass": (("prompt", "layer", "head", "span"), mass),
                    "chance": (("prompt", "layer", "span"), chance),
                    "tokens": (("prompt", "layer", "span"), tokens.double()),
                    **of_sinks,
                },
                span=names,
            )
        )

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[Reduction, ...]:
        """The mean weights of the rows on the spans."""
        return (self._asked(inputs, spans),)

    def _asked(self, inputs: AttentionInputs, spans: Spans) -> SpanMass:
        asked = inputs.results.get(self)  # once per layer: to find the rows is to wait for the device
        if asked is None:
            masks = [*spans.values(), *([] if inputs.sinks is None else [inputs.valid])]
            asked = SpanMass(Same(self._rows(spans["generated"], inputs.valid)), Same(torch.stack(masks, dim=1)))
            inputs.results[self] = asked
        return asked

    def _rows(self, generated: Bool[Tensor, "prompt token"], valid: Bool[Tensor, "prompt token"]) -> Int[Tensor, "prompt row"]:
        """Numbers of the rows of each prompt, ascending, then -1."""
        counts, first = generated.sum(-1), valid.to(torch.int8).argmax(-1, keepdim=True)
        most, unproduced = torch.stack([counts.max(), generated.gather(-1, first).any().long()]).tolist()
        if unproduced and self.rows == "producing":
            raise InputError("the first token of a prompt is marked generated, but no row produced it; wanted rows 'generated'")
        rows = generated.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[:, :most]
        there = torch.arange(most, device=rows.device) < counts[:, None]
        return (rows - int(self.rows == "producing")).where(there, -1)

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `attention_mass` of a run."""
        measured = statistics.per_prompt
        mass, tokens = measured["mass"], measured["tokens"]
        per_token = mass / tokens.where(tokens > 0)
        derived = {
            "mass_per_token": per_token.transpose(*mass.dims),
            "span_tokens": tokens.isel(layer=0, drop=True).fillna(0).astype(np.int64),
            "table": 100 * per_token.mean(("prompt", "layer", "head")),
        }
        return described_group(measured.assign(derived), _TEXTS)
