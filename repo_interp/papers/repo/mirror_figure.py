"""The mirror effect (RePo fig. 6): positions of one text by layer, and every copy's position against its source's.

    above   z_i against i, words and copies shaded; grey lines join a copy and its source
    below   z_copy against z_source over many texts, on the diagonal where both are the same

Draws what `papers.repo_reversal` measures. Knows nothing about how positions are made.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.plots.marks.drawing import contiguous, counted, legend_below, token_label
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, span_colours, style

SHOWN = 600
"""Points of a scatter."""


def mirror_figure(data: xr.Dataset, name: str) -> PaperFigure:
    """A column a layer: `example [layer, token]` above, `pair [layer, point, end]` below, means of `mirror` in the titles."""
    layers = [int(layer) for layer in data["layer"].values]
    means = data["mirror"].sel(weights="trained").mean("prompt")
    with style():
        figure = paper_figure(PAGE_WIDTH, 3.7)
        axes = figure.subplots(2, len(layers), squeeze=False, height_ratios=(1.15, 1))
        for column, layer in enumerate(layers):
            of_layer = data.sel(layer=layer)
            _example(axes[0, column], of_layer)
            axes[0, column].set_title(f"Layer {layer}")
            _scatter(axes[1, column], of_layer["pair"])
            told = means.sel(layer=layer)
            copies, random, elsewhere = (float(told.sel(kind=kind)) for kind in ("copies", "random", "elsewhere"))
            axes[1, column].set_title(
                f"|Δz| {copies:.2g}; to others {random:.2g}\nsame word elsewhere {elsewhere:.2g}", fontsize=6
            )
        for ax in axes[1]:
            ax.set_xlabel("z of the word (positions)")
        axes[0, 0].set_ylabel("position z (positions)")
        axes[1, 0].set_ylabel("z of the copy (positions)")
        figure.suptitle(f"{name}: one text above, {counted(data.sizes['prompt'], 'text')} below", x=0.01, ha="left", fontsize=7.5)
        colours = span_colours(_PARTS)
        legend_below(
            figure,
            [
                Patch(facecolor=colours["words"], alpha=0.3, label="words"),
                Patch(facecolor=colours["generated"], alpha=0.3, label="copies, reversed"),
                Line2D([], [], color=_LINK, linewidth=0.5, label="joins a word and its copy"),
                Line2D([], [], color="#222222", linewidth=0.6, linestyle="--", label="same position"),
            ],
        )
    return figure


_LINK = "#9A9A9A"
_PARTS = ("words", "generated")


def _example(ax: Axes, of_layer: xr.Dataset) -> None:
    values = of_layer["example"].values
    part = of_layer["example_part"].values.astype(str)
    colours = span_colours(_PARTS)
    words, copies = np.flatnonzero(part == "words"), np.flatnonzero(part == "copies")
    for places, colour in ((words, colours["words"]), (copies, colours["generated"])):
        for first, last in contiguous(places.tolist()):
            ax.axvspan(first - 0.5, last + 0.5, facecolor=colour, alpha=0.3, linewidth=0, zorder=0)
    for word, copy in zip(words, copies[::-1], strict=True):
        ax.plot([word, copy], values[[word, copy]], color=_LINK, linewidth=0.4, zorder=1, gid="link")
    ax.plot(range(len(values)), values, "o", markersize=2.2, markeredgewidth=0, color=scheme_colour("repo"), gid="positions")
    ax.set_xticks(range(len(values)), [token_label(str(text)) for text in of_layer["example_text"].values], rotation=90)
    ax.tick_params(axis="x", labelsize=3.6, length=1)
    ax.grid(axis="y")


def _scatter(ax: Axes, pair: xr.DataArray) -> None:
    copy, source = (pair.sel(end=end).values for end in ("copy", "source"))
    step = max(1, len(copy) // SHOWN)
    low, high = float(min(copy.min(), source.min())), float(max(copy.max(), source.max()))
    room = 0.05 * (high - low) or 1.0
    ax.plot([low - room, high + room], [low - room, high + room], "--", color="#222222", linewidth=0.6)
    ax.plot(
        source[::step], copy[::step], "o", markersize=1.3, markeredgewidth=0, alpha=0.5, color=scheme_colour("repo"), gid="pairs"
    )
    ax.set(xlim=(low - room, high + room), ylim=(low - room, high + room))
    ax.grid()
