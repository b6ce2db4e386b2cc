"""Two runs over the same prompt side by side in the page: what is chosen in one is chosen in the other.

Each has its map of heads, the text, and the charts of the chosen head and token. Of several runs the first and the last, such as of a
training. Knows how a side of the page is put together; knows nothing about what the explorer shows.
"""

from __future__ import annotations

from functools import partial
from html import escape
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.comparison.looks import Runs, spread
from repo_interp.failures import until_failure
from repo_interp.plots.catalogue import view_of, views_of
from repo_interp.plots.pages.frame import json_script, page_scripts
from repo_interp.plots.view import Interactive, PageOptions

SIDES = 2
"""Runs that stand side by side."""
BUDGET = 8_000_000
"""Bytes of positions of one side."""
_EXPLORED = ("positions", "attention_rows")
"""Groups with an explorer, the first that is there."""
_CHARTS = ("attention_rows", "predictions")
"""Groups whose charts of the chosen head and token stand on each side."""


def linked_section(comparison: xr.DataTree, runs: Runs, failures: list[str]) -> tuple[str, list[str]]:
    """The section in HTML and the scripts it needs; "" and none where the prompts differ, or no two runs say what they are."""
    if comparison.attrs.get("same_prompts") != "yes":
        return "", []
    sides, used = [], []
    for number, name in enumerate(spread(runs.names, SIDES)):
        run = _run_of(comparison, str(name))
        made = until_failure(
            partial(_side, run, number, runs.title(str(name))), f"{runs.title(str(name))} side by side", failures
        )
        for html, interactive in made:
            sides.append(html)
            used.append(interactive)
    if len(sides) < SIDES:
        return "", []
    section = (
        '<section id="linked" aria-labelledby="linked-title"><h2 id="linked-title">Side by side over one prompt</h2>'
        "<p>Choose a head, a prompt or a token on one side: the other follows. Heads of the same number have nothing in common but their "
        f'place.</p><div class="sides">{"".join(sides)}</div></section>'
    )
    return section, page_scripts(used, ["head_charts.js"])


def _side(run: xr.DataTree, number: int, title: str) -> list[tuple[str, Interactive]]:
    """The HTML of one side and its interactive part; nothing where the run does not say what its prompts are."""
    group = next((name for name in _EXPLORED if name in run.children and "token_count" in run[name].data_vars), None)
    view = None if group is None else view_of(group)
    if group is None or view is None or view.interactive is None:
        return []
    data, notes = view.interactive.data(run, PageOptions(budget=BUDGET))
    if data is None:
        return []
    maps: list[Any] = [one.data() for shown in views_of(run) for one in until_failure(partial(shown.head_maps, run), "", [])]
    drawn = [view_of(name) for name in _CHARTS if name in run.children]
    charts = [chart.data() for shown in drawn if shown for chart in until_failure(partial(shown.head_charts, run), "", [])]
    side = f"side-{number}"
    markup = view.interactive.markup.read_text(encoding="utf-8").replace('id="', f'id="{side}-')
    html = (
        f'<section id="{side}" data-side="{side}" aria-label="{escape(title)}"><h2>{escape(title)}</h2>'
        f'{"".join(f"""<p class="left-out">{escape(note)}</p>""" for note in notes)}{markup}'
        '<div class="head-charts" hidden></div>'
        f'<script type="application/json" class="section-data" data-section="{group}">'
        f"{json_script({'maps': maps, 'charts': charts, 'data': data})}</script></section>"
    )
    return [(html, view.interactive)]


def _run_of(comparison: xr.DataTree, name: str) -> xr.DataTree:
    """One run of the comparison as it was before, with what others have too: without layers and heads that only they have."""
    groups = {}
    for measure, node in comparison.children.items():
        group = node.to_dataset().sel(run=name, drop=True)
        if "layer" in group.dims and "scheme" in group.coords:
            group = group.isel(layer=np.flatnonzero(group["scheme"].values != ""))
        if "head" in group.dims:
            having = [
                array.notnull().any([axis for axis in array.dims if axis != "head"]).values
                for array in group.data_vars.values()
                if "head" in array.dims and array.dtype.kind == "f"
            ]
            group = group.isel(head=np.flatnonzero(np.any(having, axis=0))) if having else group
        groups[f"/{measure}"] = group
    run = xr.DataTree.from_dict({"/": xr.Dataset(), **groups})
    run.attrs = {"checkpoint": name} | {key: comparison.attrs[key] for key in ("main_span",) if key in comparison.attrs}
    return run
