"""The page's pictures of a fit: a head's map, the sum of its axes, and the axes (Position Generalization fig. 2, 3), as plotly figures.

Of the head with the median r among those that have maps. Numbers keep six significant digits. Knows runs and plotly's language; knows
nothing about how fits are made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.drawing import envelope
from repo_interp.plots.marks.reading import group, has_groups
from repo_interp.plots.views import disentanglement as fits
from repo_interp.plots.views.disentanglement_figures import drawn_heads

Captioned = tuple[tuple[str, dict[str, Any]], ...]
MAPPED = ("three_axis", "fake_distance")
"""Groups that have pictures."""
POINTS = 1024
"""Points of an axis, at most about twice."""


def map_charts(run: xr.DataTree, name: str) -> Captioned:
    """Charts of group `name`, "three_axis" or "fake_distance"; none where the run has no maps or no axes."""
    if not has_groups(run, ["maps"]):
        return ()
    dataset, maps = group(run, name), group(run, "maps")
    first = "distance_axis" if name == "three_axis" else "position_axis"
    heads = drawn_heads(run, dataset) if first in dataset else []
    if not heads:
        return ()
    layer, head = heads[:2][-1]
    fit, shown = (part.sel(layer=layer, head=head) for part in (dataset, maps))
    where = f"layer {layer}, head {head}, first prompt"
    if name == "three_axis":
        values = shown["logit_map"].transpose("query_block", "key_block")
        axes = {axis: fit[f"{axis}_axis"].values for axis in ("distance", "query", "key")}
        edges = fits.edges_of(values["key_block"].values, axes["query"].size)
        rebuilt = fits.additive_means(axes["distance"], axes["query"], axes["key"], edges)
        names = {axis: f"{axis} axis" for axis in axes}
        return (
            (f"Logits of {where}", _map(values.values, values["query_block"].values, values["key_block"].values, "query")),
            (f"The sum of its three axes, {where}", _map(rebuilt, edges[:-1], edges[:-1], "query", values.values)),
            (f"The three axes, {where}; up to a level and a common slope", _lines(axes, names, "distance, or token")),
        )
    values = shown["fake_map"].transpose("distance_block", "key_block")
    rows = values["distance_block"].values
    return (
        (f"Fake-distance logits of {where}, last query", _map(values.values, rows, values["key_block"].values, "fake distance")),
    )


def _map(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, down: str, like: np.ndarray | None = None) -> dict[str, Any]:
    low, high = np.nanpercentile(values if like is None else like, fits.SHOWN)
    trace = {
        "type": "heatmap",
        "x": columns.tolist(),
        "y": rows.tolist(),
        "z": [_numbers(row) for row in values],
        "zmin": float(low),
        "zmax": float(high),
        "colorscale": "Viridis",
        "hovertemplate": f"key %{{x}}, {down} %{{y}}: %{{z}}<extra></extra>",
        "colorbar": {"title": {"text": "logits"}},
    }
    axes = {
        "xaxis": {"title": {"text": "key (token)"}},
        "yaxis": {"title": {"text": f"{down} (token)" if down == "query" else f"{down} (tokens)"}, "autorange": "reversed"},
    }
    return {"data": [trace], "layout": {"hovermode": "closest", **axes}}


def _lines(axes: dict[str, np.ndarray], names: dict[str, str], across: str) -> dict[str, Any]:
    traces = []
    for axis, values in axes.items():
        kept = envelope(values, POINTS)
        traces.append({"type": "scatter", "mode": "lines", "name": names[axis], "x": kept.tolist(), "y": _numbers(values[kept])})
    titles = {"xaxis": {"title": {"text": f"{across} (tokens)"}}, "yaxis": {"title": {"text": "logits"}}}
    return {"data": traces, "layout": {"hovermode": "closest", **titles}}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float)]
