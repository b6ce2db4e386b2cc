r"""Held-out shares of the variance of positions by source, and nulls that preserve smoothness.

    z_i = slow(i) + token[t_i] + previous[t_{i-1}] + segment(i) + line end(i) + rest

    slow            a function of the index shared by all texts, and low frequencies of each text:
                    cos(pi k (i + 1/2) / n), k = 1 .. `LOW` of n tokens
    token, previous a shrunken effect of every token id
    segment         number of, and place in, lines, sentences, ... and named spans
    line end        the last token of a line

    share           R^2 that a source adds to the sources before it, in this order; with the rest
                    the shares sum to 1
    alone           R^2 that a source adds to the slow part; for the slow part, its R^2
    segments_ahead  R^2 of segments without the slow part minus R^2 of the slow part, or 0
    shape           R^2 of one slow function of the index, on texts that it was not fitted to

The nulls are as smooth as the positions. `alone_null` and `segments_ahead_null` are the maximum
over `DRAWS` circular shifts of a row within its texts; chance exceeds it one time in 20.
`shape_null` is the maximum over `SHIFTS` shifts. `share_null` is the 95 % quantile of `share`
for as many random tables of words and of previous words, since positions that follow only
words mark no segment and no line. The larger of both kinds of tables counts. This module knows
nothing about models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import sparse

from repo_interp.measures.kernels.rounding import ROUNDING
from repo_interp.plugins.sources.held_out import Codes, HeldOut, Marks, Rows, one_hot
from repo_interp.plugins.sources.names import CLEAR, SOURCES, TEXTS, most_explained

LOW = 4
"""Number of low frequencies in the slow part of a text."""
SHAPE = 8
"""Number of low frequencies of a shape shared by texts."""
STRETCH = 32
"""Least number of tokens of a held-out stretch, unless the folds need smaller ones."""
MOST = 1024
"""Most previous tokens with separate effects: the size of one solve grows with their square."""
DRAWS = 19
"""Number of circular shifts of a row, and of random tables of words."""
SHIFTS = 99
"""Number of circular shifts of a row in the null of a shape."""
_SCALE = 10.0
"""Scale of columns that makes the effect of shrinkage negligible."""


@dataclass(frozen=True)
class Samples:
    """Tokens of texts and their places."""

    prompts: Codes
    """Text of every token, ascending."""
    token: Codes
    previous: Codes
    index: Codes
    """Index of the token in its text."""
    places: Int[np.ndarray, "segment part sample"]
    """By kind of segments: number of the token's segment, place in it, and 1 for the last token; -1
    outside.
    """
    lines: Marks
    """Whether the token is the last of a line."""
    folds_wanted: int = 5

    @cached_property
    def texts(self) -> int:
        """Number of texts."""
        return len(np.unique(self.prompts))

    @cached_property
    def stretches(self) -> Codes:
        """Number of stretches of the text of every sample."""
        counts = np.unique(self.prompts, return_counts=True)[1]
        # Enough that all folds get one; at most two per fold and prompt
        cut = np.clip(
            counts // STRETCH, -(-self.folds_wanted // max(1, len(counts))), 2 * self.folds_wanted
        )
        return np.repeat(cut, counts)

    @cached_property
    def folds(self) -> Codes:
        """Fold of every sample: stretches take folds in turn; the first fold differs by text."""
        number, counts = np.unique(self.prompts, return_inverse=True, return_counts=True)[1:]
        place = np.arange(len(self.prompts)) - np.repeat(counts.cumsum() - counts, counts)
        return (place * self.stretches // np.repeat(counts, counts) + number) % self.folds_wanted

    @cached_property
    def counted(self) -> Marks:
        """Samples with a token and a previous token that also occur in another fold."""
        return _seen_elsewhere(self.token, self.folds) & _seen_elsewhere(self.previous, self.folds)

    @cached_property
    def lengths(self) -> Codes:
        """Number of tokens up to the last sample of the text, for every sample."""
        number = np.unique(self.prompts, return_inverse=True)[1]
        last = np.zeros(self.texts, int)
        np.maximum.at(last, number, self.index)
        return last[number] + 1

    @cached_property
    def columns(self) -> dict[str, sparse.csr_array]:
        """Predictors of every source."""
        segments = [
            part for number, place, _ in self.places for part in map(piecewise, (number, place))
        ]
        empty = np.zeros((len(self.prompts), 0))
        return {
            "slow": sparse.csr_array(
                sparse.hstack([sparse.csr_array(piecewise(self.index)), self._drifts()])
            ),
            "token": one_hot(self.token),
            "previous": one_hot(_frequent(self.previous)),
            "segment": sparse.csr_array(np.hstack([*segments, empty])),
            "line end": sparse.csr_array(_SCALE * self.lines[:, None]),
        }

    def _drifts(self) -> sparse.csr_array:
        # No more frequencies than the remaining stretches can determine
        known = np.where(self.stretches < LOW, 0, np.minimum(LOW, self.stretches // 2))
        waves = np.stack(
            [
                np.where(k <= known, np.cos(np.pi * k * (self.index + 0.5) / self.lengths), 0)
                for k in range(1, LOW + 1)
            ],
            axis=1,
        )
        of_text = one_hot(self.prompts)
        return sparse.csr_array(
            sparse.hstack([of_text.multiply(_SCALE * waves[:, [k]]) for k in range(LOW)])
        )

    @cached_property
    def waves(self) -> Rows:
        """Low frequencies of the index up to the longest text."""
        k = np.arange(1, SHAPE + 1)
        longest = max(1, int(self.lengths.max(initial=1)))
        return _SCALE * np.cos(np.pi * k * (self.index[:, None] + 0.5) / longest)


def explain(values: Rows, samples: Samples, shrinkage: float = 1.0) -> dict[str, np.ndarray]:
    """Return the variance of rows of positions that sources explain.

    Args:
        values: Positions [sample, row].
        samples: Sources of the samples.
        shrinkage: Ridge penalty of the effects.

    Returns:
        Arrays [row] or [row, source] (`SOURCES`, then the rest) by name: `share`, `alone`,
        `alone_null`, `r_squared`, `r_squared_error`, `segments_ahead`, `shape`, `shape_null`; and
        `share_null` [source], equal for all rows. NaN without variance or samples. Nulls are NaN
        for rows with less than `CLEAR` explained.
    """
    rows, random = values.shape[1], np.random.default_rng(0)
    if not len(values):
        return _nothing(rows)
    held_out = HeldOut(samples.prompts, samples.folds, samples.counted, shrinkage)
    tables = np.hstack([_tables(of, random) for of in (samples.token, samples.previous)])
    values, constant = _varying(values, samples.prompts)
    tables, _ = _varying(tables, samples.prompts)
    fits = _fit(np.hstack([values, tables]), samples, held_out, shares=True)
    shape, shape_null = _shapes(values, samples, shrinkage, random)
    found = {name: fit[:rows] for name, fit in fits.items()}
    # Tables of words decide the null of segments and line ends; tables of previous words decide
    # the null of the word
    of_tables = np.quantile(fits["share"][rows:].reshape(2, DRAWS, -1), 0.95, axis=1).max(0)
    nulls = {name: np.full_like(found[name], np.nan) for name in ("alone", "segments_ahead")}
    clear = np.flatnonzero(most_explained(found) >= CLEAR)
    if clear.size:
        draws = [_shifted(values[:, clear], samples.prompts, random) for _ in range(DRAWS)]
        shifted = _fit(np.hstack(draws), samples, held_out, shares=False)
        for name, null in nulls.items():
            null[clear] = shifted[name].reshape(DRAWS, len(clear), *null.shape[1:]).max(0)
    found |= {f"{name}_null": null for name, null in nulls.items()}
    found |= {"shape": shape, "shape_null": shape_null}
    return found | {"share_null": of_tables, "constant": constant}


def _fit(values: Rows, samples: Samples, held_out: HeldOut, shares: bool) -> dict[str, np.ndarray]:
    """Return `alone` and `segments_ahead` of rows, and `share` if `shares` is set."""
    prompts, columns = one_hot(samples.prompts), samples.columns
    total = held_out.squares(values)

    def missed(*sources: str) -> Rows:
        # One of the two large sources is eliminated as categories; the other, if any, is solved for
        category = next((name for name in ("token", "previous") if name in sources), None)
        categories = sparse.csr_array((len(values), 0)) if category is None else columns[category]
        # Prompts have effects too, so that shifts between prompts are not attributed to sources
        dense = sparse.hstack([prompts, *(columns[name] for name in sources if name != category)])
        return held_out.errors(values, sparse.csr_array(dense), categories)

    with np.errstate(divide="ignore", invalid="ignore"):
        slow = missed("slow")
        known = {name: missed("slow", name) for name in SOURCES[1:]}
        sizes = total.sum(0)
        alone = [1 - slow.sum(0) / sizes]
        # A source without the slow part gains nothing from a slow part that misleads
        base = np.fmin(slow.sum(0), sizes)
        alone += [(base - known[name].sum(0)) / sizes for name in SOURCES[1:]]
        found = {
            "alone": np.stack([*alone, np.full_like(alone[0], np.nan)], axis=-1),
            # A slow part that explains nothing counts as 0
            "segments_ahead": (base - missed("segment").sum(0)) / sizes,
        }
        if not shares:
            return found
        steps = [slow, known["token"], *(missed(*SOURCES[:count]) for count in range(3, 6))]
        added = np.stack([1 - part.sum(0) / sizes for part in steps], axis=-1)
        # std / sqrt(n - 1) with numpy's divisor n: the standard error of a mean over folds
        error = (1 - steps[-1] / total).std(0) / np.sqrt(len(total) - 1 or np.nan)
        return found | {
            # From 0 to 1: gains of the sources in order, and the rest last
            "share": np.diff(added, axis=1, prepend=0.0, append=1.0),
            "r_squared": added[:, -1],
            "r_squared_error": error,
        }


def _shapes(
    values: Rows, samples: Samples, shrinkage: float, random: np.random.Generator
) -> tuple[Float[np.ndarray, " row"], Float[np.ndarray, " row"]]:
    """Return `shape` and `shape_null`; NaN for fewer than `TEXTS` texts."""
    none = np.full(values.shape[1], np.nan)
    if samples.texts < TEXTS:
        return none, none.copy()
    number = np.unique(samples.prompts, return_inverse=True)[1]
    # A fit without the longest text ends at the second longest: later samples do not count
    reach = np.sort(np.unique(np.stack([number, samples.lengths]), axis=1)[1])[-2]
    by_text = HeldOut(samples.prompts, number % 10, samples.index < reach, shrinkage)
    waves, nothing = sparse.csr_array(samples.waves), sparse.csr_array((len(values), 0))

    def explained(rows: Rows) -> Rows:
        with np.errstate(divide="ignore", invalid="ignore"):
            return 1 - by_text.errors(rows, waves, nothing).sum(0) / by_text.squares(rows).sum(0)

    shape, null = explained(values), none
    clear = np.flatnonzero(np.nan_to_num(shape) >= CLEAR)
    if clear.size:
        draws = [_shifted(values[:, clear], samples.prompts, random) for _ in range(SHIFTS)]
        null[clear] = explained(np.hstack(draws)).reshape(SHIFTS, -1).max(0)
    return shape, null


def _varying(values: Rows, prompts: Codes) -> tuple[Rows, Bool[np.ndarray, " row"]]:
    """Rows minus the mean of every text, and a mask of rows that vary by rounding only (now 0)."""
    of_text = one_hot(prompts)
    # A shift of a whole text changes no logit
    moved = values - of_text @ ((of_text.T @ values) / of_text.sum(axis=0)[:, None])
    flat = np.square(moved).sum(0) <= ROUNDING * np.square(values).sum(0)
    return np.where(flat, 0.0, moved), flat


def _nothing(rows: int) -> dict[str, np.ndarray]:
    """The result of `explain` without samples."""
    sources = len(SOURCES) + 1
    of_sources = {
        name: np.full((rows, sources), np.nan) for name in ("share", "alone", "alone_null")
    }
    single = ("r_squared", "r_squared_error", "shape", "shape_null")
    lead = ("segments_ahead", "segments_ahead_null")
    return {
        **of_sources,
        **{name: np.full(rows, np.nan) for name in (*single, *lead)},
        "share_null": np.full(sources, np.nan),
        "constant": np.ones(rows, bool),
    }


def _shifted(values: Rows, prompts: Codes, random: np.random.Generator) -> Rows:
    """Shift rows circularly within every text, by a tenth to nine tenths of its length."""
    parts = []
    for prompt in np.unique(prompts):
        part = values[prompts == prompt]
        least = -(-len(part) // 10)
        parts.append(
            np.roll(
                part, int(random.integers(least, max(least + 1, len(part) - least + 1))), axis=0
            )
        )
    return np.concatenate(parts) if parts else values


def _tables(ids: Codes, random: np.random.Generator) -> Rows:
    """Draw random numbers per id [sample, draw]."""
    different, place = np.unique(ids, return_inverse=True)
    return random.normal(size=(len(different), DRAWS))[place]


def piecewise(counts: Codes) -> Rows:
    """Return a line and hat functions of counts at 0, 1, 4, 16, ...; 0 for -1.

    The line rises to 10, so that shrinkage hardly affects it. The last function is constant beyond
    its knot.

    Args:
        counts: Counts of every sample, -1 for none.

    Returns:
        Columns [sample, function].
    """
    largest = int(counts.max(initial=0))
    # Geometric, so that a long prompt has few functions
    knots = [0, *(4**power for power in range(16) if 4**power < largest)]
    hats = [np.interp(counts, knots, hat) for hat in np.eye(len(knots))]
    return np.where(
        counts[:, None] >= 0,
        np.stack([_SCALE * counts / max(largest, 1), *hats], axis=1),
        0.0,
    )


def _frequent(ids: Codes) -> Codes:
    """The `MOST` most frequent ids that occur at least twice; -1 for others."""
    different, counts = np.unique(ids, return_counts=True)
    # Stable, so that ties are ordered by id and the choice is reproducible
    order = np.argsort(-counts, kind="stable")[:MOST]
    return np.where(np.isin(ids, different[order[counts[order] > 1]]), ids, -1)


def _seen_elsewhere(ids: Codes, folds: Codes) -> Bool[np.ndarray, " sample"]:
    """Return a mask of samples whose id also occurs in another fold."""
    of_id = one_hot(ids)
    # [id, fold] counts: the number of folds with an id, mapped back to the samples
    return of_id @ ((of_id.T @ one_hot(folds)) > 0).sum(axis=1) > 1
