"""Counts of CoPE's gates, and attention computed only from position logits.

Golovneva et al. 2024, eq. 3-9, fig. 4, 6.

    g_ij = sigmoid(q_i . x_j / sqrt(d))      p_ij = sum_{t = j .. i} g_it, at most p_max - 1
            a_ij = softmax_j of the position logits

    gate_by_token       mean of g_ij over the queries that see token j
    counted             p_{i,0}; gate_sum: the same without the limit p_max - 1
    separator_share     sum of g_ij over separators j / over all j
    last_segment_mass   mean over queries of the sum of a_ij over the keys j <= i in the query's
                        segment, without queries of the first segment, which see no other segment
    position_attention  a_ij, every row scaled to a maximum of 1, for the first `maps` prompts

Equal gates, or attention to near tokens, could produce a high share or mass by chance. So there are
two references for each: for the share, equal gates and as many random tokens; for the mass, even
attention and shuffled segments (segmentation). `..._chance` is the share of random draws that are
at least as high. Layers without gates (all schemes but CoPE) have NaN, except for the mass: schemes
that add position logits (ALiBi, KERPLE, FIRE) attend by position too. For a scheme that also
rotates (cope_rope) the rotation is left out. p_ij includes the gate of key j: a separator with an
open gate is at position 1, and the tokens between it and the query are at position 0.

This module knows nothing about the contents of a text: separators and segments are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.fitting import AnyPrompt, Layers
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.gate_sums import (
    GateSums,
    gate_sums,
    last_segment_sums,
    position_map,
)
from repo_interp.measures.kernels.segmentation import (
    Draws,
    Kinds,
    chance,
    generator,
    segment_edges,
    shuffled_edges,
)
from repo_interp.measures.labels import Record, arrays, described_group
from repo_interp.measures.segment_measure import SegmentMeasure
from repo_interp.measures.statistics import Needs, Statistics
from repo_interp.values import CountOrNone, Seed, Tokens

SEPARATOR = "separator"
KINDS = ("sections", "paragraphs", "lines", "sentences", "blocks")
_TOKENS = {
    "gate_by_token": "mean gate of each token over the queries that see it",
    "counted": "what a query counts in all, p_i0, at most the largest position [positions]",
    "gate_sum": "sum of a query's gates, without a largest position [positions]",
}
_SEPARATORS = {
    "separator_share": "share of the gates' sum on separators",
    "separator_share_shuffled": "the same for as many random tokens, mean over draws",
    "separator_share_chance": (
        "share of random choices of tokens with at least as much of the gates' sum"
    ),
    "separator_gate": "mean gate of separators, over pairs",
    "other_gate": "mean gate of all other tokens, over pairs",
}
_OTHERS = {
    "last_segment_mass": (
        "attention from position alone on the query's own segment, mean over queries"
    ),
    "last_segment_shuffled": "the same for shuffled segments, mean over draws",
    "last_segment_chance": (
        "share of shuffled segments with at least as much attention from position alone"
    ),
    # Per layer, since a layer with a window sees other pairs.
    "separator_share_even": "share of equal gates on separators",
    "last_segment_even": "even attention on the query's own segment, mean over queries",
    "largest_position": "contextual positions beyond are taken for this one [positions]",
    "position_attention": "attention from position alone, every row scaled to a maximum of 1",
}
_OF_PROMPTS = {
    "last_segment_queries": (
        "queries behind the first segment, over which masses are means [tokens]"
    ),
    "separator": "1 where a token separates, -1 for padding",
}


@dataclass(frozen=True)
class Gates(SegmentMeasure):
    """The measure `gates`."""

    kinds: Kinds = KINDS
    """Kinds of segments that attention may stay within."""
    maps: CountOrNone = 0
    """The map of attention from position alone, [query, key] per head, is kept for this number of
    first prompts.
    """
    map_tokens: Tokens = 1024
    """Length in tokens of the longest prompt whose map is kept."""
    draws: Draws = 20
    """Random choices of separators, and shuffled layouts of segments, of the controls."""
    seed: Seed = 0
    """Seed of the controls."""
    name: str = "gates"
    describes: ClassVar[str] = "tokens that CoPE counts"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether a layer counts positions by gates."""
        return layers.contextual

    @property
    def needs(self) -> Needs:
        """Segments of its kinds; CoPE-ALiBi has no largest position."""
        return Needs(
            segments=self.kinds,
            by_pair=True,
            infinite=("largest_position",),
            nan=(*_TOKENS, *_SEPARATORS, *_OTHERS),
        )

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Return a gap for layers without gates; with position logits they still have the mass."""
        if inputs.gate_features is not None:
            return None
        if inputs.position_logits is None:
            return Gap("count no tokens by gates and add no logits by position")
        more = (
            ", and add logits by contents, so that attention by them is not by position alone"
            if inputs.logits_by_content
            else ""
        )
        return Gap(f"count no tokens by gates{more}", "no gates")

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return all quantities of one layer, prompt by prompt.

        Raises:
            InputError: `maps` includes a prompt of more than `map_tokens` tokens.
        """
        separators = spans.get(SEPARATOR, torch.zeros_like(inputs.valid)) & inputs.valid
        separates = torch.where(inputs.valid, separators.to(torch.int8), -1).to(torch.int8)
        record = {
            **_by_token(inputs, separators, self.draws, self.seed),
            **_last_segment(inputs, spans, self.kinds, self.draws, self.seed),
            "separator": ("prompt layer key", separates),
        }
        mapped = [row for row, number in enumerate(inputs.prompts.tolist()) if number < self.maps]
        if mapped:
            record["position_attention"] = (
                "prompt layer head query key",
                self._maps(inputs, mapped),
            )
        places = np.arange(inputs.valid.shape[1])
        return Statistics(
            per_prompt=arrays(inputs, record, query=places, key=places, kind=list(self.kinds))
        )

    def _maps(
        self, inputs: AttentionInputs, mapped: list[int]
    ) -> Float[Tensor, "prompt head query key"]:
        prompts, heads, tokens, _ = inputs.queries.shape
        # On the processor: only few prompts have a map, but merging needs one shape for the batch
        maps = torch.full((prompts, heads, tokens, tokens), torch.nan)
        for row in mapped:
            length = int(inputs.valid[row].sum())
            if length > self.map_tokens:
                raise InputError(
                    f"prompt {int(inputs.prompts[row])} has {length} tokens, and a map has "
                    "token x token numbers per head; "
                    f"ask for maps of shorter prompts, or raise map_tokens={self.map_tokens}"
                )
            if inputs.position_logits is not None:
                maps[row] = position_map(select_prompts(inputs, slice(row, row + 1)))[0]
        return maps

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `gates` of a run."""
        measured = statistics.per_prompt.assign(
            # A number of the layer, stored by prompt, since sums over prompts would add it up
            largest_position=statistics.per_prompt["largest_position"].max("prompt")
        )
        # Equal in all layers, so kept once.
        of_prompts = measured[list(_OF_PROMPTS)].isel(layer=0, drop=True)
        return described_group(measured, _TOKENS | _SEPARATORS | _OTHERS).assign(
            described_group(of_prompts, _OF_PROMPTS)
        )


def _by_token(
    inputs: AttentionInputs, separators: Bool[Tensor, "prompt token"], draws: int, seed: int
) -> Record:
    prompts, heads, tokens, _ = inputs.queries.shape
    sums = _unknown_sums(inputs) if inputs.gate_features is None else gate_sums(inputs)
    padding = ~inputs.valid[:, None]
    values = {
        "gate_by_token": ("key", sums.by_key / sums.queries[:, None].clamp_min(1)),
        # Sums over keys, clamped as CoPE clamps p_ij
        "counted": ("query", sums.by_query.clamp(max=inputs.largest_position)),
        "gate_sum": ("query", sums.by_query),
    }
    share = torch.full((len(_SEPARATORS), prompts, heads), torch.nan, dtype=torch.float64)
    even = torch.full((prompts,), torch.nan, dtype=torch.float64)
    for row, number in enumerate(inputs.prompts.tolist()):
        valid, chosen = inputs.valid[row], separators[row]
        here = chosen[valid]
        if not bool(here.any()):
            continue
        # Queries that see a key: more for early tokens, so equal gates favor early separators
        pairs = inputs.visible(torch.arange(tokens, device=valid.device))[row].sum(0)
        even[row] = (pairs[chosen].sum() / pairs.sum()).double()
        by_key = sums.by_key[row][:, valid]
        total = by_key.sum(-1)
        random = generator(seed, number)
        # Random tokens, as many as there are separators.
        drawn = torch.as_tensor(
            np.stack([random.permutation(here.cpu().numpy()) for _ in range(draws)]),
            device=valid.device,
        )
        # [draw, token] x [token, head]: sum of the gates on a random choice of tokens
        shuffled = (drawn.double() @ by_key.T) / total
        on_separators = by_key[:, here].sum(-1)
        observed = on_separators / total
        gate = on_separators / pairs[chosen].sum()
        other = by_key[:, ~here].sum(-1) / pairs[valid & ~chosen].sum()
        scores = observed, shuffled.mean(0), chance(shuffled, observed), gate, other
        share[:, row] = torch.stack(scores)
    largest = inputs.largest_position if inputs.gate_features is not None else torch.nan
    return {
        **{
            name: (
                f"prompt layer head {axis}",
                of_tokens.masked_fill(padding, torch.nan).float(),
            )
            for name, (axis, of_tokens) in values.items()
        },
        tuple(_SEPARATORS): ("prompt layer head", share),
        "separator_share_even": ("prompt layer", even),
        "largest_position": ("prompt layer", np.full(prompts, largest)),
    }


def _unknown_sums(inputs: AttentionInputs) -> GateSums:
    """Return sums of NaN, for a layer without gates."""
    unknown = torch.full_like(inputs.queries[..., 0], torch.nan, dtype=torch.float64)
    return GateSums(unknown, unknown, torch.ones_like(inputs.valid, dtype=torch.long))


def _last_segment(
    inputs: AttentionInputs, spans: Spans, kinds: tuple[str, ...], draws: int, seed: int
) -> Record:
    prompts, tokens = inputs.valid.shape
    layouts = 1 + draws
    first = torch.zeros(
        prompts, len(kinds), layouts, tokens, dtype=torch.long, device=inputs.valid.device
    )
    counted = torch.zeros_like(first, dtype=torch.bool)
    for row, number in enumerate(inputs.prompts.tolist()):
        for column, kind in enumerate(kinds):
            members, edges = segment_edges(spans, kind, row)
            if len(edges):
                drawn = shuffled_edges(edges, len(members), draws, generator(seed, number, kind))
                begins = torch.zeros(layouts, len(members), dtype=torch.long, device=members.device)
                # [layout, member]: 1 where a segment begins, for the true layout and the shuffled
                # ones
                begins.scatter_(
                    1,
                    torch.cat([edges[None], drawn]),
                    torch.ones_like(torch.cat([edges[None], drawn])),
                )
                places = torch.arange(len(members), device=members.device)
                # The first member of each member's segment
                first_member = (places * begins).cummax(1).values
                first[row, column][:, members] = members[first_member]
                # Queries of the first segment, which begins at member 0, are left out
                counted[row, column][:, members] = first_member > 0
    queries = counted.sum(-1)
    mass = torch.full((prompts, inputs.heads, len(kinds), layouts), torch.nan, dtype=torch.float64)
    even = torch.full((prompts, len(kinds), layouts), torch.nan, dtype=torch.float64)
    if inputs.position_logits is not None and bool(counted.any()):
        sums, even_sums = last_segment_sums(inputs, first.flatten(1, 2), counted.flatten(1, 2))
        # NaN for a prompt without a second segment
        over = torch.where(queries > 0, queries.double(), torch.nan)
        mass = (sums.unflatten(2, (len(kinds), layouts)) / over[:, None]).cpu()
        even = (even_sums.unflatten(1, (len(kinds), layouts)) / over).cpu()
    # Layout 0 is the true one, the others are shuffled.
    observed, drawn = mass[..., 0], mass[..., 1:].movedim(-1, 0)
    return {
        "last_segment_mass": ("prompt layer head kind", observed),
        "last_segment_shuffled": ("prompt layer head kind", drawn.mean(0)),
        "last_segment_chance": ("prompt layer head kind", chance(drawn, observed)),
        "last_segment_even": ("prompt layer kind", even[..., 0]),
        "last_segment_queries": ("prompt layer kind", queries[..., 0]),
    }
