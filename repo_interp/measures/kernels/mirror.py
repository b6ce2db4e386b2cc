"""Whether copies of words get the positions of their sources (RePo app. C, fig. 6).

    mirror    mean |z_copy - z_source| against mean |z_copy - z_other word|, and against |z_copy -
              z_same word elsewhere|

A position that depends on the word alone is the same for a copy and its source, but for the same
word elsewhere too: the second tells a mirror from that. This module knows nothing about tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from repo_interp.measures.kernels.rounding import RANGE

MEANING = (
    "how much nearer a copy's position is to its source's than to those of other words, and of the "
    "same word elsewhere; 1: the same, 0: no nearer, below 0: farther"
)
"""Of `mirror_score`, in words."""
ROUNDING = 1e-4
"""Share of the distance to other words below which two positions of a word count as equal."""


class Mirror(NamedTuple):
    """Distances in positions over the generated words of one prompt, and a correlation."""

    copies: float
    """Mean |z_copy - z_source|."""
    random: float
    """Mean |z_copy - z| over places of other words."""
    elsewhere: float
    """Mean |z_copy - z| over other places of the same word; NaN where no word is there twice."""
    correlation: float
    """Correlation of z_copy and z_source; NaN if either is constant up to rounding."""


def mirror(
    positions: Float[np.ndarray, " token"],
    words: Sequence[str | int],
    source: Sequence[int],
    copy: Sequence[int],
) -> Mirror:
    """Measure the distance between the positions of copies and their sources.

    Args:
        positions: Position of every token [token] in one head.
        words: Word of every token; equal entries are the same word.
        source: Token numbers of the sources; a copy could have come from any of them.
        copy: Token numbers of the copies; `copy[k]` copies `source[k]`.

    Returns:
        Mean distances to the source, to other words and to the same word elsewhere, and the
        correlation.
    """
    z, places, copies = np.asarray(positions, dtype=float), np.asarray(source), np.asarray(copy)
    pairs = np.stack((z[copies], z[places]))
    # Numpy would warn, and divide 0 by 0, for a constant row; rounding has no correlation
    varied = bool((np.ptp(pairs, axis=1) > RANGE * np.abs(pairs).max(1)).all())
    to_source, random, elsewhere = _distances(z[None], words, places, copies)
    return Mirror(
        float(to_source[0]),
        float(random[0]),
        float(elsewhere[0]),
        float(np.corrcoef(pairs)[0, 1]) if varied else np.nan,
    )


def _distances(
    positions: Float[np.ndarray, "head token"],
    words: Sequence[str | int],
    source: Sequence[int] | np.ndarray,
    copy: Sequence[int] | np.ndarray,
) -> Iterator[Float[np.ndarray, "head"]]:
    """The three mean distances of `Mirror`, of every head."""
    named, places, copies = np.asarray(words), np.asarray(source), np.asarray(copy)
    distance = np.abs(positions[:, copies, None] - positions[:, None, places])
    same = named[copies][:, None] == named[places][None]
    # [copy, source]: entry (k, k) is a copy and its source
    itself = np.eye(len(places), dtype=bool)
    # Without the pair of the copy itself, or a mirror would raise its control
    for pairs in (itself, ~same, same & ~itself):
        chosen = distance.reshape(len(distance), -1).compress(pairs.ravel(), axis=1)
        yield chosen.mean(1) if pairs.any() else np.full(len(distance), np.nan)


def mirror_scores(
    positions: Float[np.ndarray, "head token"],
    words: Sequence[str | int],
    source: Sequence[int],
    copy: Sequence[int],
) -> Float[np.ndarray, "head"]:
    """Compute `mirror_score` of several heads at once.

    Args:
        positions: Position of every token in every head.
        words: Word of every token; equal entries are the same word.
        source: Token numbers of the sources.
        copy: Token numbers of the copies; `copy[k]` copies `source[k]`.

    Returns:
        Scores [head].
    """
    return _scores(*_distances(positions, words, source, copy))


def mirror_score(measured: Mirror) -> float:
    """Return 1 minus the distance to the source over the nearer of the two other distances.

    Args:
        measured: Distances from `mirror`.

    Returns:
        1 for a mirror, 0 or less without one. 0 if a word has the same position everywhere up to
        rounding, and if all positions are equal. NaN if no word occurs twice: positions that depend
        only on the word, as in every layer that reads embeddings, would look like a mirror.
    """
    return float(_scores(*map(np.asarray, measured[:3])))


def _scores(copies: np.ndarray, random: np.ndarray, elsewhere: np.ndarray) -> np.ndarray:
    # fmin passes over NaN, where no other word is there.
    nearest = np.fmin(random, elsewhere)
    told_apart = nearest > ROUNDING * random
    scores = np.where(told_apart, 1 - copies / np.where(told_apart, nearest, 1.0), 0.0)
    return np.where(np.isnan(elsewhere), np.nan, scores)
