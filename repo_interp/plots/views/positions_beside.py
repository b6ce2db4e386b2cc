"""Positions of several runs over their first prompt: run below run, and the orders of two compared.

    agreement = rank correlation of z_i in two runs over the tokens i of the prompt, by head

This module knows nothing about how positions were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr
from scipy.stats import rankdata

from repo_interp.errors import one_line
from repo_interp.plots.marks import (
    BESIDE,
    Chart,
    CustomFigure,
    Panels,
    evenly_spaced,
    group,
    learned_schemes,
    legend_below,
    lone_entry,
    name_columns,
    ordered_spans,
    over_prompts,
    prompt_tokens,
    ranked_heads,
    runs_of,
    runs_with_values,
    shade_spans,
    span_handles,
)
from repo_interp.plots.marks.runs import LONGEST
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    style,
)
from repo_interp.plots.views.position_figures import (
    LINES,
    draw_positions,
    span_names,
)


def charts_beside(tree: xr.DataTree) -> Iterator[Chart]:
    """Choose the charts of several runs.

    Args:
        tree: Tree with an axis `run`.

    Yields:
        Positions run below run, and for two runs how alike heads order tokens.
    """
    positions = group(tree, "positions")
    known = {"position", "token_count"} <= set(positions) and tree.attrs.get(
        "same_prompts"
    ) == "yes"
    if known and bool(positions["position_range"].notnull().any()):
        tokens = int(positions["token_count"].isel(prompt=0).max())
        caption = (
            f"Positions of the {tokens} tokens of the first prompt, in the heads "
            "whose positions spread most."
        )
        yield CustomFigure("positions_by_token", partial(positions_beside, tree), caption=caption)
        if positions.sizes["run"] == 2:
            agreement = position_agreement(tree)
            if bool(agreement.notnull().any()):
                title = str(agreement.attrs["long_name"])
                look = {"cmap": "PuOr", "vmin": -1, "vmax": 1}
                yield Panels(
                    "position_agreement",
                    {title: agreement},
                    look=look,
                    bar={},
                    pattern=".2f",
                    caption="Over tokens of the first prompt; 1: a head orders them alike in both.",
                )


def position_agreement(tree: xr.DataTree) -> xr.DataArray:
    """Correlate the orders in which two runs place the tokens of their first prompt.

    Args:
        tree: Tree with an axis `run` of two runs.

    Returns:
        Rank correlations [layer, head]; NaN where a run learns no positions, or a head gives all
        tokens one.
    """
    positions = group(tree, "positions")
    names = [one_line(name, LONGEST) for name in runs_of(tree).names]
    tokens = int(positions["token_count"].isel(prompt=0).min())
    first = positions["position"].isel(prompt=0, drop=True).isel(token=slice(tokens))
    ranks = xr.apply_ufunc(
        rankdata,
        first,
        input_core_dims=[["token"]],
        output_core_dims=[["token"]],
        kwargs={"axis": -1},
    )
    one, other = (ranks.isel(run=place, drop=True).reset_coords(drop=True) for place in (0, 1))
    learned = positions["scheme"].isin(list(learned_schemes(positions))).all("run")
    with np.errstate(invalid="ignore", divide="ignore"):  # of equal positions
        found = xr.corr(one, other, dim="token")
    known = learned & first.notnull().all(("run", "token"))
    return (
        found.where(known.reset_coords(drop=True))
        .assign_coords(scheme=positions["scheme"].isel(run=0, drop=True))
        .assign_attrs(long_name=f"rank correlation of positions\n{' and '.join(names)}", units="1")
        .rename("position_agreement")
    )


@style()
def positions_beside(tree: xr.DataTree) -> PaperFigure:
    """Draw the positions of several runs over their first prompt, run below run.

    The heads have the largest spread of learned positions, with one head per shared row. All panels
    share one range.

    Args:
        tree: Tree with an axis `run`.

    Returns:
        The figure.
    """
    positions, runs = group(tree, "positions"), runs_of(tree)
    ranges = over_prompts(positions["position_range"])
    learned = positions["scheme"].isin(list(learned_schemes(positions)))
    # Chosen over all runs, so that every row shows the same heads.
    ranked = ranked_heads((ranges.where(learned) if learned.any() else ranges).mean("run"))
    # One head per shared row of positions
    rows: dict[tuple[int, bytes], tuple[int, int]] = {}
    for layer, head in ranked:
        values = positions["position"].isel(prompt=0).sel(layer=layer, head=head).values
        rows.setdefault((layer, values.tobytes()), (layer, head))
    heads = [*rows.values()][:LINES]
    shown = evenly_spaced(runs_with_values(positions["position"]), BESIDE)
    tokens = prompt_tokens(positions.sel(run=shown[0]), int(positions["prompt"].values[0]))
    names = ordered_spans(span_names(positions))
    figure = paper_figure(PAGE_WIDTH, 0.5 + 1.15 * len(shown))
    axes = figure.subplots(len(shown), len(heads), sharex=True, squeeze=False)
    for place, (row, name) in enumerate(zip(axes, shown, strict=True)):
        for ax, (layer, head) in zip(row, heads, strict=True):
            of_run = positions.sel(run=name, layer=layer, head=head).isel(prompt=0)
            colour = (
                scheme_colour(str(of_run["scheme"].values))
                if runs.steps is None
                else runs.looks[name]["color"]
            )
            draw_positions(ax, of_run["position"].values[: tokens.count], colour)
            shade_spans(ax, tokens.top_spans, names)
            ax.set_title(f"layer {layer}, head {head}" if place == 0 else "")
            ax.locator_params(axis="y", nbins=4)
        row[0].set_ylabel(runs.title(name))
    name_columns(axes[-1].tolist(), len(heads), "token index")
    handles = span_handles(tokens.top_spans, names)
    only = lone_entry(handles, "shaded")
    figure.supylabel("position (each panel its own range)")
    if only:
        figure.suptitle(only, x=0.01, ha="left")
    legend_below(figure, handles)
    return figure
