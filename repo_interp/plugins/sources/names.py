"""Names of rows of positions, by the order that they tell and by what explains them.

The first that holds:

    constant        no variance
    counts tokens   resolution of at most `COUNTS` tokens
    places in segments   segments explain `STEP` more than the slow part, as of a row that steps with
                    the parts of a prompt
    fine, middle, slow clock   resolution of at most `FINE`, at most `MIDDLE`, or more tokens
    slow shape, places words, places by previous word, places in segments, marks lines
                    by what explains most, `CLEAR` or more and more than its null
    other

Segments and line ends need a share beyond words that random tables of words do not have.
Knows nothing about how shares are fitted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

SOURCES = ("slow", "token", "previous", "segment", "line end")
REST = "rest"
# Those of the kernel `order`, which loads torch: names are read without it
COUNTS, ORDERED = 4, 0.8
FINE, MIDDLE = 32, 128
"""Largest resolutions, in tokens, of fine and middle clocks."""
TEXTS = 3
"""Texts from which a shape over the index is asked for."""
CLEAR = 0.3
"""Share of variance from which a row is named by a source."""
HALF = 0.5
"""Share of variance that a shape explains, at least: smooth rows of few texts are alike by chance."""
STEP = 0.15
"""Share of variance by which segments lead the slow part where a row steps with them, and that they
and line ends add to words.
"""
NEAR = 0.05
"""Distance from a threshold of a share or of an order within which a row lies near it."""
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
"""Names by the group that the experiment `kinds` freezes together: clocks by their resolution."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def name_rows(
    resolution: Float[np.ndarray, "*row"], explained: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Name rows of positions.

    Args:
        resolution: Least distance in tokens from which 90 % of pairs stand in one order; NaN where
            there is none.
        explained: What sources explain, as `explained.explain` gives it.

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
    # Of one text a walk may step with its segments: three decide, as for a shape
    several = ~np.isnan(shape)
    steps = several & (lead >= STEP) & (lead > explained["segments_ahead_null"])
    for place, source in enumerate(SOURCES[1:], start=1):
        size = alone[..., place]
        # A null that was not drawn, since nothing is clear, is NaN and exceeded by nothing
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
    """Return the rows whose name a little more or less would change.

    Args:
        names: Names of rows.
        told: Largest order that holds up to the reach (`order.told_order`).
        explained: What sources explain.

    Returns:
        Mask: the order lies within `NEAR` of `ORDERED`, or of a row that is no clock what explains
        most lies within `NEAR` of `CLEAR`.
    """
    most = np.fmax(explained["shape"], most_explained(explained))
    by_share = ~np.isin(names, CLOCKS) & (np.abs(most - CLEAR) < NEAR)
    return (np.abs(told - ORDERED) < NEAR) | by_share


def most_explained(found: Mapping[str, np.ndarray]) -> Float[np.ndarray, "*row"]:
    """Return the largest share of the variance of rows that a source of content explains.

    Args:
        found: What `explain` gives, `alone` and `segments_ahead`.

    Returns:
        Shares, 0 where none is known.
    """
    alone = np.nan_to_num(found["alone"])
    by_segments = alone[..., 0].clip(0) + np.nan_to_num(found["segments_ahead"])
    # Of segments in place of the slow part only where they lead it
    by_segments = np.where(np.nan_to_num(found["segments_ahead"]) >= STEP, by_segments, 0.0)
    return np.fmax(alone[..., 1:].max(-1), by_segments)
