"""How far back a head looks, by octave of the distance, and tokens that act as sinks.

With A_ij the attention of query i to key j, over queries i at equal steps through the prompt,

    mass [octave]      mean over i of the sum of A_ij over distances 2^k <= i - j < 2^(k + 1), the
                       first token left out
    uniform [octave]   the same, were attention even over all keys that a query sees (the null)
    first_token        mean over i of A_i0
    own_token          mean over i of A_ii
    received [token]   mean over later queries i, and heads, of A_ij: of the first prompt
    sink_token         the token but the first that receives most above even attention, of those
                       that at least `later_queries` queries come after; -1 for no token
    sink_mass          mean over later queries of a head's attention to it; even attention would be
                       `sink_uniform`

Knows nothing about why a head looks there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xarray as xr
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.kernels.samples import places_of, spread_places
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.values import Count

_TEXTS = {
    "mass": "attention by distance, without the first token",
    "uniform": "attention to them, were it even over all keys",
    "first_token": "attention to the first token",
    "own_token": "attention to the token itself",
    "received": "attention that a token of the first prompt receives from later ones",
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

    queries: Count = 32
    """Queries of a prompt, at equal steps."""
    later_queries: Count = 8
    """Queries that must come after a token to call it a sink."""
    name: str = "octaves"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Reduce sampled rows of attention of each prompt."""
        # Up to the largest distance in the batch, tokens - 1
        octaves = [2**k for k in range(max(1, (inputs.valid.shape[1] - 1).bit_length()))]
        found = [
            self._of_prompt(
                select_prompts(inputs, slice(row, row + 1)),
                spread_places(places, self.queries, 0.0),
                octaves,
            )
            for row, places in enumerate(places_of(inputs.valid))
        ]
        mass, uniform, of_heads, received, token, even = (
            torch.stack(part) for part in zip(*found, strict=True)
        )
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
            else arrays(inputs, {"received": ("layer token", received[row])}),
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `octaves` of a run."""
        per_prompt = statistics.per_prompt
        # prompts of other lengths have octaves that this one lacks
        filled = {name: per_prompt[name].fillna(0.0) for name in ("mass", "uniform")}
        group = per_prompt.assign(filled).merge(statistics.first_prompt, join="outer")
        group["octave"] = group["octave"].assign_attrs(long_name="distance", units="tokens")
        return described_group(group, _TEXTS)

    def _of_prompt(
        self, inputs: AttentionInputs, chosen: list[int], octaves: list[int]
    ) -> tuple[Tensor, ...]:
        rows, valid = torch.tensor(chosen, device=inputs.valid.device), inputs.valid[0]
        pattern, seen = inputs.pattern(rows)[0].double(), inputs.visible(rows)[0]
        # Chosen rows are valid and see themselves, so no row divides by 0
        even = seen / seen.sum(-1, keepdim=True).double()
        keys = torch.arange(len(valid), device=rows.device)
        first, distance = valid.to(torch.int8).argmax(), rows[:, None] - keys
        # Index of the largest 2^k that is at most the distance; own and later keys have weight 0
        # below
        octave = torch.searchsorted(torch.tensor(octaves, device=rows.device), distance, right=True)
        octave = (octave - 1).clamp_min(0)
        later = seen & (distance > 0)
        others = (later & (keys != first)).double()
        counted = torch.zeros(len(rows), len(octaves), dtype=torch.float64, device=rows.device)
        mass, uniform = (
            counted.expand(*weights.shape[:-2], -1, -1)
            # [head, row, octave], or [row, octave] for even attention, which is the same in all
            # heads
            .scatter_add(-1, octave.expand_as(weights), weights * others)
            .mean(-2)
            for weights in (pattern, even)
        )
        queries = later.sum(0)
        # 0 / 0 for tokens without a later query: NaN
        received = (pattern * later).sum(1) / queries
        even = (even * later).sum(0) / queries
        # Less even attention, of which early keys get more: rows that see few keys give each more
        candidates = (received.mean(0) - even).masked_fill(
            (queries < self.later_queries) | (keys == first), -torch.inf
        )
        sink = candidates.argmax()
        none = torch.isinf(candidates[sink])
        return (
            mass,
            uniform,
            torch.stack(
                [
                    pattern[..., first].mean(-1),
                    pattern.gather(-1, rows.expand(len(pattern), -1)[..., None]).mean((-2, -1)),
                    received[:, sink].masked_fill(none, torch.nan),
                ]
            ),
            received.mean(0),
            torch.where(none, -1, sink),
            even[sink].masked_fill(none, torch.nan),
        )
