"""Sources of learned positions: slow part, token, previous token, segment, line end.

The measure describes how the positions of a head, the output of f_phi, encode the order of tokens,
and how much of their variance each source explains on held-out text:

    resolution   least distance from which 90 % of pairs have one order (`kernels.order`)
    share, alone, shape, and their nulls       explained variance (`explained`)
    kind         the resulting name (`names`)

Every different prompt is split into stretches of at least `STRETCH` tokens, so that one text is
enough; shorter prompts are held out whole. Equal prompts count once. A held-out token counts if it
and the token before it occur in other folds; `counted_share` is the share of such tokens. The first
token of a prompt has no previous token and is often an outlier, so shares leave it out. A shift of
a whole prompt changes no logit, so variance is within prompts; a head with positions that vary only
by rounding has no shares (NaN). If gates count positions (CoPE), the mean gate of a token is
explained instead. Held-out values may be negative, for a source that misleads.

Statistics keep positions of at most `tokens` tokens of a prompt, drawn by its content; orders use
all tokens. This module knows nothing about models.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.fitting import AnyPrompt, Layers
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.gate_sums import gate_sums
from repo_interp.measures.kernels.order import DISTANCES, PARTS, OrderSums, told_by
from repo_interp.measures.kernels.rounding import equal_within
from repo_interp.measures.kernels.seen_pairs import on_host
from repo_interp.measures.kernels.segmentation import INSIDE, STARTS, Kinds
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.segment_measure import SegmentMeasure
from repo_interp.measures.statistics import Needs, Statistics
from repo_interp.plugins.segments.segments import KINDS
from repo_interp.plugins.sources.explained import DRAWS, SHIFTS, Samples, explain
from repo_interp.plugins.sources.held_out import Marks
from repo_interp.plugins.sources.names import REST, SOURCES, named_rows, near_threshold
from repo_interp.values import Positive

FOLLOWS = 0.9
"""Least held-out R squared of the token for positions that follow from the token."""
_UNNAMED = ("rest", "separator")
"""Spans that are not segments."""
_TEXTS = {
    "share": "held-out share of a head's position variance that a source adds to those before it",
    "alone": (
        "what one source adds to the slow part, held out; of the slow part, what it explains"
    ),
    "alone_null": f"the same of positions shifted round each prompt, largest of {DRAWS} draws",
    "share_null": (
        f"share that 95 % of {DRAWS} random tables of words, and of previous words, stay within"
    ),
    "segments_ahead": "R squared of segments without the slow part, less that of the slow part",
    "segments_ahead_null": (
        f"the same of positions shifted round each prompt, largest of {DRAWS} draws"
    ),
    "shape": (
        "R squared of one slow function of the token index, on prompts that it was not fitted to"
    ),
    "shape_null": f"the same of positions shifted round each prompt, largest of {SHIFTS} draws",
    "r_squared": "held-out R squared of all sources: the sum of their shares",
    "r_squared_error": "standard error of R squared over folds",
    "follows_from_token": (
        f"1 where the token alone explains {FOLLOWS:g} of a head's position variance, -1 for "
        "a head without any"
    ),
    "resolution": (
        "least distance from which 90 % of pairs stand in one order, the same in every prompt "
        "[tokens]"
    ),
    "kind": "what a head with learned positions or gates does, in words",
    "near_threshold": "1 where a little more or less would change the kind",
    "texts": "different prompts that kinds are told by [prompts]",
    "counted_share": "share of tokens that, with the one before them, occur in other folds",
    "counted_tokens": "tokens that shares are taken over [tokens]",
}


@dataclass(frozen=True)
class PositionSources(SegmentMeasure):
    """The measure `position_sources`."""

    kinds: Kinds = KINDS
    """Kinds of segments, in addition to the prompts' named spans."""
    folds: Annotated[int, Interval(ge=2, le=1000)] = 5
    """Parts of the text; every part is held out once."""
    shrinkage: Positive = 1.0
    """Ridge penalty of the effects, as the equivalent number of tokens without an effect."""
    tokens: Annotated[int, Interval(ge=2, le=65_536)] = 1024
    """Most tokens of a prompt."""
    name: str = "position_sources"
    describes: ClassVar[str] = "whether they depend on the word, the index, the line"

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether positions are learned, or gates are counted."""
        return layers.learned or layers.contextual

    @property
    def needs(self) -> Needs:
        """Segments of its kinds.

        Missing samples of short prompts are NaN.
        """
        return Needs(segments=self.kinds, layer=True, nan=("value",))

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Return a gap for layers without positions and gates."""
        if inputs.positions is not None or inputs.gate_features is not None:
            return None
        return Gap("assign no positions and count no tokens by gates")

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return positions or gates of some tokens, and their sources.

        Values are [prompt, layer, head, sample].

        Raises:
            InputError: The inputs have no token ids.
        """
        if inputs.tokens is None:
            raise InputError(
                "position_sources needs the ids of tokens, which these attention inputs "
                "lack; set AttentionInputs.tokens"
            )
        segments, quantity = (
            _segment_spans(spans, self.kinds),
            _quantity(inputs).float().cpu().numpy(),
        )
        # Minus 1, because the first token is left out
        count = min(self.tokens, max(1, quantity.shape[-1] - 1))
        found = []
        for row, valid in enumerate(on_host(inputs.valid)):
            tokens = on_host(inputs.tokens)[row][valid].astype(np.int64)
            # Python's hash of bytes differs between processes; crc32 finds equal prompts in any
            # batch
            content, known = zlib.crc32(tokens.tobytes()), quantity[row][:, valid]
            sums = np.zeros((len(PARTS), inputs.heads, len(DISTANCES)))
            if inputs.gate_features is None:  # gates encode no order
                # All tokens, as in `patterns`; the index has no rounding
                rows = torch.from_numpy(known.astype(float))
                equal = (
                    equal_within(rows) if inputs.learned else torch.zeros(1, 1, device=rows.device)
                )
                whole = torch.ones((1, 1, len(tokens)), dtype=torch.bool, device=rows.device)
                sums = told_by(rows[None], whole, np.array([len(tokens)]), equal)[1].numpy()
            # From 1: the first token has no previous one. Seeded by content, so batches do not
            # matter
            index = 1 + np.sort(np.random.default_rng(content).permutation(len(tokens) - 1)[:count])
            # 0 beyond a short prompt's samples
            index = np.pad(index, (0, count - len(index)))
            parts = np.stack([tokens[index], tokens[index - 1], index])
            inside = np.stack(
                [_places_in(spans, span, row, valid)[:, index] for span in segments.values()]
            ).astype(np.int32)
            found.append(
                (
                    np.where(index > 0, known[:, index], np.float32(np.nan)),
                    # token, previous token, index
                    np.where(index > 0, parts, -1),
                    np.where(index > 0, inside, -1),
                    content,
                    sums.astype(np.float32),
                )
            )
        values, ids, places, contents, sums = map(np.stack, zip(*found, strict=True))
        record = {
            "value": ("prompt layer head sample", values),
            "ids": ("prompt layer part sample", ids),
            "places": ("prompt layer segment part sample", places),
            "content": ("prompt layer", contents),
            "order": ("prompt layer told head lag", sums),
        }
        known = inputs.learned or inputs.gate_features is not None
        learned = arrays(inputs, {"learned": ("layer", np.array(known, dtype=float))})
        return Statistics(
            arrays(inputs, record, segment=list(segments), sample=np.arange(count), lag=DISTANCES),
            learned,
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `position_sources` of a run.

        Sources are NaN if no counted token occurs in two folds.
        """
        # Equal prompts in two folds would predict each other
        _, first = np.unique(
            statistics.per_prompt["content"].isel(layer=0).values, return_index=True
        )
        measured = statistics.per_prompt.isel(prompt=first)
        beside = measured.isel(layer=0)
        ids = beside["ids"].transpose("part", "prompt", "sample").values
        # [prompt, sample]; indices start at 1, so 0 and -1 are none
        present = ids[2] > 0
        places = (
            beside["places"].transpose("segment", "part", "prompt", "sample").values[..., present]
        )
        token, previous, index = ids[:, present]
        kinds = beside["segment"].values
        lines = (places[kinds == "lines", 2] > 0).any(0)
        samples = Samples(np.nonzero(present)[0], token, previous, index, places, lines, self.folds)
        values = (
            measured["value"]
            .transpose("layer", "head", "prompt", "sample")
            .values[:, :, present]
            .astype(float)
        )
        # [layer, head]
        known = np.isfinite(values).all(-1)
        # Heads that share positions are fitted once
        different, same = np.unique(values[known], axis=0, return_inverse=True)
        fits = explain(different.T, samples, self.shrinkage)
        # Back to all heads; heads without positions get the row of NaN after all others
        place = np.full(known.shape, -1)
        place[known] = same.ravel()
        constant, share_null = fits.pop("constant"), fits.pop("share_null")
        found = {
            name: np.concatenate([fit, np.full_like(fit, np.nan, shape=(1, *fit.shape[1:]))])[place]
            for name, fit in fits.items()
        }
        judged = {**found, "share_null": share_null, "constant": np.append(constant, False)[place]}
        order = measured["order"].transpose("told", "layer", "head", "prompt", "lag").values
        order_sums = OrderSums(*order.sum(3))
        kind = named_rows(order_sums.resolution, judged)
        alone = found["alone"][..., SOURCES.index("token")]
        found["follows_from_token"] = np.where(np.isfinite(alone), alone >= FOLLOWS, -1).astype(
            np.int8
        )
        # Index positions count tokens by definition; a name would say nothing
        learned = statistics.sums["learned"].values[:, None] > 0
        found["kind"] = np.where(learned, kind, "").astype(object)
        near = near_threshold(kind, order_sums.told, judged) & learned
        found |= {"resolution": order_sums.resolution, "near_threshold": near.astype(np.int8)}
        axes = ("layer", "head", "source")
        group = {name: (axes[: array.ndim], array) for name, array in found.items()}
        group["share_null"] = (("source",), share_null)
        single = {
            "texts": samples.texts,
            # NaN without samples, and no warning of numpy
            "counted_share": samples.counted.sum() / (len(samples.counted) or np.nan),
            "counted_tokens": samples.counted.sum(),
        }
        group |= {name: ((), value) for name, value in single.items()}
        return described_group(
            group,
            _TEXTS,
            {**{axis: measured[axis].values for axis in axes[:2]}, "source": [*SOURCES, REST]},
        )


def _quantity(inputs: AttentionInputs) -> Float[Tensor, "prompt head token"]:
    """Return gates of tokens if gates count positions, else positions; NaN without either."""
    if inputs.gate_features is not None:
        sums = gate_sums(inputs)
        return sums.by_key / sums.queries[:, None].clamp_min(1)
    if inputs.head_positions is not None:
        return inputs.head_positions
    return torch.full_like(inputs.queries[..., 0], torch.nan)


def _segment_spans(spans: Spans, kinds: tuple[str, ...]) -> dict[str, str]:
    """Return spans of all kinds of segments, and named spans that are not part of another span."""
    named = sorted(name for name in spans if "." not in name and name not in _UNNAMED)
    return {**{kind: INSIDE + kind for kind in kinds}, **{f"span {name}": name for name in named}}


def _places_in(spans: Spans, span: str, row: int, valid: Marks) -> Int[np.ndarray, "part token"]:
    """Return segment number, place and end mark for every valid token of a prompt; -1 for none.

    The mark is 1 for the last token before another segment. For a span without starts of segments,
    every unbroken stretch is a segment.
    """
    if span not in spans:
        return np.full((3, valid.sum()), -1)
    inside = on_host(spans[span])[row][valid]
    starts = spans.get(span + STARTS)
    begins = (
        # The first token of an unbroken stretch
        inside & ~np.append(False, inside[:-1]) if starts is None else on_host(starts)[row][valid]
    )
    index = np.arange(len(inside))
    # Distance from the latest beginning
    place = index - np.maximum.accumulate(np.where(begins, index, 0))
    return np.where(inside, [begins.cumsum() - 1, place, np.append(begins[1:], False)], -1)
