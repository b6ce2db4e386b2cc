"""What every head scores beside its control: a dot a head over a grey bar, layer by layer; on paper and in the page.

    dot   mean over prompts of the head's score      bar   the same of the control

Heads stand from left to right within their layer. Knows nothing about what is scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.plots.marks.drawing import scheme_swatches, sparse_ticks
from repo_interp.plots.marks.reading import schemes
from repo_interp.plots.style import scheme_colour, scheme_name

CONTROL = "#8A8A8A"


def draw_with_control(ax: Axes, scores: xr.DataArray, control: xr.DataArray) -> Axes:
    """Draw `scores` and `control` [layer, head], shares of 1, on `ax`; layers without scores are left empty and say so."""
    named = schemes(scores)
    values, below = scores.transpose("layer", "head").values, control.transpose("layer", "head").values
    heads = values.shape[1]
    offsets = np.linspace(-0.36, 0.36, heads) if heads > 1 else np.zeros(1)
    half = 0.45 * min(0.28, 0.72 / max(1, heads - 1))
    for place, scheme in enumerate(named.values()):
        kept = np.isfinite(values[place])
        if not kept.any():
            middle = {"ha": "center", "va": "center", "transform": ax.get_xaxis_transform()}
            ax.text(place, 0.5, "none", rotation=90, color=CONTROL, **middle)  # pyright: ignore[reportArgumentType]
            continue
        x = place + offsets[kept]
        ax.hlines(below[place][kept], x - half, x + half, color=CONTROL, linewidth=1.4, gid=f"control {place}")
        ax.vlines(x, below[place][kept], values[place][kept], color=CONTROL, linewidth=0.5, zorder=1)
        ax.plot(x, values[place][kept], "o", color=scheme_colour(scheme), markersize=3.2, markeredgewidth=0, gid=f"heads {place}")
    layers = list(named)
    places = sparse_ticks(layers, 24)
    ax.set_xticks(places, [str(layers[place]) for place in places])
    ax.set(xlabel="layer", xlim=(-0.6, len(layers) - 0.4), ylim=(-0.02, 1.04))
    ax.grid(axis="y")
    scheme_swatches(ax, named, "x")
    return ax


def control_handle(label: str) -> Line2D:
    """Legend entry of the control."""
    return Line2D([], [], color=CONTROL, linewidth=1.4, label=label)


def control_chart(scores: xr.DataArray, controls: Mapping[str, xr.DataArray], name: str) -> dict[str, Any]:
    """`scores` and `controls` [layer, head] of every head as a plotly figure; choosing a head opens it."""
    layers, heads = scores["layer"].values, scores["head"].values
    offsets = np.linspace(-0.36, 0.36, len(heads)) if len(heads) > 1 else np.zeros(1)
    traces: list[dict[str, Any]] = []
    for label, control in controls.items():
        place, head = np.nonzero(np.isfinite(control.transpose("layer", "head").values))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "x": _numbers(place + offsets[head]),
                "y": _numbers(control.transpose("layer", "head").values[place, head]),
                "marker": {"color": CONTROL, "symbol": "line-ew-open", "size": 9},
                "hovertemplate": f"{label}: %{{y}}<extra></extra>",
            }
        )
    values = scores.transpose("layer", "head").values
    named = list(schemes(scores).values())
    for kind in dict.fromkeys(named):
        own = [
            (place, head) for place, scheme in enumerate(named) for head in range(len(heads))
            if scheme == kind and np.isfinite(values[place, head])
        ]  # fmt: skip
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": scheme_name(kind),
                "x": _numbers([place + offsets[head] for place, head in own]),
                "y": _numbers([values[place, head] for place, head in own]),
                "customdata": [[int(layers[place]), int(heads[head])] for place, head in own],
                "marker": {"color": scheme_colour(kind), "size": 7},
                "hovertemplate": "L%{customdata[0]} H%{customdata[1]}: %{y}<extra></extra>",
            }
        )
    ticks = {"tickvals": list(range(len(layers))), "ticktext": [str(layer) for layer in layers]}
    axes = {"xaxis": {"title": {"text": "layer"}, **ticks}, "yaxis": {"title": {"text": name}, "range": [-0.02, 1.04]}}
    return {"data": traces, "layout": {"hovermode": "closest", **axes}}


def _numbers(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float).ravel()]
