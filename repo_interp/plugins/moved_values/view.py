"""Findings on the norms of values that attention moves: `value_norms`.

    finding   the first token gets most of the attention (mean over prompts), and its value is less
              than half as long as the median, so this attention moves little

The map of heads and the table follow from the axes of the group. This module knows nothing about
how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from repo_interp.plots.marks import Finding, counted, group, over_prompts, percent, strongest_head
from repo_interp.plots.view import View

MOST_WEIGHT = 0.5
"""Least attention to the first token of a head that rests on it."""
SHORT = 0.5
"""Upper bound of the norm of a small value, relative to the median."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find heads that rest on the first token while its value is small."""
    norms = group(run, "value_norms")
    weight, value, moved = (
        over_prompts(norms[name]) for name in ("first_weight", "first_value", "first_moved")
    )
    resting = weight >= MOST_WEIGHT
    small = resting & (value < SHORT)
    if not (count := int(small.sum())):
        return
    layer, head, _ = strongest_head(weight.where(small))
    ratio = float(np.nanmedian(value.where(small)))
    yield Finding(
        f"Of {counted(int(resting.sum()), 'head')} that give most attention to the first token, "
        f"{count} find a small value there: {ratio:.2f} of the median of other tokens, so that it is "
        f"{percent(float(moved.where(small).mean()))} of what they move",
        f"at least {percent(MOST_WEIGHT)} of the attention and a norm below {SHORT:g} of the median, "
        "mean over prompts",
        0.45,
        "value_norms",
        layer,
        head,
        variable="first_value",
    )


VIEW = View(
    "value_norms",
    "Values that attention moves",
    "Norms of values: the first token's over the median, the attention to it, its share of what "
    "attention moves, and how far values add up or cancel. A token that is looked at moves nothing "
    "where its value is small.",
    findings=_findings,
    compared=("first_value", "first_weight", "first_moved", "output"),
)
