"""Dependence of a head on positions or on symbols (after Urrutia et al. 2025, arXiv 2511.11579).

Keys of a prompt change places while positions stay: pi permutes their contents. With L_ij the
logit of query i and key j, and L'_ij that of query i and the content of key pi(j) at the position
of key j,

    position_score   mean over i of corr_j(L'_ij, L_ij)        1 if only positions matter
    symbol_score     mean over i of corr_j(L'_ij, L_i pi(j))   1 if only contents matter
    null_score       95 % quantile of |corr_j(L'_ij, L_i rho(j))| over rows and permutations rho
                     that are independent of pi
    logit_spread     mean over i of the standard deviation of L_ij over j, in nats
    attention_share  mean over i of the attention that the keys j get

i are queries in the last quarter of a prompt; j are the keys that all these queries see, without
the first token, which is often a sink. Position logits of a scheme stay with the positions, and so
do learned positions, although contents determined them. If the logits that a scheme adds depend on
contents (CoPE: on the contents between query and key), a layer has no score.

A correlation does not say how much logits vary. With random weights, keys share a direction and
logits are nearly equal, and position scores of .9 occur. Hence the last two quantities.

This module knows nothing about how attention is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.gap import BEYOND_ROTATION, Gap
from repo_interp.measures.kernels.samples import places_of, spread_places
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.values import Count, Seed

FEWEST_KEYS = 8
"""Least number of keys for a meaningful correlation."""
_TEXTS = {
    "position_score": "correlation with logits of the same places",
    "symbol_score": "correlation with logits of the same contents",
    "null_score": "95 % of unrelated correlations are below",
    "logit_spread": "standard deviation of logits over the permuted keys [nat]",
    "attention_share": "attention that the permuted keys get",
}


@dataclass(frozen=True)
class Symbols(Measure, needs=Needs(tokens=3, by_pair=True, nan=tuple(_TEXTS))):
    """The measure `symbols`."""

    queries: Count = 8
    """Queries of a prompt, at equal steps through its last quarter."""
    permutations: Count = 4
    """Permutations of the keys."""
    seed: Seed = 0
    """Seed of the permutations."""
    name: str = "symbols"
    describes: ClassVar[str] = "heads that follow places, or contents"

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Return a gap for layers whose logits would not move with a key."""
        return (
            Gap(f"{BEYOND_ROTATION}, which would not move with a key")
            if inputs.logits_by_content
            else None
        )

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Reduce sampled rows of each prompt to scores of every head."""
        splits = not inputs.logits_by_content
        found = [
            self._of_prompt(select_prompts(inputs, slice(row, row + 1)), places if splits else [])
            for row, places in enumerate(places_of(inputs.valid))
        ]
        record = {tuple(_TEXTS): ("prompt layer head", torch.stack(found, dim=1))}
        return Statistics(per_prompt=arrays(inputs, record))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `symbols` of a run."""
        return described_group(statistics.per_prompt, _TEXTS)

    def _of_prompt(
        self, inputs: AttentionInputs, places: list[int]
    ) -> Float[Tensor, "variable head"]:
        device = inputs.valid.device
        # [0] leaves fewer than `FEWEST_KEYS` keys, so scores are NaN
        chosen = spread_places(places, self.queries, 0.75) if places else [0]
        # The last query's window ends earliest; without a window this is -1, before all tokens
        first = chosen[-1] - (inputs.window or chosen[-1] + 1)
        # Without the first token, up to the first query: the keys that all queries see
        shared = [place for place in places[1:] if first < place <= chosen[0]]
        if len(shared) < FEWEST_KEYS:
            shape = (len(_TEXTS), inputs.heads)
            return torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        rows, keys = (torch.tensor(part, device=device) for part in (chosen, shared))
        generator = torch.Generator().manual_seed(self.seed)
        before = inputs.logits(rows)[0][..., keys].double()
        share = inputs.pattern(rows)[0][..., keys].double().sum(-1).mean(-1)
        scores = []
        for _ in range(self.permutations):
            moved, other = (
                # On the processor: one seed gives the same permutations on any device
                torch.randperm(len(keys), generator=generator, device="cpu").to(device)
                for _ in range(2)
            )
            contents = inputs.keys.clone()
            # Un-rotated keys move; `logits` then rotates them by their new positions
            contents[:, :, keys] = inputs.keys[:, :, keys[moved]]
            after = replace(inputs, keys=contents).logits(rows)[0][..., keys].double()
            compared = (before, before[..., moved], before[..., other])
            scores.append(torch.stack([_correlation(after, logits) for logits in compared]))
        of_rows = torch.cat(scores, dim=-1)
        # Over rows and permutations
        null = of_rows[2].abs().nanquantile(0.95, dim=-1)
        spread = before.std(-1).mean(-1)
        return torch.stack([*of_rows[:2].nanmean(-1), null, spread, share])


def _correlation(
    first: Float[Tensor, "head row key"], second: Float[Tensor, "head row key"]
) -> Float[Tensor, "head row"]:
    """Pearson correlation over keys; NaN if one side is constant."""
    first, second = (part - part.mean(-1, keepdim=True) for part in (first, second))
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
