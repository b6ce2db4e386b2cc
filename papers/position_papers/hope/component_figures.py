"""Figures of logits by distance and of single rotary components: their shares of the logits'
variance, their values for one pair of tokens, and their curves (HoPE fig. 2, 3, 7).

    VAF = 100 (1 - var(y - C_r) / var(y))      per cent, by component r; r = 0 turns fastest

Bands: activated (pi/L < theta < 2 pi/L) orange, lower blue, higher grey. The functions draw
    labelled arrays, however they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.errors import InputError
from repo_interp.plots.marks import Panels, colour_map
from repo_interp.plots.marks.axis_scales import name_ticks
from repo_interp.plots.marks.drawing import legend_below, note, number
from repo_interp.plots.marks.scores import layout_name
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plots.views.component_bands import (
    BAND_COLOURS,
    BAND_NAMES,
    FEW_PAIRS,
    band_of,
    named_bands,
)

DISTANCE = "distance (tokens)"
FEW_COLOUR, FEW_SHADE = "#F0E442", 0.35
MOST_CURVES = 8
"""Largest number of components of the highest band with curves; more are drawn as their range."""
RANGE = "higher frequencies, their range"
NAME_HEIGHT = 0.07
"""Height of the name of a curve, as a share of the height of the panel."""
FEW_HANDLE = Patch(facecolor=FEW_COLOUR, alpha=FEW_SHADE, label="few pairs")

COMPONENT = "component r (0 turns fastest)"
VAF = "VAF (%)"
LOGIT = "mean logit (q·k)"
_CONTROL: Mapping[str, Any] = {"color": "#8A8A8A", "linewidth": 0.7}
_SUM: Mapping[str, Any] = {"color": "#222222", "linewidth": 1.2}
LONGER = 0.45
"""Opacity of curves that were measured on sequences longer than training."""
ROWS = 6
"""Number of layers with a row in the figure beyond the training length."""
_BEHIND: Mapping[str, Any] = {"linewidth": 0, "zorder": 0}
"""Options of matplotlib for areas behind curves."""
TRAINED: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.8, "linestyle": (0, (4, 2))}
TRAINED_HANDLE = Line2D([], [], **TRAINED, label="training length L")


BESIDE_CONTROLS = 0.15
"""Shift of a bar to the left, in components, which leaves space for the controls."""


@style()
def logit_by_distance(logits: xr.DataArray) -> PaperFigure:
    """Draw the mean logit by distance of several checkpoints, one panel below the other, within and
    beyond their training lengths (HoPE fig. 2, 6, 8).

    `logits` is [checkpoint, weights, length, distance]: the weights are "trained" and any controls,
    the length is that of the sequences in tokens, and values that were not measured are NaN. Its
    coordinates are `scheme` and `training_length` (checkpoint), and `layout` if panels are named by
    layout. Distance 0, a token with itself, is not drawn, because it would set the scale. The last
    1 / `FEW_PAIRS` of the distances of a sequence, which few of its pairs have, are shaded and
    dotted. Raises InputError if there are no trained weights.
    """
    if "trained" not in logits["weights"].values:
        raise InputError("logits by distance need the weights 'trained'")
    names = [str(name) for name in logits["checkpoint"].values]
    figure = paper_figure(COLUMN_WIDTH, 0.45 + 0.95 * len(names))
    axes = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    coordinate = "layout" if "layout" in logits.coords else "scheme"
    schemes = [layout_name(str(layout)) for layout in logits[coordinate].values]
    for ax, name, scheme in zip(axes, names, schemes, strict=True):
        _checkpoint(ax, logits.sel(checkpoint=name))
        ax.set_title(scheme if schemes.count(scheme) == 1 else f"{name}: {scheme}")
    known = logits.sel(weights="trained").notnull().any(("length", "checkpoint")).values
    axes[-1].set(
        xlim=(0, 1.01 * max(1.0, float(logits["distance"].values[known].max()))), xlabel=DISTANCE
    )
    figure.supylabel(LOGIT)
    looks = {"sequences of length L": _SUM}
    if logits.sizes["length"] > 1:
        looks["longer"] = {**_SUM, "alpha": LONGER}
    if logits.sizes["weights"] > 1:
        looks["random weights"] = _CONTROL
    handles = [Line2D([], [], **look, label=label) for label, look in looks.items()]
    legend_below(figure, [*handles, TRAINED_HANDLE, FEW_HANDLE])
    return figure


def _checkpoint(ax: Axes, logits: xr.DataArray) -> None:
    """Draw one panel: the trained curve for every length of sequences, and behind these the curves
    of the controls for the longest measured length.
    """
    colour = scheme_colour(str(logits["scheme"].item()))
    trained, longest = int(logits["training_length"]), 1
    for length in map(int, sorted(logits["length"].values, reverse=True)):
        for weights in sorted(logits["weights"].values, key="trained".__eq__):
            line = (logits.sel(weights=weights, length=length, distance=slice(1, None))).dropna(
                "distance"
            )
            look: Mapping[str, Any] = _CONTROL
            if weights == "trained":
                look = {**_SUM, "color": colour, "alpha": 1.0 if length <= trained else LONGER}
            if not line.size or (look is _CONTROL and longest >= length):
                continue
            edge = length - length // FEW_PAIRS
            many, few = line.sel(distance=slice(None, edge)), line.sel(distance=slice(edge, None))
            ax.plot(many["distance"], many, **look, gid=f"{weights} {length}")
            thin = {**look, "linewidth": 0.6}
            ax.plot(few["distance"], few, **thin, gid=f"{weights} {length}, few pairs")
            if weights == "trained":
                longest = max(longest, int(line["distance"].max()))
                shade_few(ax, length, f"few pairs {length}")
    shade_beyond(ax, trained, longest)


@style()
def vaf_by_component(components: xr.Dataset, title: str = "") -> PaperFigure:
    """Draw the VAF of every component as a bar in the colour of its band, and that of the controls
    as marks (HoPE fig. 7).

    `components` has `vaf` [weights, component] ("trained" and any controls), `activated` and
    `low_frequency` [component]; a variable `spread` [component] is drawn as error bars.
    """
    vaf = components["vaf"].transpose("weights", "component")
    figure, ax, bands = _bars(vaf.sel(weights="trained"), components, VAF, title, BESIDE_CONTROLS)
    _shade_bands(ax, bands)
    places, trained = np.arange(vaf.sizes["component"]), vaf.sel(weights="trained").values
    if "spread" in components:
        bar: Any = {"fmt": "none", "color": "#222222", "linewidth": 0.6, "zorder": 4}
        ax.errorbar(places - BESIDE_CONTROLS, trained, components["spread"].values, **bar)
    controls = [str(name) for name in vaf["weights"].values if name != "trained"]
    # A mark is narrower than half a component, so that bars are visible between marks.
    size = min(2.2, 72 * COLUMN_WIDTH * 0.45 / len(places))
    look: dict[str, Any] = {
        "marker": "D",
        "markerfacecolor": "white",
        "color": "#222222",
        "linestyle": "none",
        "markersize": size,
        "markeredgewidth": size / 4,
    }
    for name in controls:
        ax.plot(
            places + 2 * BESIDE_CONTROLS, vaf.sel(weights=name).values, **look, zorder=5, gid=name
        )
    look["markersize"] = 2.2  # in the legend
    random = [Line2D([], [], **look, label="random weights")]
    legend_below(figure, [*_band_patches(bands), *(random if controls else [])])
    return figure


def _bars(
    values: xr.DataArray, components: xr.Dataset, label: str, title: str, aside: float = 0.0
) -> tuple[PaperFigure, Axes, np.ndarray]:
    """Return a figure with `values` [component] as bars in the colours of their bands, its axes,
    and the bands. The bars are shifted to the left by `aside` and narrower by twice as much.
    """
    bands = band_of(components)
    figure = paper_figure(COLUMN_WIDTH, 2.1)
    ax = figure.subplots()
    ax.bar(
        np.arange(len(bands)) - aside,
        values.values,
        0.72 - 2 * aside,
        color=[BAND_COLOURS[band] for band in bands],
        zorder=2,
    )
    ax.axhline(0, color="#333333", linewidth=0.6)
    name_ticks(ax.xaxis, values["component"].values, 8 if len(bands) > 10 else 10)
    ax.set(xlim=(-0.6, len(bands) - 0.4), xlabel=COMPONENT, ylabel=label, title=title)
    ax.grid(axis="y")
    return figure, ax, bands


def vaf_over_training(components: xr.Dataset) -> Panels:
    """Draw the VAF of every component at each saved step of training (HoPE fig. 3b).

    `components` has `vaf` [step, component] in per cent, `activated` and `low_frequency`
    [component].
    """
    vaf = components["vaf"].transpose("component", "step").round() + 0.0  # avoids -0 in the table
    bands = [f"{number} {band}" for number, band in enumerate(named_bands(components))]
    vaf = vaf.assign_coords(
        component=("component", bands, {"long_name": COMPONENT}),
        step=("step", vaf["step"].values, {"long_name": "training step"}),
    )
    look = {"cmap": colour_map("vaf", BAND_COLOURS["activated"]), "vmin": 0}
    return Panels("vaf_over_training", {VAF: vaf}, "", ".0f", look, cell=0.17)


@style()
def pair_of_tokens(components: xr.Dataset, title: str = "") -> PaperFigure:
    """Draw the components of the logit of one pair of tokens, and their sums from the fastest to
    the slowest.

    `components` has `logit` [component] in units of q . k, `activated` and `low_frequency`
    [component].
    """
    logit = components["logit"]
    figure, ax, bands = _bars(logit, components, "part of the logit (q·k)", title)
    total, sums = float(logit.sum()), logit.values.cumsum()
    look: Any = {"color": "#000000", "linewidth": 1.0, "label": "sum so far"}
    ax.step(np.arange(len(sums)), sums, where="mid", zorder=3, gid="sum so far", **look)
    note(ax, f"sum {number(total)}", (len(sums) - 0.5, total), (1, 0), 6, annotation_clip=False)
    legend_below(figure, [*_band_patches(bands), Line2D([], [], **look)])
    return figure


def _shade_bands(ax: Axes, bands: np.ndarray) -> None:
    for place, band in enumerate(bands):
        if band != "high":
            ax.axvspan(place - 0.5, place + 0.5, color=BAND_COLOURS[band], alpha=0.12, **_BEHIND)


def _band_patches(bands: np.ndarray) -> list[Patch]:
    """Return the legend entries of the bands in `bands`."""
    return [
        Patch(facecolor=colour, label=BAND_NAMES[band])
        for band, colour in BAND_COLOURS.items()
        if band in bands
    ]


@style()
def beyond_training_length(components: xr.Dataset, training_length: int) -> PaperFigure:
    """Draw the first layer's components and the mean logit of every layer beyond the training
    length, one row each (HoPE fig. 3c).

    `components` has `component_by_distance` [component, distance] of the first layer,
    `logit_by_distance` [layer, distance], `activated` and `low_frequency` [component]. The figure
    has the activated components, or the lower ones if none is activated, each in units of its range
    within the training length, and up to `ROWS` evenly chosen layers, each on a separate scale.
    Curves are means over L / 16 neighbouring distances.
    """
    curves = components[["component_by_distance", "logit_by_distance"]]
    windows = curves.isel(distance=slice(1, None)).rolling(
        distance=max(1, training_length // 16), center=True
    )
    smooth = windows.mean().dropna("distance")
    curves = smooth["component_by_distance"].transpose("component", "distance")
    bands, distance = band_of(components), smooth["distance"].values
    band = "activated" if "activated" in bands else "low"
    logits = smooth["logit_by_distance"].transpose("layer", "distance")
    rows = np.unique(np.linspace(0, logits.sizes["layer"] - 1, ROWS).round().astype(int))
    figure = paper_figure(COLUMN_WIDTH, 1.7 + 0.75 * len(rows))
    top, *below = figure.subplots(
        1 + len(rows), 1, sharex=True, gridspec_kw={"height_ratios": [1.5, *(1 for _ in rows)]}
    )
    top.axhspan(0, 1, color=BAND_COLOURS[band], alpha=0.10, **_BEHIND)
    top.axhline(0.5, color=BAND_COLOURS[band], linewidth=0.6)
    for place in np.flatnonzero(bands == band):
        within = curves.values[place][distance < training_length]
        top.plot(distance, (curves.values[place] - within.min()) / np.ptp(within), **line_of(band))
    top.set_ylabel("range within L")
    top.set_title(f"layer {logits['layer'].values[0]}: {BAND_NAMES[band]} components", pad=9)
    for ax, row in zip(below, rows, strict=True):
        layer = f"layer {logits['layer'].values[row]}"
        ax.plot(distance, logits.values[row], color="#222222", linewidth=1.0, gid=layer)
        ax.set(title=f"{layer}: mean logit", ylabel="q·k")
    below[-1].set_xlabel(DISTANCE)
    for ax in (top, *below):
        shade_beyond(ax, training_length, int(distance[-1]))
    above: Any = {"transform": top.get_xaxis_transform(), "va": "bottom", "fontsize": 6}
    top.text(training_length, 1.01, " beyond L", **above)
    legend_below(figure, [*band_lines(np.array([band])), TRAINED_HANDLE])
    return figure


def shade_beyond(ax: Axes, training_length: int, last: int) -> None:
    """Mark the training length, and shade the distances beyond it up to `last`."""
    ax.axvline(training_length, **TRAINED, gid="training length")
    if last > training_length:
        ax.axvspan(training_length, last, color="#222222", alpha=0.05, **_BEHIND)
    ax.set_xlim(0, max(last, training_length) * 1.01)
    ax.grid(axis="y")


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
    curves = components["component_by_distance"].transpose("component", "distance")
    curves = curves.sel(distance=slice(1, None))
    bands, distance = band_of(components), curves["distance"].values
    ranged = np.count_nonzero(bands == "high") > MOST_CURVES
    swing = curves - curves.mean("distance")
    figure = paper_figure(COLUMN_WIDTH, 3.3)
    above, below = figure.subplots(2, 1, sharex=True)
    range_look: Any = {"color": BAND_COLOURS["high"], "alpha": 0.35}
    for band in ("high", "low", "activated"):
        of_band = np.flatnonzero(bands == band)
        if band == "high" and ranged:  # too many curves to follow
            ends = swing.values[of_band].min(0), swing.values[of_band].max(0)
            above.fill_between(distance, *ends, **range_look, linewidth=0, gid=f"range {band}")
            continue
        for place in of_band:
            name = f"component {curves['component'].values[place]}"
            above.plot(distance, swing.values[place], **line_of(band), gid=name)
    length = int(distance[-1]) + 1
    edge = length - length // FEW_PAIRS
    total: Any = {"color": "#000000", "linewidth": 1.3}
    below.plot(distance, swing.sum("component").values, **total, gid="sum")
    for band in ("low", "activated"):
        if (bands == band).any():
            look = line_of(band) | {"linewidth": 1.3}
            below.plot(distance, swing.values[bands == band].sum(0), **look, gid=f"sum {band}")
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
    handles = [Line2D([], [], **total, label="all")]
    if ranged:
        handles += [*band_lines(bands[bands != "high"]), Patch(**range_look, label=RANGE)]
    else:
        handles += band_lines(bands)
    legend_below(figure, [*handles, FEW_HANDLE])
    return figure


def shade_few(ax: Axes, length: int, gid: str) -> None:
    """Shade the distances that few pairs of a sequence have.

    Args:
        ax: Axes to draw on.
        length: Length of the sequence in tokens.
        gid: Identifier of the shade in an SVG.
    """
    edge = length - length // FEW_PAIRS
    ax.axvspan(edge, length, color=FEW_COLOUR, alpha=FEW_SHADE, **_BEHIND, gid=gid)


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
        height = float(np.clip(np.mean([ends[place] for place in group]), low, high))
        end = float(swing["distance"][-1]), height
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
    return [
        Line2D([], [], color=colour, linewidth=1.4, label=BAND_NAMES[band])
        for band, colour in BAND_COLOURS.items()
        if band in bands
    ]
