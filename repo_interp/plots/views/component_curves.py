"""Logits and their rotary components over the distance of two tokens (HoPE fig. 2, 3a, 3c, 6, 8).

    m(t) = sum_r C_r(t)      mean over pairs at distance t; in units of q . k, without 1 / sqrt(d_head)

Activated components (pi/L < theta < 2 pi/L) are orange, lower ones blue, higher ones grey; the
training length L is a dashed line, and all beyond it is shaded. Knows labelled arrays; knows
nothing about how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.plots.marks import legend_below, note
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, style

BAND_COLOURS: Mapping[str, str] = {"activated": "#D55E00", "low": "#0072B2", "high": "#A8A8A8"}
"""Orange, blue and grey that colour-blind eyes keep apart."""
BAND_NAMES: Mapping[str, str] = {
    "activated": "activated",
    "low": "lower frequency",
    "high": "higher frequency",
}
DISTANCE = "distance (tokens)"
FEW_PAIRS = 16
"""Of a sequence of n tokens, distances above n (1 - 1/16) have fewer than n/16 pairs: they alone
may make the ends of a U.
"""
FEW_COLOUR, FEW_SHADE = "#F0E442", 0.35
MOST_CURVES = 8
"""Components of the highest band that have a curve; more are drawn as their range."""
RANGE = "higher frequencies, their range"
NAME_HEIGHT = 0.07
"""Share of a panel's height that the name of a curve takes."""
FEW_HANDLE = Patch(facecolor=FEW_COLOUR, alpha=FEW_SHADE, label="few pairs")


def band_of(components: xr.Dataset) -> np.ndarray:
    """Name the band of every component.

    Args:
        components: `activated` and `low_frequency` [component].

    Returns:
        Names [component].
    """
    return np.where(
        components["activated"].values,
        "activated",
        np.where(components["low_frequency"].values, "low", "high"),
    )


@style()
def component_curves(components: xr.Dataset, title: str = "") -> PaperFigure:
    """Draw components by distance, and below the sums of the bands (HoPE fig. 3a).

    A curve is drawn from its mean over distances, since curves lie far apart. Distance 0 is not
    drawn; the last 1 / `FEW_PAIRS` of the distances, which few pairs have, are shaded and do not
    set the scale: only these few pairs support the values there.

    Args:
        components: `component_by_distance` [component, distance], `activated` and `low_frequency`
            [component].
        title: Title of the figure.

    Returns:
        The figure.
    """
    curves = (
        components["component_by_distance"]
        .transpose("component", "distance")
        .sel(distance=slice(1, None))
    )
    bands, distance = band_of(components), curves["distance"].values
    ranged = np.count_nonzero(bands == "high") > MOST_CURVES
    swing = curves - curves.mean("distance")
    figure = paper_figure(COLUMN_WIDTH, 3.3)
    above, below = figure.subplots(2, 1, sharex=True)
    for band in ("high", "low", "activated"):
        of_band = np.flatnonzero(bands == band)
        if band == "high" and ranged:  # a tangle in which none can be followed
            ends = swing.values[of_band].min(0), swing.values[of_band].max(0)
            shade = {"color": BAND_COLOURS[band], "alpha": 0.35, "linewidth": 0}
            above.fill_between(distance, *ends, **shade, gid=f"range {band}")
            continue
        for place in of_band:
            above.plot(
                distance,
                swing.values[place],
                **line_of(band),
                gid=f"component {curves['component'].values[place]}",
            )
    length = int(distance[-1]) + 1
    edge = length - length // FEW_PAIRS
    total = swing.sum("component").values
    below.plot(distance, total, color="#000000", linewidth=1.3, gid="sum")
    for band in ("low", "activated"):
        if (bands == band).any():
            below.plot(
                distance,
                swing.values[bands == band].sum(0),
                **line_of(band) | {"linewidth": 1.3},
                gid=f"sum {band}",
            )
    above.set_title(f"{title + ': ' if title else ''}each component, from its mean")
    below.set(title="their sum, and the sum of a band", xlabel=DISTANCE)
    for ax in (above, below):
        ax.set_ylabel("logit − mean (q·k)")
        ax.grid(axis="y")
        ax.margins(x=0.01)
        many = np.concatenate(
            [np.asarray(line.get_ydata())[distance < edge] for line in ax.get_lines()]
            + ([swing.values[:, distance < edge].ravel()] if ax is above else [])
        )
        margin = 0.05 * np.ptp(many)
        ax.set_ylim(many.min() - margin, many.max() + margin)
        shade_few(ax, length, "few pairs")
    _name_activated(above, swing, bands)
    legend_below(
        figure,
        [
            Line2D([], [], color="#000000", linewidth=1.3, label="all"),
            *band_lines(bands if not ranged else bands[bands != "high"]),
            *([Patch(color=BAND_COLOURS["high"], alpha=0.35, label=RANGE)] if ranged else []),
            FEW_HANDLE,
        ],
    )
    return figure


def shade_few(ax: Axes, length: int, gid: str) -> None:
    """Shade the distances that few pairs of a sequence have.

    Args:
        ax: Axes to draw on.
        length: Length of the sequence in tokens.
        gid: Identifier of the shade in an SVG.
    """
    ax.axvspan(
        length - length // FEW_PAIRS,
        length,
        color=FEW_COLOUR,
        alpha=FEW_SHADE,
        linewidth=0,
        zorder=0,
        gid=gid,
    )


def _name_activated(ax: Axes, swing: xr.DataArray, bands: np.ndarray) -> None:
    """Name curves at their right ends.

    Curves that end too close to others share a name.
    """
    last = max(1, swing.sizes["distance"] // 16)
    ends = {
        int(place): float(swing.values[place, -last:].mean())
        for place in np.flatnonzero(bands == "activated")
    }
    low, high = ax.get_ylim()
    groups: list[list[int]] = []
    for place in sorted(ends, key=lambda place: ends[place]):
        close = groups and ends[place] - ends[groups[-1][-1]] < NAME_HEIGHT * (high - low)
        groups[-1].append(place) if close else groups.append([place])
    for group in groups:
        numbers = [str(swing["component"].values[place]) for place in sorted(group)]
        name = f"r = {', '.join(numbers) if len(numbers) < 3 else f'{numbers[0]} … {numbers[-1]}'}"
        end = (
            float(swing["distance"][-1]),
            float(np.clip(np.mean([ends[place] for place in group]), low, high)),
        )
        note(ax, name, end, (2, 0), 6, color=BAND_COLOURS["activated"], annotation_clip=False)


def line_of(band: str) -> dict[str, Any]:
    """Return the look of the curve of a band.

    Args:
        band: Name of the band.

    Returns:
        Options of matplotlib.
    """
    order = {"high": 1, "low": 2, "activated": 3}
    thin = {"linewidth": 0.6, "alpha": 0.5} if band == "high" else {"linewidth": 1.0}
    return {"color": BAND_COLOURS[band], "zorder": order[band], **thin}


def band_lines(bands: np.ndarray) -> list[Line2D]:
    """Make legend entries of bands.

    Args:
        bands: Bands of the components that are drawn.

    Returns:
        One entry per band among them.
    """
    present = [band for band in BAND_COLOURS if band in bands]
    return [
        Line2D([], [], color=BAND_COLOURS[band], linewidth=1.4, label=BAND_NAMES[band])
        for band in present
    ]
