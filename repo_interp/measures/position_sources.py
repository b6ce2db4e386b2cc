"""What f_phi reads: how much of a head's position variance the token, its index, its segment and the previous token explain.

    z_i = token[t_i] + index(i) + segment(number, place of i in lines, sentences, ... and named spans) + previous[t_{i-1}] + rest

A sum, fitted by ridge regression and judged on prompts that it was not fitted to; shares of the variance within prompts are averaged over
all orders of adding sources (`kernels.variance_shares`: Shapley values of the held-out R^2), so that collinear sources - a token that
always opens a line - divide what both explain. What is left is the rest: context, products of sources, noise.

    token, previous    an effect per token id, shrunk: one that n tokens were fitted to keeps about n / (n + shrinkage) of their mean
    index, numbers     a line, and departures from it at 0, 1, 4, 16, 64, ..., linear in between, shrunk alike

Nothing can be told of a token that no other prompt holds: held-out tokens count where they and the token before them occur among the
prompts fitted to, and `counted_share` says how many do. The first token of a prompt, which has no previous one and often stands apart,
is left out. Folds go by the prompts' contents, not by their order; equal prompts share a fold. A position's shift of a whole prompt
changes no logit, so variance is that within prompts. Where gates count positions (CoPE) it is the mean gate of a token (`gate_by_token`)
that is explained. Held-out values may be negative: a source that misleads.

`follows_from_token`: the token alone explains `FOLLOWS` of the variance or more - the head reads its input embedding and nothing else.

Statistics keep positions of at most `tokens` tokens of each prompt, drawn by its content. Knows nothing about models.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from scipy import sparse
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.kernels.gate_sums import gate_sums
from repo_interp.measures.kernels.segmentation import INSIDE, STARTS, Kinds
from repo_interp.measures.kernels.variance_shares import Explained, Predictors, explained
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.segments import KINDS
from repo_interp.measures.statistics import Needs, SegmentMeasure, Statistics
from repo_interp.values import Positive

SOURCES = ("token", "index", "segment", "previous")
REST = "rest"
FOLLOWS = 0.9
"""Share of a head's position variance that the token alone explains, on held-out prompts, from which they follow from the token."""
LEAST = 2
"""Different prompts that are needed."""
_UNNAMED = ("rest", "separator")
"""Spans that are no segments."""
_TEXTS = {
    "share": ("share of a head's position variance that a source explains on held-out prompts, mean over orders of sources", "1"),
    "alone": ("held-out R squared of one source without the others", "1"),
    "unique": ("held-out R squared that is lost without a source", "1"),
    "r_squared": ("held-out R squared of all sources: the sum of their shares", "1"),
    "r_squared_error": ("standard error of R squared over folds", "1"),
    "follows_from_token": (
        f"1 where the token alone explains {FOLLOWS:g} of a head's position variance, -1 for a head without any",
        "1",
    ),
    "counted_share": ("share of tokens that, with the one before them, occur in prompts of other folds", "1"),
    "counted_tokens": ("tokens that shares are taken over", "tokens"),
}


@dataclass(frozen=True)
class PositionSources(SegmentMeasure):
    """The measure `position_sources`."""

    kinds: Kinds = KINDS
    """Kinds of segments beside the prompts' named spans."""
    folds: Annotated[int, Interval(ge=LEAST, le=1000)] = 5
    """Parts of the prompts, each held out once; fewer where there are fewer prompts."""
    shrinkage: Positive = 1.0
    """Ridge penalty of the effects, in tokens without an effect that weigh as much."""
    tokens: Annotated[int, Interval(ge=LEAST, le=65_536)] = 1024
    """Most tokens of a prompt."""
    name: str = "position_sources"

    @property
    def needs(self) -> Needs:
        """Segments of its kinds; samples that a prompt is too short for are NaN."""
        return Needs(segments=self.kinds, nan=("value",))

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Positions or gates of some tokens [prompt, layer, head, sample], and what stands beside them in the prompt.

        Raises InputError where token ids are not at hand.
        """
        if inputs.tokens is None:
            raise InputError(
                "position_sources needs the ids of tokens, which these attention inputs lack; set AttentionInputs.tokens"
            )
        values, names = _quantity(inputs), _segment_names(spans, self.kinds)
        count = min(self.tokens, max(1, inputs.valid.shape[1] - 1))
        prompts = inputs.valid.shape[0]
        kept = np.full((prompts, inputs.heads, count), np.nan, dtype=np.float32)
        ids = {name: np.full((prompts, count), -1, dtype=np.int64) for name in ("token_id", "previous_id", "token_index")}
        places = {name: np.full((prompts, len(names), count), -1, dtype=np.int32) for name in ("number", "place")}
        contents = np.zeros(prompts, dtype=np.int64)
        for row in range(prompts):
            valid = inputs.valid[row].nonzero()[:, 0].cpu().numpy()
            tokens = inputs.tokens[row].cpu().numpy()
            contents[row] = zlib.crc32(np.ascontiguousarray(tokens[valid], dtype=np.int64).tobytes())
            order = np.random.default_rng(contents[row]).permutation(len(valid) - 1)[:count] + 1
            index = np.sort(order)
            chosen = valid[index]
            kept[row, :, : len(index)] = values[row][:, torch.as_tensor(chosen, device=values.device)].cpu().numpy()
            for name, of_prompt in zip(ids, (tokens[chosen], tokens[valid[index - 1]], index), strict=True):
                ids[name][row, : len(index)] = of_prompt
            for column, name in enumerate(names):
                number, place = _places_in(spans, name, row, valid)
                places["number"][row, column, : len(index)] = number[index]
                places["place"][row, column, : len(index)] = place[index]
        axes = ("prompt", "layer", "segment", "sample")
        record = {"value": (("prompt", "layer", "head", "sample"), kept), "content": (axes[:2], contents)}
        record |= {name: ((*axes[:2], "sample"), of_all) for name, of_all in ids.items()}
        record |= {name: (axes, of_all) for name, of_all in places.items()}
        return Statistics(per_prompt=arrays(inputs, record, segment=list(names), sample=np.arange(count)))

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `position_sources` of a run; NaN where fewer than two different prompts were observed."""
        measured = statistics.per_prompt
        beside = measured.isel(layer=0)
        present = beside["token_index"].values > 0
        prompts = np.broadcast_to(np.arange(present.shape[0])[:, None], present.shape)[present]
        contents, kinds_of_prompts = np.unique(beside["content"].values, return_inverse=True)
        values = measured["value"].transpose("layer", "head", "prompt", "sample").values
        layers, heads = values.shape[:2]
        flat = values.reshape(layers * heads, *present.shape)[:, present].astype(np.float64)
        known = np.flatnonzero(np.isfinite(flat).all(1))
        result = Explained(*(np.full((layers * heads, *shape), np.nan) for shape in (*[(len(SOURCES),)] * 3, (), ())))
        share, counted_tokens = np.nan, 0
        if len(contents) >= LEAST and len(known):
            folds = (kinds_of_prompts % min(self.folds, len(contents)))[prompts]
            predictors = _predictors(beside, present)
            counted = _seen_elsewhere(beside["token_id"].values[present], folds) & _seen_elsewhere(
                beside["previous_id"].values[present], folds
            )
            share, counted_tokens = float(counted.mean()), int(counted.sum())
            different, same = np.unique(flat[known], axis=0, return_inverse=True)  # heads that share positions are fitted once
            centre = different.mean(1, keepdims=True)
            fits = explained(different - centre, predictors, len(SOURCES), prompts, folds, counted, self.shrinkage)
            for name in ("share", "alone", "unique", "r_squared", "error"):
                getattr(result, name)[known] = getattr(fits, name)[same.ravel()]
        return _group(result, measured, share, counted_tokens)


def _group(result: Explained, measured: xr.Dataset, counted_share: float, counted_tokens: int) -> xr.Dataset:
    shape = (measured.sizes["layer"], measured.sizes["head"])
    token = result.alone[:, SOURCES.index("token")]
    nothing = np.full((len(token), 1), np.nan)
    of_heads = {
        "share": np.concatenate([result.share, 1 - result.r_squared[:, None]], axis=1),
        "alone": np.concatenate([result.alone, nothing], axis=1),
        "unique": np.concatenate([result.unique, nothing], axis=1),
        "r_squared": result.r_squared,
        "r_squared_error": result.error,
        "follows_from_token": np.where(np.isfinite(token), token >= FOLLOWS, -1).astype(np.int8),
    }
    axes = ("layer", "head", "source")
    values: dict[str, Any] = {
        name: (axes[: 1 + of_head.ndim], of_head.reshape(*shape, *of_head.shape[1:])) for name, of_head in of_heads.items()
    }
    values |= {"counted_share": ((), counted_share), "counted_tokens": ((), counted_tokens)}
    return described_group(values, _TEXTS, {**{axis: measured[axis].values for axis in axes[:2]}, "source": [*SOURCES, REST]})


def _quantity(inputs: AttentionInputs) -> Float[Tensor, "prompt head token"]:
    """Gates of tokens where positions are counted by gates, else positions; NaN where a layer has neither."""
    if inputs.gate_features is not None:
        sums = gate_sums(inputs)
        return sums.by_key / sums.queries[:, None].clamp_min(1)
    if inputs.head_positions is not None:
        return inputs.head_positions
    return torch.full(inputs.queries.shape[:3], torch.nan, device=inputs.valid.device)


def _segment_names(spans: Spans, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of segments, and named spans that are no part of another."""
    named = sorted(name for name in spans if "." not in name and name not in _UNNAMED)
    return (*kinds, *(f"span {name}" for name in named))


def _places_in(
    spans: Spans, name: str, row: int, valid: Int[np.ndarray, " token"]
) -> tuple[Int[np.ndarray, " token"], Int[np.ndarray, " token"]]:
    """For the `valid` tokens of prompt `row`: the number of the segment `name` that each lies in, and its place there; -1 for none.

    Of a named span every unbroken stretch is a segment.
    """
    own = name.removeprefix("span ") if name.startswith("span ") else INSIDE + name
    outside = np.full(len(valid), -1, dtype=np.int64)
    if own not in spans or not bool(spans[own][row].any()):
        return outside, outside
    inside = spans[own][row].cpu().numpy()[valid]
    starts = spans.get(own + STARTS)
    begins = inside & ~np.concatenate([[False], inside[:-1]]) if starts is None else starts[row].cpu().numpy()[valid]
    index = np.arange(len(valid))
    first = np.maximum.accumulate(np.where(begins, index, 0))
    return np.where(inside, begins.cumsum() - 1, -1), np.where(inside, index - first, -1)


def _predictors(beside: xr.Dataset, present: Bool[np.ndarray, "prompt sample"]) -> Predictors:
    """Columns of every source: a category per token id, and piecewise linear functions of counts."""
    parts: list[tuple[str, sparse.csr_array, bool]] = [
        ("token", _categories(beside["token_id"].values[present]), False),
        ("index", _piecewise(beside["token_index"].values[present]), True),
        ("previous", _categories(beside["previous_id"].values[present]), False),
    ]
    for name in beside["segment"].values:
        number, place = (beside[part].sel(segment=name).values[present] for part in ("number", "place"))
        if (number >= 0).any():
            inside = sparse.csr_array((number >= 0).astype(float)[:, None])
            parts += [("segment", column, True) for column in (inside, _piecewise(number), _piecewise(place))]
    columns = sparse.csr_array(sparse.hstack([part for _, part, _ in parts], format="csr"))
    widths = [part.shape[1] for _, part, _ in parts]  # pyright: ignore[reportOptionalSubscript]
    groups = np.repeat([SOURCES.index(source) for source, _, _ in parts], widths)
    return Predictors(columns, groups, np.repeat([dense for _, _, dense in parts], widths))


def _categories(ids: Int[np.ndarray, " sample"]) -> sparse.csr_array:
    _, codes = np.unique(ids, return_inverse=True)
    return sparse.csr_array((np.ones(len(ids)), (np.arange(len(ids)), codes)), shape=(len(ids), int(codes.max()) + 1))


def _piecewise(counts: Int[np.ndarray, " sample"]) -> sparse.csr_array:
    """A line, as a share of the largest count, and hat functions around 0, 1, 4, 16, ..., the last constant beyond; 0 for a count of -1."""
    largest = int(counts.max())
    if largest < 1:
        return sparse.csr_array((len(counts), 0))
    knots = np.array([0, *(4**power for power in range(16) if 4**power < largest)])
    hats = [np.interp(counts, knots, hat) for hat in np.eye(len(knots))]
    return sparse.csr_array(np.where(counts[:, None] >= 0, np.stack([counts / largest, *hats], axis=1), 0.0))


def _seen_elsewhere(ids: Int[np.ndarray, " sample"], folds: Int[np.ndarray, " sample"]) -> Bool[np.ndarray, " sample"]:
    """Whether the id of each sample occurs in a fold other than its own."""
    _, codes = np.unique(ids, return_inverse=True)
    held_in = sparse.csr_array((np.ones(len(ids)), (codes, folds))).toarray() > 0
    return held_in.sum(1)[codes] > 1
