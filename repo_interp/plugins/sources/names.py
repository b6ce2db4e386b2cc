"""Names of rows of positions, by the order that they encode and the source that explains them.

A row gets the first name with a true condition:

    constant        no variance
    counts tokens   resolution of at most `COUNTS` tokens
    places in segments   segments explain `STEP` more than the slow part, as if a row steps with the
                    parts of a prompt
    fine, middle, slow clock   resolution of at most `FINE`, at most `MIDDLE`, or more tokens
    slow shape, places words, places by previous word, places in segments, marks lines
                    the source that explains most, at least `CLEAR` and more than its null
    other

Segments and line ends also need a share beyond words that exceeds the share for random tables of
words. This module knows nothing about how shares are fitted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

SOURCES = ("slow", "token", "previous", "segment", "line end")
REST = "rest"
# Equal to the constants of the kernel `order`, which imports torch: names need no torch
COUNTS, ORDERED = 4, 0.8
FINE, MIDDLE = 32, 128
"""Largest resolutions, in tokens, of fine and middle clocks."""
TEXTS = 3
"""Least number of texts for a shape over the index."""
CLEAR = 0.3
"""Least share of variance for a name by source."""
HALF = 0.5
"""Least share of variance of a shape: smooth rows of few texts may be similar by chance."""
STEP = 0.15
"""Least lead of segments over the slow part for a row that steps with segments; also the least
share that segments and line ends add to words.
"""
NEAR = 0.05
"""Largest distance of a share or an order that counts as near a threshold."""
NAMES = (
    "counts tokens",
    "fine clock",
    "middle clock",
    "slow clock",
    "slow shape",
    "places words",
    "places by previous word",
    "places in segments",
    "marks lines",
)
CLOCKS = NAMES[:4]
OTHER, CONSTANT = "other", "constant"
GROUPS = {
    "finest clocks": ("counts tokens", "fine clock"),
    "middle clocks": ("middle clock",),
    "slow clocks": ("slow clock", "slow shape"),
    "readers of words": ("places words", "places by previous word"),
    "readers of segments": ("places in segments", "marks lines"),
    "others": (OTHER, CONSTANT),
}
"""Names by group. The experiment `kinds` freezes a group together: clocks by their resolution."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def named_rows(
    resolution: Float[np.ndarray, "*row"], explained: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Name rows of positions.

    Args:
        resolution: Least distance in tokens from which 90 % of pairs have one order; NaN without
            such a distance.
        explained: Result of `explained.explain`.

    Returns:
        Names, as objects.
    """
    alone, shape = explained["alone"], explained["shape"]
    lead, beyond = (
        explained["segments_ahead"],
        explained["share"] > np.fmax(explained["share_null"], STEP),
    )
    follows = (shape >= HALF) & (shape > explained["shape_null"])
    sizes = [np.where(follows, shape, 0.0)]
    # In one text a random walk may step with segments, so three texts are needed, as for a shape
    several = ~np.isnan(shape)
    steps = several & (lead >= STEP) & (lead > explained["segments_ahead_null"])
    for place, source in enumerate(SOURCES[1:], start=1):
        size = alone[..., place]
        # Without a clear source no null is drawn: it is NaN, and the comparison is False
        holds = size > explained["alone_null"][..., place]
        if source in ("segment", "line end"):
            holds &= beyond[..., place]
        size = np.where(holds, size, 0.0)
        if source == "segment":
            size = np.fmax(size, np.where(steps, lead + np.fmax(alone[..., 0], 0), 0.0))
        sizes.append(size)
    size = np.nan_to_num(np.stack(sizes, -1))
    led = np.array(NAMES[len(CLOCKS) :], dtype=object)[size.argmax(-1)]
    clear = size.max(-1) >= CLEAR
    holds = [
        explained["constant"],
        resolution <= COUNTS,
        steps & (led == "places in segments") & clear,
        resolution <= FINE,
        resolution <= MIDDLE,
        resolution > MIDDLE,
        clear,
    ]
    names = [CONSTANT, CLOCKS[0], "places in segments", *CLOCKS[1:], led]
    return np.select(
        holds, [np.broadcast_to(np.asarray(name, dtype=object), led.shape) for name in names], OTHER
    )


def near_threshold(
    names: np.ndarray, told: Float[np.ndarray, "*row"], explained: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the rows with a value near a threshold of their name.

    Args:
        names: Names of rows.
        told: Largest order that holds up to the reach (`order.told_order`).
        explained: Result of `explained.explain`.

    Returns:
        Mask of rows with an order within `NEAR` of `ORDERED`, and of rows with a largest explained
        share within `NEAR` of `CLEAR` that are not clocks.
    """
    most = np.fmax(explained["shape"], most_explained(explained))
    by_share = ~np.isin(names, CLOCKS) & (np.abs(most - CLEAR) < NEAR)
    return (np.abs(told - ORDERED) < NEAR) | by_share


def most_explained(found: Mapping[str, np.ndarray]) -> Float[np.ndarray, "*row"]:
    """Return the largest share of the variance of rows that a source of content explains.

    Args:
        found: Result of `explain`, with `alone` and `segments_ahead`.

    Returns:
        Shares; 0 without a known share.
    """
    alone = np.nan_to_num(found["alone"])
    by_segments = alone[..., 0].clip(0) + np.nan_to_num(found["segments_ahead"])
    # The share of segments replaces the slow part only if segments lead it
    by_segments = np.where(np.nan_to_num(found["segments_ahead"]) >= STEP, by_segments, 0.0)
    return np.fmax(alone[..., 1:].max(-1), by_segments)
