"""The view of the group `positions`: its figures, their captions, and findings.

`position_figures` draws one run, `positions_beside` several, `ranges` the ranges of heads, and
`explorer` has the explorer. This module knows nothing about how positions were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    Chart,
    CustomFigure,
    Finding,
    Heads,
    checkpoint_name,
    counted,
    figures_of_heads,
    group,
    layer_scheme,
    learned_layers,
    over,
    over_prompts,
    shared_rows,
    strongest_head,
)
from repo_interp.plots.view import Beside, View
from repo_interp.plots.views.explorer import EXPLORER
from repo_interp.plots.views.position_figures import (
    LINES,
    MOST_DOTS,
    position_grid,
    position_lines,
)
from repo_interp.plots.views.positions_beside import charts_beside
from repo_interp.plots.views.ranges import (
    has_positions,
    heads_to_show,
    range_chart,
    range_table,
)


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    if not has_positions(run):
        return
    positions = group(run, "positions")
    first = int(positions["prompt"].values[0])
    draw = partial(position_lines, run, prompt=first)
    caption = f"the position that each token of prompt {first} gets, over its index (RePo, fig. 8)."
    yield from figures_of_heads("positions", draw, heads_to_show(run)[:LINES], caption, live=True)
    yield CustomFigure(
        "positions_of_all_heads",
        partial(position_grid, run, first),
        caption=f"Positions of the tokens of prompt {first} in every head, each on its own scale; the "
        "number is their range.",
        live=True,
    )
    yield range_chart(run)
    for name in ("position_range", "negative_share", "linear_r2"):
        if name in positions:  # runs of before lack some
            yield Heads(over_prompts(positions[name]))


def _differ_from_index(run: xr.DataTree) -> bool:
    """Whether any head's range is another than that of the token index."""
    positions = group(run, "positions")
    # The token index of n tokens spans n - 1.
    beyond = positions["position_range"] - (positions["token_count"] - 1)
    return bool((np.abs(beyond.where(np.isfinite(beyond), 0)) > 0).any())


def _lead(run: xr.DataTree) -> str:
    """Describe the marks for prompts of the length in `run`.

    Tokens are dots; with many tokens, a line connects the extremes within a pixel.
    """
    if not has_positions(run):
        positions = group(run, "positions")
        named = ", ".join(
            dict.fromkeys(layer_scheme(positions, layer) for layer in positions["layer"].values)
        )
        return (
            f"No layer gives tokens positions ({named}): heads differ by their scores, "
            "and by where they look."
        )
    if not _differ_from_index(run):
        return (
            "Every head places every token at its index in the prompt: heads differ by "
            "their scores, and by where they look, alone."
        )
    drawn = "Every dot is a token: across"
    if int(group(run, "positions")["token_count"].max()) > MOST_DOTS:
        drawn = "A line joins the lowest and the highest tokens of every pixel: across"
    return (
        f"{drawn} its index in the prompt, upward the position that the head gives it. The range of a "
        "head, its largest minus its smallest position, is compared with the context length (RePo, fig. 2)."
    )


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """How far learned positions reach, against the token index of the same prompts."""
    positions = group(run, "positions")
    learned = learned_layers(positions)
    if not learned or not has_positions(run):
        return
    ranges = positions["position_range"].mean("prompt").sel(layer=learned)
    index, middle = float(positions["token_count"].mean()) - 1, float(ranges.median())
    # About the spread of the token index: nothing to report.
    if 0.5 * index < middle < 2 * index:
        return
    layer, head, widest = strongest_head(ranges)
    sentence = (
        f"Over a prompt, learned positions spread over {middle:.2g} in the median of "
        f"{counted(ranges.size, 'head')}{shared_rows(ranges, ranges.notnull())}, at most over {widest:.3g} (L{layer} H{head}); the token "
        f"index spreads over {index:.0f}"
    )
    evidence = f"largest minus smallest position of a prompt, {over(positions)}"
    yield Finding(sentence, evidence, 0.5, "positions", layer, head)


VIEW = View(
    "positions",
    "Positions, head by head",
    _lead,
    _charts,
    tables=lambda run: (range_table(run),) if has_positions(run) else (),
    findings=_findings,
    informative=_differ_from_index,
    describe=lambda run: f"Positions in {checkpoint_name(run)}",
    interactive=EXPLORER,
    compared=("position_range",),
    by_index=("position_range",),
    not_averaged=("position",),
    beside=Beside(charts_beside),
)
