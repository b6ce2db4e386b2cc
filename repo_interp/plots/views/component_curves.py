"""Logits and their rotary components over the distance of two tokens (HoPE fig. 2, 3a, 3c, 6, 8).

    m(t) = sum_r C_r(t)      mean over pairs at distance t; in units of q . k, without 1 / sqrt(d_head)

Activated components (pi/L < theta < 2 pi/L) are orange, lower ones blue, higher ones grey; the training length L is a dashed line,
and what lies beyond it is shaded. Knows labelled arrays; knows nothing about how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.plots.marks.drawing import legend_below, note
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, style

BAND_COLOURS: Mapping[str, str] = {"activated": "#D55E00", "low": "#0072B2", "high": "#A8A8A8"}
"""Orange, blue and grey that colour-blind eyes keep apart."""
BAND_NAMES: Mapping[str, str] = {"activated": "activated", "low": "lower frequency", "high": "higher frequency"}
DISTANCE = "distance (tokens)"
FEW_PAIRS = 16
"""Of a sequence of n tokens, distances above n (1 - 1/16) have fewer than n/16 pairs: they alone may make the ends of a U."""
FEW_COLOUR, FEW_SHADE = "#F0E442", 0.35
MOST_ROWS = 6
"""Layers that get a row each beyond the training length."""
NAME_HEIGHT = 0.07
"""Share of a panel's height that the name of a curve takes."""
TRAINED: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.8, "linestyle": (0, (4, 2))}
TRAINED_HANDLE = Line2D([], [], **TRAINED, label="training length L")
FEW_HANDLE = Patch(facecolor=FEW_COLOUR, alpha=FEW_SHADE, label="few pairs")


def band_of(components: xr.Dataset) -> np.ndarray:
    """The band's name of every component, from `activated` and `low_frequency` [component]."""
    return np.where(components["activated"].values, "activated", np.where(components["low_frequency"].values, "low", "high"))


@style()
def component_curves(components: xr.Dataset, title: str = "") -> PaperFigure:
    """All components by distance, coloured by band, and below their sum and that of the bands (HoPE fig. 3a).

    `components` holds `component_by_distance` [component, distance], `activated` and `low_frequency` [component]. Every curve is
    drawn from its own mean over distances, since those lie far apart. Distance 0 is not drawn; the last 1 / `FEW_PAIRS` of the
    distances, which few pairs have, are shaded and do not set the scale: nothing but these few pairs supports what is seen there alone.
    """
    curves = components["component_by_distance"].transpose("component", "distance").sel(distance=slice(1, None))
    bands, distance = band_of(components), curves["distance"].values
    swing = curves - curves.mean("distance")
    figure = paper_figure(COLUMN_WIDTH, 3.3)
    above, below = figure.subplots(2, 1, sharex=True)
    for band in ("high", "low", "activated"):
        for place in np.flatnonzero(bands == band):
            above.plot(distance, swing.values[place], **_line(band), gid=f"component {curves['component'].values[place]}")
    length = int(distance[-1]) + 1
    edge = length - length // FEW_PAIRS
    total = swing.sum("component").values
    below.plot(distance, total, color="#000000", linewidth=1.3, gid="sum")
    for band in ("low", "activated"):
        if (bands == band).any():
            below.plot(distance, swing.values[bands == band].sum(0), **_line(band) | {"linewidth": 1.3}, gid=f"sum {band}")
    above.set_title(f"{title + ': ' if title else ''}each component, from its mean")
    below.set(title="their sum, and the sum of a band", xlabel=DISTANCE)
    for ax in (above, below):
        ax.set_ylabel("logit − mean (q·k)")
        ax.grid(axis="y")
        ax.margins(x=0.01)
        many = np.concatenate([np.asarray(line.get_ydata())[distance < edge] for line in ax.get_lines()])
        margin = 0.05 * np.ptp(many)
        ax.set_ylim(many.min() - margin, many.max() + margin)
        shade_few(ax, length, "few pairs")
    _name_activated(above, swing, bands)
    legend_below(figure, [Line2D([], [], color="#000000", linewidth=1.3, label="all"), *_band_lines(bands), FEW_HANDLE])
    return figure


@style()
def beyond_training_length(components: xr.Dataset, training_length: int) -> PaperFigure:
    """The first layer's components and the mean logit of every layer beyond the training length, a row each (HoPE fig. 3c).

    `components` holds `component_by_distance` [component, distance], of each layer or of the first, `logit_by_distance`
    [layer, distance], `activated` and `low_frequency` [component]. Drawn are the activated components, or the lower ones where none is
    activated, each in units of the range that it had within the training length, and up to `MOST_ROWS` layers, evenly chosen, each on a
    scale of its own. Curves are means over L / 16 neighbouring distances.
    """
    smooth = components[["component_by_distance", "logit_by_distance"]].isel(distance=slice(1, None))
    smooth = smooth.rolling(distance=max(1, training_length // 16), center=True).mean().dropna("distance")
    curves = smooth["component_by_distance"]
    curves = (curves.isel(layer=0) if "layer" in curves.dims else curves).transpose("component", "distance")
    bands, distance = band_of(components), curves["distance"].values
    band = "activated" if "activated" in bands else "low"
    logits = smooth["logit_by_distance"].transpose("layer", "distance")
    rows = np.unique(np.linspace(0, logits.sizes["layer"] - 1, MOST_ROWS).round().astype(int))
    figure = paper_figure(COLUMN_WIDTH, 1.7 + 0.75 * len(rows))
    top, *below = figure.subplots(1 + len(rows), 1, sharex=True, gridspec_kw={"height_ratios": [1.5, *(1 for _ in rows)]})
    top.axhspan(0, 1, color=BAND_COLOURS[band], alpha=0.10, linewidth=0, zorder=0)
    top.axhline(0.5, color=BAND_COLOURS[band], linewidth=0.6)
    for place in np.flatnonzero(bands == band):
        within = curves.values[place][distance < training_length]
        top.plot(distance, (curves.values[place] - within.min()) / np.ptp(within), **_line(band))
    top.set_ylabel("range within L")
    top.set_title(f"layer {logits['layer'].values[0]}: {BAND_NAMES[band]} components", pad=9)
    for ax, row in zip(below, rows, strict=True):
        ax.plot(distance, logits.values[row], color="#222222", linewidth=1.0, gid=f"layer {logits['layer'].values[row]}")
        ax.set_title(f"layer {logits['layer'].values[row]}: mean logit")
        ax.set_ylabel("q·k")
    below[-1].set_xlabel(DISTANCE)
    for ax in (top, *below):
        shade_beyond(ax, training_length, int(distance[-1]))
    top.text(training_length, 1.01, " beyond L", transform=top.get_xaxis_transform(), ha="left", va="bottom", fontsize=6)
    legend_below(figure, [*_band_lines(np.array([band])), TRAINED_HANDLE])
    return figure


def shade_few(ax: Axes, length: int, gid: str) -> None:
    """Shade the distances that few pairs of a sequence of `length` tokens have."""
    ax.axvspan(length - length // FEW_PAIRS, length, color=FEW_COLOUR, alpha=FEW_SHADE, linewidth=0, zorder=0, gid=gid)


def shade_beyond(ax: Axes, training_length: int, last: int) -> None:
    """Mark the training length, and shade what lies beyond it up to the distance `last`."""
    ax.axvline(training_length, **TRAINED, gid="training length")
    if last > training_length:
        ax.axvspan(training_length, last, color="#222222", alpha=0.05, linewidth=0, zorder=0)
    ax.set_xlim(0, max(last, training_length) * 1.01)
    ax.grid(axis="y")


def _name_activated(ax: Axes, swing: xr.DataArray, bands: np.ndarray) -> None:
    """Each name at the right end of its curve; curves that end too close to each other have one name together."""
    last = max(1, swing.sizes["distance"] // 16)
    ends = {int(place): float(swing.values[place, -last:].mean()) for place in np.flatnonzero(bands == "activated")}
    low, high = ax.get_ylim()
    groups: list[list[int]] = []
    for place in sorted(ends, key=lambda place: ends[place]):
        close = groups and ends[place] - ends[groups[-1][-1]] < NAME_HEIGHT * (high - low)
        groups[-1].append(place) if close else groups.append([place])
    for group in groups:
        numbers = [str(swing["component"].values[place]) for place in sorted(group)]
        name = f"r = {', '.join(numbers) if len(numbers) < 3 else f'{numbers[0]} … {numbers[-1]}'}"
        end = float(swing["distance"][-1]), float(np.clip(np.mean([ends[place] for place in group]), low, high))
        note(ax, name, end, (2, 0), 6, color=BAND_COLOURS["activated"], annotation_clip=False)


def _line(band: str) -> dict[str, Any]:
    order = {"high": 1, "low": 2, "activated": 3}
    thin = {"linewidth": 0.6, "alpha": 0.5} if band == "high" else {"linewidth": 1.0}
    return {"color": BAND_COLOURS[band], "zorder": order[band], **thin}


def _band_lines(bands: np.ndarray) -> list[Line2D]:
    """Legend entries of the bands among `bands`."""
    present = [band for band in BAND_COLOURS if band in bands]
    return [Line2D([], [], color=BAND_COLOURS[band], linewidth=1.4, label=BAND_NAMES[band]) for band in present]
