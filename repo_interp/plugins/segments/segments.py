"""How far positions of a head follow the structure of a prompt (RePo fig. 8).

    variance_between   share of a head's position variance that lies between the segments of a kind,
                       eta^2 (segmentation)
    within_trend       rank correlation of z_i and i within a segment, mean over segments with
                       4 tokens or more
    boundary_f1        share of the head's B largest jumps |z_i - z_{i-1}| that are at an edge, with
                       B the number of edges

The scores differ: a head with an outlier at every line break has jumps at the edges, into and out
of the outlier, but no variance between lines. No score is meaningful without a reference: any trend
over the prompt is variance between segments, and with dense edges every jump is near an edge. So
each score comes with its mean over shuffled edges (segmentation), the share of shuffles that score
at least as high, and the score of the token index. Kinds: examples, sections, paragraphs, lines,
sentences, blocks; tokens outside all segments of a kind are removed. Scores are NaN if a layer has
no positions (NoPE, CoPE, learned), a prompt has fewer than two segments of a kind, or (for the
variance) a head's positions are constant. A layer that rotates by the index (`scheme` rope, hope)
has the scores of the index.

This module knows nothing about the contents of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.rank_trend import rank_trend
from repo_interp.measures.kernels.rounding import equal_within
from repo_interp.measures.kernels.segmentation import (
    Draws,
    Kinds,
    chance,
    generator,
    has_ties,
    largest_jumps,
    match_share,
    segment_edges,
    shuffled_edges,
    variance_between,
)
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.segment_measure import SegmentMeasure
from repo_interp.measures.statistics import Needs, Statistics
from repo_interp.values import Seed, TokensOrNone

KINDS = ("examples", "sections", "paragraphs", "lines", "sentences", "blocks")
FEWEST = 4
"""Least number of tokens of a segment with a trend."""
NORMAL_95 = 1.96
"""Half width of the central 95 % of a normal distribution, in standard deviations."""
_SCORES = {
    "variance_between": "share of a head's position variance between segments (eta squared)",
    "variance_between_shuffled": "the same for shuffled edges, mean over draws",
    "variance_between_chance": (
        "share of shuffled edges with at least as much variance between segments"
    ),
    "within_trend": "rank correlation with the token index within segments, mean over them",
    "within_trend_null": "size of it that 95 % of permutations within segments stay within",
    "boundary_f1": "F1 of a head's largest position jumps against the edges of segments",
    "boundary_f1_shuffled": "the same for shuffled edges, mean over draws",
    "boundary_f1_chance": "share of shuffled edges with at least as high an F1",
}
_INDEX = {
    "variance_between_index": "share of the token index' variance between segments",
    "boundary_f1_index": (
        "F1 of as many random tokens against the edges of "
        "segments: the token index has no largest jumps"
    ),
}
_OF_PROMPTS = _INDEX | {
    "segment_count": "segments of a prompt, 0 where it has no two [segments]",
    "segment": "segment that each token lies in, -1 for none",
}


@dataclass(frozen=True)
class Segments(SegmentMeasure):
    """The measure `segments`."""

    kinds: Kinds = KINDS
    """Kinds of segments."""
    tolerance: TokensOrNone = 1
    """Tokens that a jump may be off an edge."""
    draws: Draws = 40
    """Shuffled layouts of the control, and orders of equal jumps."""
    seed: Seed = 0
    """Seed of the shuffled edges."""
    name: str = "segments"
    describes: ClassVar[str] = "whether they follow lines, sentences, examples"

    @property
    def needs(self) -> Needs:
        """Segments of its kinds.

        Scores are NaN if a prompt, a layer or a head has none, or if they are undefined.
        """
        return Needs(
            segments=self.kinds, nan=(*_SCORES, "variance_between_index", "boundary_f1_index")
        )

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return scores [prompt, layer, head, kind], those of the index, and the segments."""
        prompts, tokens = inputs.valid.shape
        # [prompt, kind, token]
        labels = np.full((prompts, len(self.kinds), tokens), -1, dtype=np.int32)
        # Heads that share positions have the same scores
        rows = 1 if inputs.positions is None else inputs.positions.shape[1]
        scores = torch.full((len(_SCORES), prompts, rows, len(self.kinds)), torch.nan).double()
        index = torch.full((len(_INDEX), prompts, len(self.kinds)), torch.nan).double()
        of_index = [[*_SCORES].index(name.removesuffix("_index")) for name in _INDEX]
        counts = np.zeros((prompts, len(self.kinds)), dtype=np.int64)
        for row, number in enumerate(inputs.prompts.tolist()):
            for column, kind in enumerate(self.kinds):
                members, edges = segment_edges(spans, kind, row)
                if not len(edges):
                    continue
                counts[row, column] = len(edges) + 1
                # A running count of edges numbers the segments
                begins = torch.zeros_like(members).index_fill_(0, edges, 1)
                labels[row, column, members.cpu()] = begins.cumsum(0).cpu()
                # Seeded by the prompt's number, so that a prompt has the same control in every
                # batch and layer
                random, count = generator(self.seed, number, kind), len(members)
                shuffled = shuffled_edges(edges, count, self.draws, random)
                # `count` tokens have `count` - 1 steps
                orders = np.stack([random.permutation(count - 1) for _ in range(self.draws)])
                layouts = edges, shuffled, torch.as_tensor(orders, device=edges.device)
                places = torch.arange(count, dtype=torch.float64, device=edges.device)
                # Scores of the index itself, with the same shuffles: a reference for learned
                # positions
                line = _scores(places[None], *layouts, self.tolerance)
                index[:, row, column] = line[of_index, 0].cpu()
                if inputs.positions is not None:
                    of_rows = _scores(inputs.positions[row][:, members], *layouts, self.tolerance)
                    scores[:, row, :, column] = of_rows.cpu()
        record = {
            tuple(_SCORES): ("prompt layer head kind", scores),
            tuple(_INDEX): ("prompt layer kind", index),
            "segment_count": ("prompt layer kind", counts),
            "segment": ("prompt layer kind token", labels),
        }
        return Statistics(per_prompt=arrays(inputs, record, kind=list(self.kinds)))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `segments` of a run."""
        measured = statistics.per_prompt
        # They depend only on the text, and are equal in all layers
        of_prompts = measured[list(_OF_PROMPTS)].isel(layer=0, drop=True)
        return described_group(measured, _SCORES).assign(described_group(of_prompts, _OF_PROMPTS))


def _scores(
    values: Float[Tensor, "row token"],
    edges: Int[Tensor, "edge"],
    shuffled: Int[Tensor, "draw edge"],
    orders: Int[Tensor, "draw step"],
    tolerance: int,
) -> Float[Tensor, "score row"]:
    """Return `_SCORES` of every row, with mean and chance over the shuffled edges."""
    between = variance_between(values, edges[None])[0]
    between_shuffled = variance_between(values, shuffled)
    count = len(edges)
    within, within_null = _within(values, edges)
    # Without ties all orders give the same jumps
    jumps = largest_jumps(values, count, orders if has_ties(values, count) else orders[:1])
    f1 = match_share(jumps, edges, tolerance).mean(0)
    f1_shuffled = match_share(jumps, shuffled[:, None], tolerance)
    variance = between, between_shuffled.mean(0), chance(between_shuffled, between)
    boundary = f1, f1_shuffled.mean(0), chance(f1_shuffled, f1)
    return torch.stack([*variance, within, within_null, *boundary])


def _within(
    values: Float[Tensor, "row token"], edges: Int[Tensor, "edge"]
) -> tuple[Float[Tensor, "row"], Float[Tensor, "row"]]:
    """Mean trend within segments, and the 95 % bound of its size under permutation in segments.

    The rank correlation of n permuted numbers has variance 1 / (n - 1).
    """
    # tensor_split takes indices only from the processor
    parts = torch.tensor_split(values, edges.cpu(), dim=-1)
    parts = [part for part in parts if part.shape[-1] >= FEWEST]
    if not parts:
        none = values.new_full(values.shape[:1], torch.nan, dtype=torch.float64)
        return none, none
    equal = equal_within(values.double())  # From the whole row, since the range differs by segment
    trends = torch.stack([rank_trend(part.double(), equal=equal) for part in parts])
    # Variance of a mean over independent segments
    variance = sum(1 / (part.shape[-1] - 1) for part in parts) / len(parts) ** 2
    null = torch.full_like(trends[0], NORMAL_95 * variance**0.5)
    return trends.nanmean(0), null.where(trends.isfinite().any(0), torch.nan)
