"""How much attention the generated tokens pay to each span (RePo sec. 5.1, table 4).

    mass(span) = mean over generated rows i of sum_{j in span} A_ij          A = softmax of the logits, post-softmax weights
    mass per token = mass / number of tokens in the span;    table: mean over prompts, layers and heads, x 100

Rows are those that produced the generated tokens, one earlier (`rows="producing"`), where a model looks for its answer; or the generated
tokens' own rows (`rows="generated"`), the paper's literal wording, where the last one predicts nothing. With long answers the two nearly
agree. `chance` is what equal weights on all tokens that a row sees would give a span. Only these rows are computed: O(rows n d) per head,
no n x n map.

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
from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.statistics import Measure, Statistics


def span_mass(inputs: AttentionInputs, rows: Int[Tensor, "row"], spans: Bool[Tensor, "span token"]) -> Float[Tensor, "head span"]:
    """Mean over `rows` of the attention weight on each span, for a batch of one prompt. float64; sums to 1 over a partition."""
    weights = torch.softmax(inputs.logits(rows)[0], dim=-1)
    return (weights.double() @ spans.double().T).mean(-2)


Rows = Literal["generated", "producing"]
ROWS: tuple[Rows, ...] = get_args(Rows)


@dataclass(frozen=True)
class AttentionMass(Measure):
    """The measure `attention_mass`."""

    rows: Rows = "producing"
    """ "producing", or "generated": see the module."""
    name: str = "attention_mass"

    @property
    def required_spans(self) -> tuple[str, ...]:
        """The rows are those of generated tokens, so these must be marked."""
        return ("generated",)

    @property
    def may_be_nan(self) -> tuple[str, ...]:
        """What not every prompt, layer and head has, or what is a share or a correlation of nothing."""
        return ("mass", "chance")

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Mass [prompt, layer, head, span], chance and tokens [prompt, layer, span]; mass is NaN for a span that the prompt lacks."""
        names = list(spans)
        masks = torch.stack([spans[name] for name in names], dim=1)
        tokens = (masks & inputs.valid[:, None]).sum(-1)
        masses, chances = [], []
        for number in range(inputs.valid.shape[0]):
            prompt = select_prompts(inputs, slice(number, number + 1))
            rows = self._rows(spans["generated"][number], inputs.valid[number])
            seen = prompt.visible(rows)[0].double()
            chance = ((seen / seen.sum(-1, keepdim=True)) @ masks[number].double().T).mean(0)
            masses.append(span_mass(prompt, rows, masks[number]).masked_fill(tokens[number] == 0, float("nan")))
            chances.append(chance.masked_fill(tokens[number] == 0, float("nan")))
        return Statistics(
            per_prompt=xr.Dataset(
                {
                    "mass": of_layer(inputs, ("prompt", "layer", "head", "span"), torch.stack(masses), span=names),
                    "chance": of_layer(inputs, ("prompt", "layer", "span"), torch.stack(chances), span=names),
                    "tokens": of_layer(inputs, ("prompt", "layer", "span"), tokens.double(), span=names),
                }
            )
        )

    def _rows(self, generated: Bool[Tensor, "token"], valid: Bool[Tensor, "token"]) -> Int[Tensor, "row"]:
        rows = generated.nonzero()[:, 0]
        if self.rows == "generated":
            return rows
        if bool(generated[valid.to(torch.int8).argmax()]):
            raise InputError("the first token of a prompt is marked generated, but no row produced it; wanted rows 'generated'")
        return rows - 1

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `attention_mass` of a run."""
        mass, tokens = statistics.per_prompt["mass"], statistics.per_prompt["tokens"]
        per_token = mass / tokens.where(tokens > 0)
        span_tokens = tokens.isel(layer=0, drop=True).fillna(0).astype(np.int64)
        return xr.Dataset(
            {
                "mass": described(mass, "attention from generated tokens to each span", "1"),
                "mass_per_token": described(
                    per_token.transpose(*mass.dims),
                    "attention from generated tokens to each token of a span",
                    "1",
                ),
                "chance": described(
                    statistics.per_prompt["chance"], "attention to each span by equal weights on all tokens that a row sees", "1"
                ),
                "span_tokens": described(span_tokens, "tokens in each span", "tokens"),
                "table": described(
                    100 * per_token.mean(("prompt", "layer", "head")),
                    "mean attention to each token of a span (RePo table 4)",
                    "0.01",
                ),
            }
        )
