"""Attention from position alone, and gates, of one head on one text (CoPE fig. 4 and 6): queries by keys, separators marked.

Draws `position_attention [query, key]`, `gate_by_token [key]` and `separator [key]` (1 where a token separates) of the measure `gates`,
with `text [key]`. Knows nothing about how they came about.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D

from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import COLUMN_WIDTH, SCHEME_COLOURS, PaperFigure, darker, paper_figure, style

_MAP = LinearSegmentedColormap.from_list("attention", ["#FFFFFF", "#A5E5BF", "#1F9A52", "#06391B"])
_SEPARATOR = "#D55E00"


def position_attention_and_gates(data: xr.Dataset, title: str) -> PaperFigure:
    """The map of one head above the gates of its keys, on one axis of keys."""
    with style():
        figure = paper_figure(COLUMN_WIDTH, 4.3)
        attention, gates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        draw_position_attention(attention, data)
        draw_gates(gates, data)
        attention.set_title(title)
        legend_below(figure, [Line2D([], [], linestyle="none", marker="+", color=_SEPARATOR, markersize=4, label="separator")])
    return figure


def draw_position_attention(ax: Axes, data: xr.Dataset) -> Axes:
    """Draw `position_attention` on `ax`: keys to the right, queries downwards; separators on the diagonal."""
    values = data["position_attention"].transpose("query", "key").values.astype(float)
    shown = np.where(np.tri(*values.shape, dtype=bool), values, np.nan)
    image = ax.imshow(shown, cmap=_MAP, vmin=0, vmax=1, aspect="auto", interpolation="nearest", rasterized=True)
    places = separators(data)
    ax.plot(places, places, "+", color=_SEPARATOR, markersize=3, markeredgewidth=0.6, gid="separators")
    ax.set_ylabel("query (token)")
    figure = ax.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label("attention from position alone\n(largest of a row: 1)")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return ax


def draw_gates(ax: Axes, data: xr.Dataset) -> Axes:
    """Draw `gate_by_token` on `ax`, a bar a token; those of separators in their colour."""
    values = data["gate_by_token"].values.astype(float)
    tokens = np.arange(len(values))
    here = np.zeros(len(values), dtype=bool)
    here[separators(data)] = True
    for chosen, colour, name in ((~here, darker(SCHEME_COLOURS["cope"], 0.75), "tokens"), (here, _SEPARATOR, "separators")):
        ax.vlines(tokens[chosen], 0, values[chosen], color=colour, linewidth=max(0.4, 160 / len(values)), gid=f"gates {name}")
    ax.plot(tokens[here], np.full(int(here.sum()), 1.05), "+", color=_SEPARATOR, markersize=3, markeredgewidth=0.6, clip_on=False)
    ax.set(xlabel="key (token)", ylabel="mean gate", ylim=(0, 1.1), xlim=(-0.5, len(values) - 0.5))
    ax.grid(axis="y")
    return ax


def separators(data: xr.Dataset) -> np.ndarray:
    """Tokens that separate."""
    return np.flatnonzero(data["separator"].values == 1)
