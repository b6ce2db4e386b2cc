"""Attention of a head by octave of the distance, and tokens that act as sinks.

With A_ij the attention of query i to key j, and f the first token of a query's document,

    mass [octave]      mean over i of the sum of A_ij over distances 2^k <= i - j < 2^(k + 1),
                       without f
    uniform [octave]   the same for even attention over all keys that a query sees (the null)
    first_token        mean over i of A_if
    own_token          mean over i of A_ii
    received [token]   mean over later queries i, and heads, of A_ij: of the first prompt
    received_queries   number of queries in that mean: few for the last tokens of a document
    sink_token         the token except f that receives the most attention above even attention,
                       among tokens before at least `later_queries` queries and a quarter of their
                       document's queries; -1 for no token
    sink_mass          mean over later queries of a head's attention to the sink; `sink_uniform` is
                       the same for even attention

Queries are all tokens except f, which sees only itself; for a longer prompt, the middles of
`queries` equal parts. Attention is computed a few rows at a time. This module knows nothing about
why a head attends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.fitting import AnyPrompt, Layers
from repo_interp.measures.kernels.logit_sums import row_blocks
from repo_interp.measures.kernels.samples import first_tokens, middles, places_of
from repo_interp.measures.kernels.seen_pairs import once
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.positions.sinks import weights_of
from repo_interp.values import Count

LATER_SHARE = 0.25
"""Least share of a document's queries after a sink: fewer queries see the token only from nearby.
"""
_TEXTS = {
    "mass": "attention by distance, without the first token",
    "uniform": "attention to them, were it even over all keys",
    "first_token": "attention to the first token",
    "own_token": "attention to the token itself",
    "received": "attention that a token of the first prompt receives from later ones",
    "received_queries": "later queries that see a token of the first prompt [queries]",
    "sink_token": "token but the first that receives most above even attention; -1: none [tokens]",
    "sink_mass": "attention of later tokens to the sink token",
    "sink_uniform": "attention of later tokens to it, were it even over all keys",
}


@dataclass(frozen=True)
class Octaves(
    Measure,
    needs=Needs(by_pair=True, nan=("received", "sink_mass", "sink_uniform"), documents=True),
):
    """The measure `octaves`."""

    queries: Count = 512
    """Most queries of a prompt; a longer one has the middles of as many equal parts."""
    later_queries: Count = 8
    """Least number of queries after a sink; a quarter of its document's queries must follow too."""
    name: str = "octaves"
    describes: ClassVar[str] = "attention by distance, and sinks"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return True for all layers."""
        return True

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Reduce rows of attention of each prompt."""
        # Up to the largest distance in the batch, tokens - 1
        octaves = [2**k for k in range(max(1, (inputs.valid.shape[1] - 1).bit_length()))]
        first, device = first_tokens(inputs), inputs.valid.device
        steps = once(
            ("steps", len(octaves)),
            lambda: torch.tensor([*octaves, 2 * octaves[-1]], device=device),
            inputs.valid,
        )
        found = []
        for row, places in enumerate(places_of(inputs.valid)):
            # A first token sees only itself, so it is a query only if there is no other
            begins = {*places[:1]}
            if inputs.documents is not None:
                begins = set(first[row][inputs.valid[row]].tolist())
            candidates = [place for place in places if place not in begins] or places
            chosen = [candidates[middle] for middle in middles(len(candidates), self.queries)]
            rows = once(
                ("octaves", row, *chosen),
                lambda chosen=chosen: torch.tensor(chosen, device=device),
                inputs.valid,
            )
            of_prompt = select_prompts(inputs, slice(row, row + 1))
            found.append(_of_prompt(of_prompt, first[row], rows, steps, self.later_queries))
        mass, uniform, of_heads, received, queries, token, even = (
            torch.stack(part) for part in zip(*found, strict=True)
        )
        of_first = {"received": received, "received_queries": queries}
        per_prompt = {
            "mass": ("prompt layer head octave", mass),
            "uniform": ("prompt layer octave", uniform),
            ("first_token", "own_token", "sink_mass"): (
                "prompt layer head",
                of_heads.movedim(1, 0),
            ),
            "sink_token": ("prompt layer", token),
            "sink_uniform": ("prompt layer", even),
        }
        row = inputs.row_of_first_prompt
        return Statistics(
            per_prompt=arrays(inputs, per_prompt, octave=octaves),
            first_prompt=None
            if row is None
            else arrays(
                inputs, {name: ("layer token", part[row]) for name, part in of_first.items()}
            ),
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `octaves` of a run."""
        per_prompt = statistics.per_prompt
        # Longer prompts have more octaves
        filled = {name: per_prompt[name].fillna(0.0) for name in ("mass", "uniform")}
        group = per_prompt.assign(filled).merge(statistics.first_prompt, join="outer")
        group["octave"] = group["octave"].assign_attrs(long_name="distance", units="tokens")
        return described_group(group, _TEXTS)


def _of_prompt(
    inputs: AttentionInputs,
    first: Int[Tensor, "token"],
    rows: Int[Tensor, "row"],
    steps: Int[Tensor, "step"],
    later_queries: int,
) -> tuple[Tensor, ...]:
    """Return mass, even mass, ends with sink mass, received, its queries, sink, even sink mass."""
    new = {"dtype": torch.float64, "device": first.device}
    # Even attention, equal for all heads, is the last head
    heads, tokens = inputs.heads + 1, len(first)
    sums = torch.zeros(heads, len(steps) - 1 + 2 + tokens, **new)
    mass, ends, received = sums.split([len(steps) - 1, 2, tokens], -1)
    queries = torch.zeros(tokens, **new)
    for some, logits in row_blocks(inputs, rows):
        seen = inputs.visible(some)[0]
        # Rows are valid and see themselves, so no row divides by 0
        even = seen / seen.sum(-1, keepdim=True).double()
        queries += seen.sum(0)
        for part, weights in (
            (slice(-1), weights_of(logits, inputs.sinks_of(some))[0]),
            (slice(-1, None), even[None]),
        ):
            sums[part] += torch.cat(_row_sums(weights, some, first[some], steps), -1)
    queries[rows] -= 1  # themselves
    # 0 / 0 for tokens without a later query: NaN
    received = received / queries
    of_heads, even = received[:-1], received[-1]
    per_document = torch.zeros_like(queries).index_add(0, first[rows], torch.ones(len(rows), **new))
    needed = (LATER_SHARE * per_document[first]).clamp_min(later_queries)
    # Minus even attention, which is larger for early keys: rows with few keys give each more
    candidates = (of_heads.mean(0) - even).masked_fill(
        (queries < needed) | (torch.arange(tokens, device=first.device) == first), -torch.inf
    )
    # A tensor of one token: reading its value would wait for an accelerator
    sink = candidates.argmax(-1, keepdim=True)
    none = torch.isinf(candidates.gather(-1, sink))
    mass, ends = mass / len(rows), ends / len(rows)
    of_sink = received.index_select(-1, sink).masked_fill(none, torch.nan)[:, 0]
    return (
        mass[:-1],
        mass[-1],
        torch.stack([*ends[:-1].unbind(-1), of_sink[:-1]]),
        of_heads.mean(0),
        queries,
        torch.where(none, -1, sink)[0],
        of_sink[-1],
    )


def _row_sums(
    weights: Float[Tensor, "head row key"],
    rows: Int[Tensor, "row"],
    first: Int[Tensor, "row"],
    steps: Int[Tensor, "step"],
) -> tuple[Float[Tensor, "head octave"], Float[Tensor, "head 2"], Float[Tensor, "head key"]]:
    """Sum rows by octave, at the first token and the row's token, and by key without that token.

    Overwrites the weights.
    """
    ends = torch.stack([first, rows], -1).expand(len(weights), -1, -1)
    at_ends = weights.gather(-1, ends).sum(-2, dtype=torch.float64)
    weights.scatter_(-1, ends[..., 1:], 0)
    # There are few rows at a time, so their dtype suffices for the sum
    by_key = weights.sum(-2)
    weights.scatter_(-1, ends[..., :1], 0)
    # Mass beyond distance 2^k - 1: a running sum up to key i - 2^k
    last = rows[:, None] - steps
    beyond = weights.cumsum(-1, dtype=torch.float64).gather(
        -1, last.clamp_min(0).expand(len(weights), -1, -1)
    )
    beyond = (beyond * (last >= 0)).sum(-2)
    return -beyond.diff(dim=-1), at_ends, by_key
