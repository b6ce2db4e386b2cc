"""Sources of learned positions: token, index, segment and previous token.

How much of the variance of a head's positions they explain, so of the output of f_phi:

    z_i = index(i) + segment(number and place of i in lines, sentences, ... and named spans) +
    token[t_i] + previous[t_{i-1}] + rest

A sum, fitted by ridge regression (`kernels.held_out`) and judged on stretches of text that it was
not fitted to.

    alone   R^2 of one source without the others
    share   gain of a source over those before it, in this order, from few effects to many; the
            shares and the rest sum to 1

    token, previous    an effect per token id, shrunk: one that n tokens were fitted to keeps
                       n / (n + shrinkage) of their mean
    index, numbers     a line, and departures from it at 0, 1, 4, 16, 64, ..., linear in between,
                       shrunk alike

Every different prompt is cut into stretches of `STRETCH` tokens or more, so that one text is
enough; prompts too short to be cut are held out whole. Equal prompts are one. Held-out tokens count
where they and the token before them occur in other folds, and `counted_share` says how many do. The
first token of a prompt, which has no previous one and often stands apart, is left out. A shift of a
whole prompt changes no logit, so variance is that within prompts; a head whose positions vary by
rounding alone has no shares (NaN). Where gates count positions
(CoPE) it is the mean gate of a token that is explained. Held-out values may be negative: a source
that misleads.

    alone_null    the largest `alone` of `DRAWS` permutations of a head's positions over the tokens
                  of each prompt
    line_step     how far the last tokens of lines stand from the other tokens, in standard
                  deviations
    kind          name of a head whose layer learns positions, or counts them by gates
                  (`head_kinds`)

Statistics keep positions of at most `tokens` tokens of a prompt, drawn by its content. Knows
nothing about models.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import xarray as xr
from annotated_types import Interval
from jaxtyping import Bool, Float, Int
from scipy import sparse
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.gate_sums import gate_sums
from repo_interp.measures.kernels.held_out import Codes, HeldOut, Marks, Rows, one_hot
from repo_interp.measures.kernels.rank_trend import counts_tokens, rank_trend, trend_null
from repo_interp.measures.kernels.rounding import ROUNDING
from repo_interp.measures.kernels.seen_pairs import on_host
from repo_interp.measures.kernels.segmentation import INSIDE, STARTS, Kinds
from repo_interp.measures.labels import arrays, described_group
from repo_interp.measures.segments import KINDS
from repo_interp.measures.statistics import Needs, SegmentMeasure, Statistics
from repo_interp.values import Positive

SOURCES = ("index", "segment", "token", "previous")
REST = "rest"
KINDS_OF_HEADS = ("counts tokens", "marks lines", "places words", "places in segments")
FOLLOWS = 0.9
"""Held-out R squared of the token alone from which positions follow from it."""
STRETCH = 32
"""Tokens of a held-out stretch, at least, where a prompt is not needed in smaller ones."""
MOST = 4096
"""Previous tokens with separate effects: the size of one solve grows with their square.
"""
DRAWS = 3
"""Permutations of the null."""
DOMINATES = 0.3
"""Held-out R squared from which a head is called by the source with the largest share."""
STEPS = 1.0
"""Standard deviations that a head which marks lines steps by, at least."""
_UNNAMED = ("rest", "separator")
"""Spans that are no segments."""
OfSources = Float[np.ndarray, "*head source"]
_TEXTS = {
    "share": "held-out share of a head's position variance that a source adds to those before it",
    "alone": "held-out R squared of one source without the others",
    "alone_null": (
        f"the same of positions permuted over the tokens of each prompt, largest of {DRAWS} draws"
    ),
    "r_squared": "held-out R squared of all sources: the sum of their shares",
    "r_squared_error": "standard error of R squared over folds",
    "follows_from_token": (
        f"1 where the token alone explains {FOLLOWS:g} of a head's position variance, -1 for "
        "a head without any"
    ),
    "line_step": (
        "positions of the last tokens of lines less those of other tokens, in standard deviations"
    ),
    "line_step_null": "size of line_step that 95 % of permuted positions stay within",
    "kind": "what a head with learned positions or gates does, in words",
    "counted_share": "share of tokens that, with the one before them, occur in other folds",
    "counted_tokens": "tokens that shares are taken over [tokens]",
}


def head_kinds(
    counts: Bool[np.ndarray, "*head"],
    share: OfSources,
    alone: OfSources,
    null: OfSources,
    line_step: Float[np.ndarray, "*head"],
    line_step_null: float = 0.0,
) -> np.ndarray:
    """Name the function of every head.

    Args:
        counts: Whether the rank correlation with the token index is above .8 and its null in every
            prompt.
        share: Gain of every one of `SOURCES` over those before it; further ones are ignored.
        alone: Share that a source explains alone. A head is called by the source with the
            largest share, where this reaches `DOMINATES` and its null.
        null: The same of permuted positions.
        line_step: Step at line ends, in standard deviations.
        line_step_null: The size that permuted positions stay within.

    Returns:
        "counts tokens", "marks lines", "places words", "places in segments", or "other": the first
        that holds.
    """
    # The rest, last in `share`, is no source to be called by
    leads = (share == share[..., : len(SOURCES)].max(-1, keepdims=True)) & (
        alone >= np.fmax(null, DOMINATES)
    )
    marks = np.abs(line_step) >= np.fmax(line_step_null, STEPS)
    # np.select takes the first that holds: counting and lines come before sources of content
    holds = (
        counts,
        marks,
        leads[..., SOURCES.index("token")],
        leads[..., SOURCES.index("segment")],
    )
    return np.select(holds, KINDS_OF_HEADS, "other")


@dataclass(frozen=True)
class PositionSources(SegmentMeasure):
    """The measure `position_sources`."""

    kinds: Kinds = KINDS
    """Kinds of segments beside the prompts' named spans."""
    folds: Annotated[int, Interval(ge=2, le=1000)] = 5
    """Parts of the text; every part is held out once."""
    shrinkage: Positive = 1.0
    """Ridge penalty of the effects, in tokens without an effect that weigh as much."""
    tokens: Annotated[int, Interval(ge=2, le=65_536)] = 1024
    """Most tokens of a prompt."""
    name: str = "position_sources"

    @property
    def needs(self) -> Needs:
        """Segments of its kinds.

        Samples that a prompt is too short for are NaN, and trends of positions that do not vary or of a
        single token.
        """
        return Needs(segments=self.kinds, layer=True, nan=("value", "trend", "trend_null"))

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """Layers without positions and gates."""
        if inputs.positions is not None or inputs.gate_features is not None:
            return None
        return Gap("assign no positions and count no tokens by gates")

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Return positions or gates of some tokens, and the sources beside them in the prompt.

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
        # Less 1, because the first token is left out
        count = min(self.tokens, max(1, quantity.shape[-1] - 1))
        found = []
        for row, valid in enumerate(on_host(inputs.valid)):
            tokens = on_host(inputs.tokens)[row][valid].astype(np.int64)
            # Python's hash of bytes differs between processes; this one finds equal prompts in any
            # batch
            content, known = zlib.crc32(tokens.tobytes()), quantity[row][:, valid]
            trend = np.full(inputs.heads, np.nan)
            if inputs.gate_features is None:  # gates that rise with the token index count no tokens
                # Of all tokens, as in `patterns`, so that both call the same heads counters; the
                # index has no rounding.
                rounding = None if inputs.learned else torch.zeros(1, device="cpu")
                trend = rank_trend(torch.from_numpy(known.astype(float)), equal=rounding).numpy()
                trend[np.isnan(known).any(-1)] = np.nan
            # From 1: the first token has no previous one. Drawn by content, so batches play no part
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
                    trend,
                    trend_null(len(tokens)),
                )
            )
        values, ids, places, contents, trend, null = map(np.stack, zip(*found, strict=True))
        record = {
            "value": ("prompt layer head sample", values),
            "ids": ("prompt layer part sample", ids),
            "places": ("prompt layer segment part sample", places),
            "content": ("prompt layer", contents),
            "trend": ("prompt layer head", trend),
            "trend_null": ("prompt layer", null),
        }
        known = inputs.learned or inputs.gate_features is not None
        learned = arrays(inputs, {"learned": ("layer", np.array(known, dtype=float))})
        return Statistics(
            arrays(inputs, record, segment=list(segments), sample=np.arange(count)), learned
        )

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group `position_sources` of a run.

        Sources are NaN where no token that counts occurs in two folds.
        """
        # Equal prompts would lie in two folds and predict each other
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
        prompts, folds = np.nonzero(present)[0], _folds(present, self.folds)
        token, previous, index = ids[:, present]
        # A token that no other fold holds has the effect 0, whatever it does
        counted = _seen_elsewhere(token, folds) & _seen_elsewhere(previous, folds)
        segments = [
            part
            for number, place, last in places
            for part in (_piecewise(number), _piecewise(place), last[:, None] > 0)
        ]
        columns = {
            "index": sparse.csr_array(_piecewise(index)),
            "segment": sparse.csr_array(np.hstack(segments, dtype=float)),
            "token": one_hot(token),
            "previous": one_hot(_frequent(previous)),
        }
        values = (
            measured["value"]
            .transpose("layer", "head", "prompt", "sample")
            .values[:, :, present]
            .astype(float)
        )
        # [layer, head]
        known = np.isfinite(values).all(-1)
        # Heads that share positions are fitted once.
        different, same = np.unique(values[known], axis=0, return_inverse=True)
        lines = (places[beside["segment"].values == "lines", 2] > 0).any(0)
        fits, step_null = _by_prompt(different.T, prompts, lines)
        fits |= _explained(different.T, columns, HeldOut(prompts, folds, counted, self.shrinkage))
        # Back to all heads; those without positions get a row of NaN behind all others
        place = np.full(known.shape, -1)
        place[known] = same.ravel()
        found = {
            name: np.concatenate([fit, np.full_like(fit, np.nan, shape=(1, *fit.shape[1:]))])[place]
            for name, fit in fits.items()
        }
        judged = (found[name] for name in ("share", "alone", "alone_null", "line_step"))
        trend = measured["trend"].transpose("prompt", "layer", "head").values
        counts = counts_tokens(trend, beside["trend_null"].values)
        kind = head_kinds(counts, *judged, line_step_null=step_null)
        alone = found["alone"][..., SOURCES.index("token")]
        found["follows_from_token"] = np.where(np.isfinite(alone), alone >= FOLLOWS, -1).astype(
            np.int8
        )
        # Index positions count tokens by definition; a name would say nothing
        found["kind"] = np.where(statistics.sums["learned"].values[:, None] > 0, kind, "").astype(
            object
        )
        axes = ("layer", "head", "source")
        group = {name: (axes[: array.ndim], array) for name, array in found.items()}
        single = {
            # NaN for no samples, without a warning of numpy
            "counted_share": counted.sum() / (len(counted) or np.nan),
            "counted_tokens": counted.sum(),
            "line_step_null": step_null,
        }
        group |= {name: ((), value) for name, value in single.items()}
        return described_group(
            group,
            _TEXTS,
            {**{axis: measured[axis].values for axis in axes[:2]}, "source": [*SOURCES, REST]},
        )


def _explained(
    values: Rows, columns: dict[str, sparse.csr_array], held_out: HeldOut
) -> dict[str, Float[np.ndarray, "row *any"]]:
    """Return the explained shares of every row by name; NaN without variance or samples."""
    prompts, rows = one_hot(held_out.prompts), values.shape[1]
    flat = ROUNDING * np.square(values).sum(0)
    # A shift of a whole prompt changes no logit, so only variance within prompts counts.
    values = values - prompts @ ((prompts.T @ values) / prompts.sum(axis=0)[:, None])
    random = np.random.default_rng(0)
    # Permutations within prompts: sorted by prompt, then at random.
    orders = [np.lexsort((random.random(len(values)), held_out.prompts)) for _ in range(DRAWS)]
    # Heads and their permutations side by side: one factorization per fold serves all columns
    drawn = np.concatenate([values, *(values[order] for order in orders)], axis=1)
    total = held_out.squares(drawn)
    # A head without variance has none when permuted either
    total[:, np.tile(total[:, :rows].sum(0) <= flat, 1 + DRAWS)] = np.nan

    def missed(values: Rows, sources: tuple[str, ...]) -> Rows:
        # One of the two large sets is eliminated as categories; the other, if any, is solved for
        category = next((name for name in ("token", "previous") if name in sources), None)
        categories = sparse.csr_array((len(values), 0)) if category is None else columns[category]
        # Prompts have effects too, so that shifts between them are not put down to sources
        dense = sparse.hstack([prompts, *(columns[name] for name in sources if name != category)])
        return held_out.errors(values, sparse.csr_array(dense), categories)

    with np.errstate(divide="ignore", invalid="ignore"):
        alone = [1 - missed(drawn, (source,)).sum(0) / total.sum(0) for source in SOURCES]
        # The rest explains nothing by itself
        alone = np.stack([*alone, np.full_like(alone[0], np.nan)], axis=-1)
        alone = alone.reshape(1 + DRAWS, rows, -1)
        total = total[:, :rows]
        errors = [missed(values, SOURCES[:count]) for count in range(1, 1 + len(SOURCES))]
        added = np.stack([1 - part.sum(0) / total.sum(0) for part in errors], axis=-1)
        # std / sqrt(n - 1) with numpy's divisor n: the standard error of a mean over folds
        error = (1 - errors[-1] / total).std(0) / np.sqrt(len(total) - 1 or np.nan)
    # From 0 to 1: gains of the sources in order, and the rest last
    share = np.diff(added, axis=1, prepend=0.0, append=1.0)
    return {
        "share": share,
        "alone": alone[0],
        "alone_null": alone[1:].max(0),
        "r_squared": added[:, -1],
        "r_squared_error": error,
    }


def _by_prompt(
    values: Rows, prompts: Codes, line_ends: Marks
) -> tuple[dict[str, Float[np.ndarray, " row"]], float]:
    """Return the step of every row at line ends, and the 95 % limit of permutations.

    The step is a mean over prompts that have a line end.
    """
    steps, variances = [], []
    for prompt in np.unique(prompts):
        here, ends = values[prompts == prompt], line_ends[prompts == prompt]
        count, last = len(ends), int(ends.sum())
        if 0 < last < count:
            # Of a permutation: the variance of the mean of `last` of `count` numbers less the mean
            # of the others.
            variances.append(count**2 / (last * (count - last) * (count - 1)))
            flat = here.var(0) <= ROUNDING * np.square(here).mean(0)
            # Within a prompt: a shift of all its positions is no step
            step = (here[ends].mean(0) - here[~ends].mean(0)) / np.where(flat, np.nan, here.std(0))
            steps.append(step)
    nothing = np.full((1, values.shape[1]), np.nan)
    step = np.ma.masked_invalid(steps or nothing).mean(0).filled(np.nan)
    # Variance of a mean over independent prompts: sum of variances over their number squared
    return {"line_step": step}, 1.96 * sum(variances) ** 0.5 / (len(variances) or np.nan)


def _quantity(inputs: AttentionInputs) -> Float[Tensor, "prompt head token"]:
    """Return gates of tokens where gates count positions, else positions; NaN without either."""
    if inputs.gate_features is not None:
        sums = gate_sums(inputs)
        return sums.by_key / sums.queries[:, None].clamp_min(1)
    if inputs.head_positions is not None:
        return inputs.head_positions
    return torch.full_like(inputs.queries[..., 0], torch.nan)


def _segment_spans(spans: Spans, kinds: tuple[str, ...]) -> dict[str, str]:
    """Return spans of all kinds of segments, and named spans that are no part of another."""
    named = sorted(name for name in spans if "." not in name and name not in _UNNAMED)
    return {**{kind: INSIDE + kind for kind in kinds}, **{f"span {name}": name for name in named}}


def _places_in(spans: Spans, span: str, row: int, valid: Marks) -> Int[np.ndarray, "part token"]:
    """Return segment number, place and end mark for every valid token of a prompt; -1 for none.

    The mark is 1 for the last token before another segment. Where a span does not say where
    segments start, every unbroken stretch is one.
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


def _piecewise(counts: Codes) -> Rows:
    """Return a line and hat functions of counts at 0, 1, 4, 16, ...; 0 for -1.

    The line goes up to 10, so that it is hardly shrunk; the last function is constant beyond its
    knot.
    """
    largest = int(counts.max(initial=0))
    # Geometric, so that a long prompt has few hats
    knots = [0, *(4**power for power in range(16) if 4**power < largest)]
    hats = [np.interp(counts, knots, hat) for hat in np.eye(len(knots))]
    return np.where(
        counts[:, None] >= 0, np.stack([10 * counts / max(largest, 1), *hats], axis=1), 0.0
    )


def _frequent(ids: Codes) -> Codes:
    """The `MOST` most frequent ids as they are, -1 for the others, which so share an effect."""
    different, counts = np.unique(ids, return_counts=True)
    # Stable, so that equal counts go by id and the choice is the same everywhere
    return np.where(np.isin(ids, different[np.argsort(-counts, kind="stable")[:MOST]]), ids, -1)


def _folds(present: Bool[np.ndarray, "prompt sample"], folds: int) -> Codes:
    """Return the fold of every sample.

    Prompts are cut into stretches, which folds take in turn, beginning with another one in every
    prompt.
    """
    counts, number = present.sum(1, keepdims=True), np.arange(len(present))[:, None]
    # At least so many that all folds get one; at most two per fold and prompt
    stretches = np.clip(counts // STRETCH, -(-folds // len(present)), 2 * folds)
    return (((present.cumsum(1) - 1) * stretches // np.maximum(counts, 1) + number) % folds)[
        present
    ]


def _seen_elsewhere(ids: Codes, folds: Codes) -> Marks:
    """Return the samples whose id occurs in another fold too."""
    of_id = one_hot(ids)
    # [id, fold] counts: in how many folds an id occurs, led back to the samples
    return of_id @ ((of_id.T @ one_hot(folds)) > 0).sum(axis=1) > 1
