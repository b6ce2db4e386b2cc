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
from repo_interp.measures.kernels.heads import HeadBlock, Reduction, Same, reduced
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
    return _mean_mass(inputs.logits(rows)[0], spans, inputs.sinks)


@dataclass(frozen=True)
class SpanMass(Reduction):
    """Mean weight [prompt, head, span] of some rows on each span, float64."""

    rows: tuple[Same, ...]
    """Of each prompt, the rows whose attention is asked for."""
    masks: Same
    """[prompt, span, token]"""

    def start(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head span"]:
        masks = self.masks.tensor
        return torch.zeros(len(masks), inputs.heads, masks.shape[1], dtype=torch.float64, device=masks.device)

    def add(self, result: Float[Tensor, "prompt head span"], inputs: AttentionInputs, block: HeadBlock) -> None:
        for key, prompt in enumerate(block.prompt[:, 0].tolist()):
            rows, mask = self.rows[prompt].tensor, self.masks.tensor[prompt]
            logits = block.queries[key][:, rows] @ block.keys[key].mT * inputs.logit_scale
            hidden = ~select_prompts(inputs, slice(prompt, prompt + 1)).visible(rows)
            sinks = None if inputs.sinks is None else inputs.sinks[block.head[key]]
            result[prompt, block.head[key]] = _mean_mass(logits.masked_fill_(hidden, float("-inf")), mask, sinks)

    def written_out(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head span"]:
        """The same for any logits, the rows of one prompt at a time."""
        prompts = (select_prompts(inputs, slice(number, number + 1)) for number in range(len(self.rows)))
        parts = zip(prompts, self.rows, self.masks.tensor, strict=True)
        return torch.stack([span_mass(prompt, rows.tensor, mask) for prompt, rows, mask in parts])


def _mean_mass(
    logits: Float[Tensor, "head row key"], spans: Bool[Tensor, "span key"], sinks: Float[Tensor, "head"] | None
) -> Float[Tensor, "head span"]:
    weights = weights_of(logits, sinks).sum(-2, dtype=torch.float64)
    return weights @ spans.to(torch.float64).T / logits.shape[-2]


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
        tokens, chances = (masks & inputs.valid[:, None]).sum(-1), []
        for number, rows in enumerate(asked.rows):
            seen = select_prompts(inputs, slice(number, number + 1)).visible(rows.tensor)[0].double()
            share = (seen / seen.sum(-1, keepdim=True)).mean(0)
            chances.append(masks[number].double() @ share)
        absent = tokens == 0
        chance = torch.stack(chances).masked_fill(absent, float("nan"))
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
        rows = [self._rows(*of_prompt) for of_prompt in zip(spans["generated"], inputs.valid, strict=True)]
        masks = [*spans.values(), *([] if inputs.sinks is None else [inputs.valid])]
        return SpanMass(tuple(map(Same, rows)), Same(torch.stack(masks, dim=1)))

    def _rows(self, generated: Bool[Tensor, "token"], valid: Bool[Tensor, "token"]) -> Int[Tensor, "row"]:
        rows = generated.nonzero()[:, 0]
        if self.rows == "generated":
            return rows
        if bool(generated[valid.to(torch.int8).argmax()]):
            raise InputError("the first token of a prompt is marked generated, but no row produced it; wanted rows 'generated'")
        return rows - 1

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
