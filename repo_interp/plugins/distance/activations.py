"""Massive activations: entries of hidden states far beyond all others (Sun et al. 2024, arXiv 2402.17762).

With x_td entry d of token t in the residual stream that enters a layer, and m the median of |x_td|
over the tokens and entries of a prompt,

    massive         entries with |x_td| > 100 and |x_td| > 1000 m
    largest         max of |x_td|, of token `largest_token` and entry `largest_dimension`
    sink_token      the token with most attention, mean over heads and over queries at equal steps
                    through the second half of the prompt
    sink_largest    max over d of |x_td| of the sink
    sink_massive    massive entries of the sink

This module knows nothing about the weights that cause them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.kernels.samples import places_of, spread_places
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.values import Count

SIZE, RATIO = 100.0, 1000.0
"""Size, and size over the median, above which an entry is massive."""
_TEXTS = {
    "largest": "largest size of an entry of the residual stream",
    "median": "median size of its entries",
    "sink_largest": "largest size of an entry of the token with most attention",
    "massive": "entries above 100 and above 1000 times the median [entries]",
    "sink_massive": "such entries of the token with most attention [entries]",
    "largest_token": "token of the largest entry [tokens]",
    "largest_dimension": "number of the largest entry [entries]",
    "sink_token": "token with most attention from later ones [tokens]",
    "largest_by_token": "largest size of an entry of a token of the first prompt",
}


@dataclass(frozen=True)
class Activations(Measure, needs=Needs(documents=True, by_pair=True)):
    """The measure `activations`."""

    queries: Count = 32
    """Queries of a prompt that determine the token with most attention."""
    name: str = "activations"
    describes: ClassVar[str] = "massive activations, and sinks"

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Reduce the residual stream of each prompt to its largest entries."""
        # [prompt, token, entry]
        sizes, row = inputs.residual.flatten(2).abs(), inputs.row_of_first_prompt
        found = [
            self._of_prompt(select_prompts(inputs, slice(row, row + 1)), sizes[row], places)
            for row, places in enumerate(places_of(inputs.valid))
        ]
        # [variable, prompt]: numbers and indices in separate arrays, so that indices stay integers
        real, whole = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
        names = list(_TEXTS)
        record = {
            tuple(names[:3]): ("prompt layer", real),
            tuple(names[3:-1]): ("prompt layer", whole),
        }
        by_token = sizes.amax(-1).double().masked_fill(~inputs.valid, torch.nan)
        first = {} if row is None else {"largest_by_token": ("layer token", by_token[row])}
        return Statistics(
            per_prompt=arrays(inputs, record),
            first_prompt=arrays(inputs, first) if first else None,
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group `activations` of a run."""
        return described_group(statistics.per_prompt.merge(statistics.first_prompt), _TEXTS)

    def _of_prompt(
        self, inputs: AttentionInputs, sizes: Float[Tensor, "token any"], places: list[int]
    ) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(spread_places(places, self.queries, 0.5), device=sizes.device)
        # One sink for all heads: the mean over heads and over queries of the second half, which
        # see the most keys
        sink = inputs.pattern(rows)[0].double().mean((0, 1)).argmax()
        known = sizes[places].double()
        median, largest = known.median(), known.max()
        massive = (sizes > SIZE) & (sizes > RATIO * median)
        at = known.argmax()
        # argmax is over valid tokens only; `places` maps back to token numbers
        token = torch.tensor(places, device=sizes.device)[at // sizes.shape[1]]
        whole = (massive[places].sum(), massive[sink].sum(), token, at % sizes.shape[1], sink)
        return torch.stack([largest, median, sizes[sink].max().double()]), torch.stack(whole)
