"""Attention of generated tokens to spans (RePo sec. 5.1, table 4).

    mass(span) = mean over generated rows i of sum_{j in span} A_ij
            A = softmax of the logits, post-softmax weights
    mass per token = mass / number of tokens in the span;
            table: mean over prompts, layers and heads, x 100

If every token of an answer copies another token (`Prompt.sources`), and the prompts name no needle,
a row has separate spans besides those of the prompt:

    needle(i) = {the token that the row's answer token copies}      query(i) = {the token before that answer token}

Rows are those that produced the generated tokens, one earlier (`rows="producing"`), where a model
looks for its answer; or the generated tokens' rows (`rows="generated"`), the paper's literal
wording, where the last one predicts nothing. With long answers the two nearly agree. A head with a
sink (gpt-oss) gives the rest of its attention to it: `sink_mass`. `chance` is the mass of equal
weights on all tokens that a row sees. Only these rows are computed: O(rows n d) per head, no n x n
map.

This module knows nothing about the meaning of spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.fitting import AnyPrompt, Layers
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.measures.kernels.seen_pairs import extents, on_host, once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import HeadScore, Measure, Needs, Statistics
from repo_interp.positions.sinks import weights_of

Rows = Literal["generated", "producing"]
ROWS: tuple[Rows, ...] = get_args(Rows)
_OF_ROWS = ("needle", "query")
"""Spans that every row has to itself where answers copy tokens."""
_TEXTS = {
    "mass": "attention from generated tokens to each span",
    "mass_per_token": "attention from generated tokens to each token of a span",
    "chance": "attention to each span by equal weights on all tokens that a row sees",
    "span_tokens": "tokens in each span [tokens]",
    "table": "mean attention to each token of a span (RePo table 4) [0.01]",
    "sink_mass": "attention from generated tokens to the sink",
}


@dataclass(frozen=True)
class _Asked:
    """Rows and spans of a batch, the same for all layers."""

    rows: Int[Tensor, "row"]
    """Rows that any prompt needs, ascending."""
    wanted: Bool[Tensor, "prompt token"]
    """Rows that a prompt needs."""
    shared: bool
    """Whether all prompts ask for the same rows."""
    count: Float[Tensor, "prompt 1 1"]
    """How many these are."""
    masks: Float[Tensor, "prompt token span"]
    tokens: Float[Tensor, "prompt span"]
    own: Int[Tensor, "prompt row span"] | None
    """The one token of every span that a row has to itself, -1 where it has none; None: no such spans.
    """


@dataclass(frozen=True)
class AttentionMass(
    Measure,
    needs=Needs(
        spans=("generated",), sources=True, by_pair=True, nan=("mass", "chance"), documents=True
    ),
):
    """The measure `attention_mass`."""

    rows: Rows = "producing"
    """`producing`: the rows that produced the generated tokens, one earlier; `generated`: the
    rows of the generated tokens.
    """
    name: str = "attention_mass"
    describes: ClassVar[str] = "attention from generated tokens to spans"
    offers: ClassVar[str] = "head_scores"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether every prompt has rows that produce an answer."""
        return all(prompt.generated for prompt in prompts)

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return mass [prompt, layer, head, span], chance and tokens [prompt, layer, span].

        Mass and chance are NaN for a span that the prompt lacks.
        """
        valid, masks = inputs.valid, spans.values()
        names = [name for name in spans if name != "source"]
        # The same for all layers of a batch, and finding the rows waits for the device
        asked = once(("rows", self, *spans), lambda: self._asked(spans, valid), valid, *masks)
        parts, own, sinks = [], [], None
        for rows, logits in row_blocks(inputs, asked.rows):
            sinks = inputs.sinks_of(rows)
            weights = weights_of(logits, sinks)
            # Prompts of a batch may ask for other rows: those of the others count 0.
            if not asked.shared:
                weights = weights.where(asked.wanted[:, None, rows, None], 0)
            parts.append(weights.sum(-2, dtype=torch.float64))
            if asked.own is not None:
                own.append(_gathered(weights, asked.own[:, rows]).sum(-2, dtype=torch.float64))
        sums = {
            name: torch.stack(some).sum(0) if some[1:] else some[0]
            for name, some in (("by_key", parts), ("own", own))
            if some
        }
        found = jointly(_mass, sums, [asked, sinks is not None])
        names += _OF_ROWS if own else ()
        # Layers of one window see the same pairs
        name = "chance", self, inputs.window
        chance = once(name, lambda: _chance(inputs, asked), valid, asked.masks)
        record = {
            "mass": ("prompt layer head span", found["mass"]),
            "chance": ("prompt layer span", chance),
            "tokens": ("prompt layer span", asked.tokens),
        }
        if sinks is not None:
            record["sink_mass"] = "prompt layer head", found["sink_mass"]
        return Statistics(per_prompt=arrays(inputs, record, span=names))

    def _asked(self, spans: Spans, valid: Bool[Tensor, "prompt token"]) -> _Asked:
        """Return rows and masks of the spans; wait for the device, once per batch."""
        wanted, first = spans["generated"], [start for start, _, _ in extents(valid)]
        known = on_host(wanted)
        if self.rows == "producing":
            if known[range(len(first)), first].any():
                raise InputError(
                    "the first token of a prompt is marked generated, but no row produced it; "
                    "wanted rows 'generated'"
                )
            # Row i produces token i + 1; no prompt's first token is generated, as checked above.
            wanted, known = wanted.roll(-1, -1), np.roll(known, -1, -1)
        named = [mask for name, mask in spans.items() if name != "source"]
        masks = torch.stack(named, -1).double()
        tokens, own = (masks * valid[..., None]).sum(1), None
        if "source" in spans:
            own = self._own(spans["source"].long())
            tokens = torch.cat([tokens, (own >= 0).any(1).double()], -1)
        return _Asked(
            rows=torch.from_numpy(np.flatnonzero(known.any(0))).to(valid.device),
            wanted=wanted,
            shared=np.array_equal(known, np.broadcast_to(known[:1], known.shape)),
            count=wanted.sum(-1, dtype=torch.float64)[:, None, None],
            masks=masks,
            tokens=tokens,
            own=own,
        )

    def _own(self, source: Int[Tensor, "prompt token"]) -> Int[Tensor, "prompt row span"]:
        """The needle and the query of every row."""
        before = torch.arange(source.shape[1], device=source.device) - 1
        own = torch.stack([source, before.expand_as(source).where(source >= 0, -1)], -1)
        return own.roll(-1, 1) if self.rows == "producing" else own

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `attention_mass` of a run."""
        measured, labels = statistics.variables()
        axes = ("prompt", "layer", "head", "span")
        mass = measured["mass"].transpose(*axes)
        tokens = measured["tokens"].transpose("prompt", "layer", "span")
        per_token = mass / tokens.where(tokens > 0)
        derived = {
            "mass_per_token": per_token,
            # Spans do not depend on the layer.
            "span_tokens": (
                ("prompt", "span"),
                np.nan_to_num(tokens.values[:, 0]).astype(np.int64),
            ),
            "table": 100 * per_token.mean(("prompt", "layer", "head")),
        }
        return described_group(measured | derived, _TEXTS, labels)

    def head_scores(self, group: xr.Dataset) -> Mapping[str, HeadScore]:
        """Return the attention to each span."""
        mass = group["mass"]
        return {
            f"attention to {span}": HeadScore(mass.isel(span=place, drop=True))
            for place, span in enumerate(mass["span"].values)
        }


def _mass(
    asked: _Asked,
    with_sink: bool,
    by_key: Float[Tensor, "layer prompt head key"],
    own: Float[Tensor, "layer prompt head span"] | None = None,
) -> dict[str, Tensor]:
    """Masses of layers, from sums over rows."""
    # [prompt, layer and head, key] x [prompt, key, span]: spans may overlap
    together = by_key.transpose(0, 1).flatten(1, 2)
    mass = torch.bmm(together, asked.masks).unflatten(1, (len(by_key), -1)).transpose(0, 1)
    mass = mass / asked.count
    if own is not None:
        mass = torch.cat([mass, own / asked.count], -1)
    found = {"mass": mass.masked_fill(asked.tokens[:, None] == 0, torch.nan)}
    if with_sink:
        # The sink takes what keys leave: softmax over both sums to 1
        found["sink_mass"] = 1.0 - by_key.sum(-1) / asked.count[..., 0]
    return found


def _chance(inputs: AttentionInputs, asked: _Asked) -> Float[Tensor, "prompt span"]:
    seen = (inputs.visible(asked.rows) & asked.wanted[:, asked.rows, None]).double()
    # Rows that a prompt does not ask for see nothing here and add 0
    # [prompt, row, key]: the share that equal weights give to a key
    even = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    share = even.sum(1, keepdim=True) / asked.count
    given = torch.bmm(share, asked.masks)[:, 0]
    if asked.own is not None:
        own = _gathered(even[:, None], asked.own[:, asked.rows]).sum(-2)[:, 0] / asked.count[..., 0]
        given = torch.cat([given, own], -1)
    return given.masked_fill(asked.tokens == 0, torch.nan)


def _gathered(
    weights: Float[Tensor, "prompt head row key"], places: Int[Tensor, "prompt row span"]
) -> Float[Tensor, "prompt head row span"]:
    """The weights of one key per row and span; 0 if the row has no such key."""
    index = places.clamp(min=0)[:, None].expand(-1, weights.shape[1], -1, -1)
    return weights.gather(-1, index).where(places[:, None] >= 0, 0)
