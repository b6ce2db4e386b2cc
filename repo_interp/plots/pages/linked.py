"""Two runs side by side over one prompt: a choice in one is made in the other.

The first section of a comparison's page.

A side has its map of heads, the text, and the charts of the chosen head and token. Of several runs
the first and the last, such as of a training. This module knows how a side of the page is put
together; knows nothing about the content of the explorer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr

from repo_interp.plots.lacking import reading
from repo_interp.plots.marks import HeadRows, Heads, NextTokens, evenly_spaced, runs_of
from repo_interp.plots.pages.frame import template
from repo_interp.plots.view import Interactive, PageOptions
from repo_interp.plots.view_catalogue import views_of
from repo_interp.runtime.failures import until_failure

SIDES = 2
"""Runs that are shown side by side."""
BUDGET = 8_000_000
"""Most bytes of positions of one side."""


@dataclass(frozen=True)
class Side:
    """The HTML of one side and its interactive part."""

    html: str
    interactive: Interactive


def linked_sides(comparison: xr.DataTree, failures: list[str] | None) -> list[Side]:
    """Make both sides of a page that compares the prompts of two runs.

    Args:
        comparison: Tree with an axis `run`.
        failures: Gets one line per part that cannot be made. None: the error is raised.

    Returns:
        The sides; none if the prompts differ, or if no two runs describe their prompts.
    """
    if comparison.attrs.get("same_prompts") != "yes":
        return []
    runs = runs_of(comparison)
    sides: list[Side] = []
    for number, name in enumerate(evenly_spaced(runs.names, SIDES)):
        side = partial(_side, _run_of(comparison, name), number, runs.title(name))
        sides += until_failure(side, f"{runs.title(name)} side by side", failures)
    # A single side has nothing to be compared with.
    return sides if len(sides) == SIDES else []


def _side(run: xr.DataTree, number: int, title: str) -> list[Side]:
    """One side; nothing if the run does not describe its prompts."""
    views = views_of(run)
    explored = (
        (view, view.interactive) for view in views if "token_count" in run[view.group].data_vars
    )
    group, interactive = next(
        ((view.group, part) for view, part in explored if part is not None), ("", None)
    )
    with reading(run, group):
        data, notes = (
            (None, ()) if interactive is None else interactive.data(run, PageOptions(budget=BUDGET))
        )
    if interactive is None or data is None:
        return []
    # A view that cannot draw this run is left out, and its line dropped: the side works without it.
    charts = [one for view in views for one in until_failure(partial(view.charts, run), "", [])]
    maps, of_token = (
        [one.data() for one in charts if isinstance(one, kinds)]
        for kinds in (Heads, HeadRows | NextTokens)
    )
    content = {"maps": maps, "charts": of_token, "data": data}
    return [
        Side(template().side_of(number, title, group, interactive, notes, content), interactive)
    ]


def _run_of(comparison: xr.DataTree, name: str) -> xr.DataTree:
    """Select one run of the comparison as it was before.

    It has the parts that are shared with other runs; layers and heads of only other runs are left
    out.
    """
    groups = {}
    for measure, node in comparison.children.items():
        group = node.to_dataset().sel(run=name, drop=True)
        # Runs were joined over all labels: a layer that this run lacks has an empty scheme,
        # a head that it lacks has NaN everywhere.
        if "layer" in group.dims and "scheme" in group.coords:
            group = group.isel(layer=np.flatnonzero(group["scheme"].values != ""))
        having = [
            array.notnull().any([axis for axis in array.dims if axis != "head"]).values
            for array in group.data_vars.values()
            if "head" in array.dims and array.dtype.kind == "f"
        ]
        if having:
            group = group.isel(head=np.flatnonzero(np.any(having, axis=0)))
        # A measure that only other runs have
        if all(group.sizes.values()):
            groups[f"/{measure}"] = group
    run = xr.DataTree.from_dict({"/": xr.Dataset(), **groups})
    run.attrs = {"checkpoint": name} | {
        key: comparison.attrs[key] for key in ("main_span",) if key in comparison.attrs
    }
    return run
