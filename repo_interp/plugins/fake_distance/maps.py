"""Maps of a head: logits and fake-distance logits as means over blocks (fig. 2, 3).

Of the first prompt.

Maps are exact block means (block_means) with at most `side` blocks per side, so the run has
2 side^2 numbers per head; name the `heads` to keep if there are many. The fake map has the last
token's query, distances in tokens, and the sign of the model's rotation (fake_distance). It is NaN
if positions differ by rotary pair, since then no single distance rotates all pairs, and if a scheme
adds logits that depend on contents, or transforms queries and keys by their positions.

This module knows nothing about the contents of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import xarray as xr
from annotated_types import Interval, MinLen
from torch import Tensor

from repo_interp.inputs import AttentionInputs, Spans, select_prompts
from repo_interp.measures.gap import Gap
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.statistics import Measure, Needs, Statistics
from repo_interp.plugins.fake_distance.block_means import (
    block_size,
    fake_block_means,
    logit_block_means,
)
from repo_interp.plugins.fake_distance.fake_distance import (
    BY_CONTENT,
    bias_by_distance,
    last_queries,
)
from repo_interp.run import BLOCK_SIZE
from repo_interp.runtime.option_texts import value_of
from repo_interp.values import CountOrNone

_DESCRIBED = {
    "logit_map": "mean logit over a block of queries and keys of the first prompt [logits]",
    "fake_map": (
        "mean fake-distance logit of the last query of the first prompt, over a block of "
        "distances and keys [logits]"
    ),
    BLOCK_SIZE: "tokens, or distances, a block [tokens]",
}
_BLOCKS = ("query_block", "distance_block", "key_block")
_AXES = {"logit_map": "query_block key_block", "fake_map": "distance_block key_block"}


@dataclass(frozen=True)
class Maps(Measure):
    """The measure `maps`."""

    side: Annotated[int, Interval(ge=1, le=4096)] = 192
    """Most blocks per side. Coordinates of blocks are their first token, or distance."""
    heads: tuple[str, ...] = ()
    """LAYERS:HEADS, such as "5:0-3" or "2-4:7", or LAYERS alone for all their heads; none: those
    of the analysis.

    If layers differ, heads that were not named are NaN.
    """
    name: str = "maps"
    describes: ClassVar[str] = "pictures of logits"
    option: ClassVar[str] = "--save-maps heads 5:0-3,7:2"
    option_help: ClassVar[str] = (
        "keep pictures of these LAYERS:HEADS, or of all heads of LAYERS such as 10-13,24: the "
        "logits of the first prompt as means over blocks, beside the measures"
    )

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            InputError: A field is out of range, or heads are not written LAYERS:HEADS.
        """
        super().__post_init__()
        for text in self.heads:
            _layers_and_heads(text)

    @property
    def needs(self) -> Needs:
        """The named heads by layer."""
        heads: dict[int, Sequence[int] | None] = {}
        for layers, some in map(_layers_and_heads, self.heads):
            for layer in layers:
                before = heads.get(layer, ())
                # None means all heads, so it overrides other names for the layer
                heads[layer] = None if some is None or before is None else sorted({*before, *some})
        return Needs(heads=heads or None, by_pair=True, nan=tuple(_AXES))

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Fake maps, where no distance gives a logit."""
        if not inputs.one_position:
            several = "rotary pairs" if inputs.differ_by_pair else "queries and keys"
            return Gap(f"turn {several} by positions of their own", "no fake maps")
        return Gap(BY_CONTENT, "no fake maps") if inputs.logits_by_content else None

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Both maps [layer, head, ...] of the first prompt."""
        row = inputs.row_of_first_prompt
        if row is None:
            return Statistics()
        prompt = select_prompts(inputs, slice(row, row + 1))
        # Up to the last valid token: padding after it would change the size of blocks
        tokens = int(prompt.valid[0].nonzero()[-1]) + 1
        size = block_size(tokens, self.side)
        starts = range(0, tokens, size)
        logits = logit_block_means(prompt, size)[0, :, : len(starts), : len(starts)]
        maps = {"logit_map": logits, "fake_map": _fake_map(prompt, size, len(starts))}
        # Rounded to float32 to make the compressed run file smaller.
        record = {
            name: (f"layer head {axes}", maps[name].float().double())
            for name, axes in _AXES.items()
        }
        labels = dict.fromkeys(_BLOCKS, starts)
        return Statistics(
            first_prompt=arrays(
                inputs, record | {BLOCK_SIZE: ("layer", torch.tensor(size))}, **labels
            )
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `maps` of a run."""
        measured = statistics.first_prompt
        group = described_group(
            measured.assign({BLOCK_SIZE: measured[BLOCK_SIZE].max()}), _DESCRIBED
        )
        return group.assign_coords({axis: group[axis].astype("int64") for axis in _BLOCKS})


def _layers_and_heads(text: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the layers and heads in LAYERS:HEADS, numbers or ranges; None: all heads."""
    kind = Annotated[tuple[CountOrNone, ...], MinLen(1)]
    layers, colon, heads = text.partition(":")
    return value_of(layers, kind, "LAYERS"), value_of(heads, kind, "HEADS") if colon else None


def _fake_map(inputs: AttentionInputs, size: int, blocks: int) -> Tensor:
    """Return the fake map of the only prompt [head, distance_block, key_block].

    NaN in blocks of padding on the left, and everywhere if logits are not a function of the
    distance.
    """
    if not inputs.one_position or inputs.logits_by_content:
        return inputs.queries.new_full((inputs.heads, blocks, blocks), torch.nan)
    valid = inputs.valid[0]
    count = int(valid.sum())
    query = last_queries(inputs, 1)[0][0, :, 0]
    bias = bias_by_distance(inputs)
    means = fake_block_means(
        query,
        inputs.keys[0][:, valid],
        query.new_zeros(query.shape[-1] // 2)
        if inputs.frequencies is None
        else inputs.frequencies.to(query),
        query.new_zeros(inputs.heads, count) if bias is None else bias[0, :, :count],
        size,
    )
    # With left padding, keys are at the end, at their tokens; distances start at 0
    missing = blocks - means.shape[-1]
    return torch.nn.functional.pad(means, (missing, 0, 0, missing), value=torch.nan)
