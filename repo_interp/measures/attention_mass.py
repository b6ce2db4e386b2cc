"""How much attention the generated tokens pay to each span (RePo sec. 5.1, table 4).

    mass(span) = mean over generated rows i of sum_{j in span} A_ij          A = softmax of the logits, post-softmax weights
    mass per token = mass / number of tokens in the span;    table: mean over prompts, layers and heads, x 100

Rows are those that produced the generated tokens, one earlier (`rows="producing"`), where a model
looks for its answer; or the generated tokens' own rows (`rows="generated"`), the paper's literal
wording, where the last one predicts nothing. With long answers the two nearly agree. A head with a
sink (gpt-oss) gives the rest of its attention to it: `sink_mass`. `chance` is what equal weights on
all tokens that a row sees would give a span. Only these rows are computed: O(rows n d) per head, no
n x n map.

Knows nothing about what the spans mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans, select_prompts, weights_of
from repo_interp.measures.kernels.heads import HeadBlock, Reduction, Same, over_heads, reduced
from repo_interp.measures.kernels.seen_pairs import extents, is_whole, once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.memory import SHARED, memory_for

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


def span_mass(
    inputs: AttentionInputs, rows: Int[Tensor, "row"], spans: Bool[Tensor, "span token"]
) -> Float[Tensor, "head span"]:
    """Mean over `rows` of the attention weight on each span, for a batch of one prompt. float64;
    sums to 1 over a partition.
    """
    weights = inputs.pattern(rows)[0].sum(-2, dtype=torch.float64)
    return weights @ spans.to(torch.float64).T / len(rows)


@dataclass(frozen=True)
class SpanMass(Reduction):
    """Sum of the weights [prompt, head, span] of some rows on each span, float64."""

    rows: Same
    """[prompt, row]: the rows whose attention is wanted; -1 beyond those of a prompt."""
    counts: tuple[int, ...]
    """Rows of each prompt."""
    masks: Same
    """[prompt, token, span], float64."""

    def start(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head span"]:
        masks = self.masks.tensor
        return torch.zeros(
            len(masks), inputs.heads, masks.shape[-1], dtype=torch.float64, device=masks.device
        )

    def add(
        self, result: Float[Tensor, "prompt head span"], inputs: AttentionInputs, block: HeadBlock
    ) -> None:
        prompt, members = block.prompt[:, 0], block.head.shape[1]
        wanted, masks, parts = self.rows.tensor[prompt], self.masks.tensor[prompt], []
        sinks = None if inputs.sinks is None else inputs.sinks[block.head.flatten()]
        at_once = max(
            1, memory_for(wanted.device, SHARED) // (8 * block.head.numel() * masks.shape[1])
        )
        ragged = len(set(self.counts)) > 1
        for rows in wanted.split(at_once, -1):
            index = (rows.clamp(min=0) if ragged else rows)[:, None, :, None]
            queries = block.queries.gather(
                2, index.expand(-1, members, -1, block.queries.shape[-1])
            )
            logits = queries @ block.keys.mT * inputs.logit_scale
            logits.masked_fill_(_hidden(inputs, prompt, rows)[:, None], float("-inf"))
            of_rows = weights_of(logits.flatten(0, 1), sinks).view_as(logits)
            of_rows = of_rows.masked_fill((rows < 0)[:, None, :, None], 0) if ragged else of_rows
            parts.append(of_rows.sum(-2, dtype=torch.float64))
        over_heads(
            result, block, torch.bmm(torch.stack(parts).sum(0) if parts[1:] else parts[0], masks)
        )

    def written_out(self, inputs: AttentionInputs) -> Float[Tensor, "prompt head span"]:
        """The same for any logits, the rows of one prompt at a time."""
        prompts = (
            select_prompts(inputs, slice(number, number + 1)) for number in range(len(self.counts))
        )
        parts = zip(prompts, self.rows.tensor, self.counts, self.masks.tensor, strict=True)
        return torch.stack(
            [span_mass(prompt, rows[:count], mask.T) * count for prompt, rows, count, mask in parts]
        )


def _hidden(
    inputs: AttentionInputs, prompt: Int[Tensor, "any"], rows: Int[Tensor, "any row"]
) -> Bool[Tensor, "any row key"]:
    """The keys that each of the rows of some prompts may not attend to; all where a row is -1."""
    keys, rows = torch.arange(inputs.valid.shape[1], device=rows.device), rows[..., None]
    hidden = keys > rows
    if not is_whole(inputs.valid):
        hidden = hidden | ~inputs.valid[prompt][:, None]
    return hidden if inputs.window is None else hidden | (keys <= rows - inputs.window)


@dataclass(frozen=True)
class _Asked:
    """What the spans of a batch ask of every layer."""

    of_heads: SpanMass
    rows: Float[Tensor, "prompt 1 1"]
    """How many."""
    tokens: Float[Tensor, "prompt span"]
    absent: Bool[Tensor, "prompt span"]


@dataclass(frozen=True)
class AttentionMass(Measure, needs=Needs(spans=("generated",), nan=("mass", "chance"))):
    """The measure `attention_mass`."""

    rows: Rows = "producing"
    """`producing`: the rows that produced the generated tokens, one earlier each; `generated`: the
    rows of the generated tokens.
    """
    name: str = "attention_mass"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Mass [prompt, layer, head, span], chance and tokens [prompt, layer, span]; mass is NaN
        for a span that the prompt lacks.
        """
        names, asked = list(spans), self._asked(inputs, spans)
        (mass,) = reduced(inputs, [asked.of_heads])
        mass, of_sinks, rows = mass / asked.rows, {}, asked.of_heads.rows.tensor
        if inputs.sinks is not None:  # the last mask is that of all tokens
            of_sinks["sink_mass"] = (("prompt", "layer", "head"), 1.0 - mass[..., -1])
            mass = mass[..., :-1]
        chance = once(
            ("chance", inputs.window), lambda: self._chance(inputs, asked), rows, inputs.valid
        )
        mass = mass.masked_fill(asked.absent[:, None], float("nan"))
        return Statistics(
            per_prompt=arrays(
                inputs,
                {
                    "mass": (("prompt", "layer", "head", "span"), mass),
                    "chance": (("prompt", "layer", "span"), chance),
                    "tokens": (("prompt", "layer", "span"), asked.tokens),
                    **of_sinks,
                },
                span=names,
            )
        )

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> tuple[Reduction, ...]:
        """The mean weights of the rows on the spans."""
        return (self._asked(inputs, spans).of_heads,)

    def _chance(self, inputs: AttentionInputs, asked: _Asked) -> Float[Tensor, "prompt span"]:
        rows, spans = asked.of_heads.rows.tensor, asked.tokens.shape[1]
        seen = (~_hidden(inputs, torch.arange(len(rows), device=rows.device), rows)).double()
        share = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).sum(1, keepdim=True) / asked.rows
        return torch.bmm(share, asked.of_heads.masks.tensor[..., :spans])[:, 0].masked_fill(
            asked.absent, float("nan")
        )

    def _asked(self, inputs: AttentionInputs, spans: Spans) -> _Asked:
        sinks = inputs.sinks is not None
        make = partial(self._found, spans, inputs.valid, sinks)
        return once(("rows", self, *spans, sinks), make, inputs.valid, *spans.values())

    def _found(self, spans: Spans, valid: Bool[Tensor, "prompt token"], sinks: bool) -> _Asked:
        rows, counts = self._rows(spans["generated"], valid)
        masks = torch.stack([*spans.values(), *([valid] if sinks else [])], dim=-1).double()
        tokens = (masks[..., : len(spans)] * valid[..., None]).sum(1)
        number = torch.tensor(counts, dtype=torch.float64, device=rows.device)[:, None, None]
        return _Asked(SpanMass(Same(rows), counts, Same(masks)), number, tokens, tokens == 0)

    def _rows(
        self, generated: Bool[Tensor, "prompt token"], valid: Bool[Tensor, "prompt token"]
    ) -> tuple[Int[Tensor, "prompt row"], tuple[int, ...]]:
        """Numbers of the rows of each prompt, ascending, then -1; and how many there are.

        Waits for the device, once per batch.
        """
        of_prompts = generated.tolist()
        counts = tuple(map(sum, of_prompts))
        unproduced = any(
            of_prompt[first]
            for of_prompt, (first, _, _) in zip(of_prompts, extents(valid), strict=True)
        )
        if unproduced and self.rows == "producing":
            raise InputError(
                "the first token of a prompt is marked generated, but no row produced it; "
                "wanted rows 'generated'"
            )
        rows = (
            generated.to(torch.int8)
            .sort(dim=-1, descending=True, stable=True)
            .indices[:, : max(counts)]
        )
        there = (
            torch.arange(max(counts), device=rows.device)
            < torch.tensor(counts, device=rows.device)[:, None]
        )
        return (rows - int(self.rows == "producing")).where(there, -1), counts

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
