"""Where tokens look: the strongest keys of the chosen head and token; group `attention_rows` of a run.

A row is shown in the page, over the prompt's text and as bars. Knows nothing about how rows are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import xarray as xr

from repo_interp.plots.marks.head_charts import HeadChart, HeadRows
from repo_interp.plots.marks.reading import group, has_groups
from repo_interp.plots.view import View


def _head_charts(run: xr.DataTree) -> Sequence[HeadChart]:
    """The rows of every head over the first prompt."""
    rows = group(run, "attention_rows")
    prompt = int(group(run, "positions")["prompt"].values[0]) if has_groups(run, ["positions"]) else 0
    return [HeadRows("Attention of the chosen token", rows["weight"], rows["key"], prompt)]


VIEW = View(
    "attention_rows",
    "Where a token looks",
    "Attention weights, after the softmax, from a token of the first prompt to the keys it looks at most: choose head and token above.",
    head_charts=_head_charts,
    compared=(),
    not_averaged=("weight", "key"),
)
