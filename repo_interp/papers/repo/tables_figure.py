"""Tables of the RePo paper as figures: attention mass per token (table 4), ranges over contexts (fig. 2), cost (table 6).

Draws what `papers.repo_attention`, `repo_ranges` and `repo_efficiency` measure. Knows nothing about how that is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.plots.marks.drawing import counted, legend_below, number, plain_decades
from repo_interp.plots.marks.scores import handles, looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, scheme_name, style

_ROWS = {"generated": "Rows of the generated tokens", "producing": "Rows that produced them"}
ERRORS = 2.0
"""Standard errors that a bar shows to either side."""


def mass_table(data: xr.Dataset) -> PaperFigure:
    """`mass_per_token [checkpoint, rows, prompt, span]`: a panel a reading, a row a span, a dot a checkpoint."""
    mass = data["mass_per_token"].transpose("rows", "span", "checkpoint", "prompt")
    found = looks(data)
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.9 + 0.1 * mass.sizes["span"] * (2 + mass.sizes["checkpoint"]))
        axes = figure.subplots(1, mass.sizes["rows"], sharey=True, squeeze=False)[0]
        for ax, rows, values in zip(axes, mass["rows"].values, mass.values, strict=True):
            for place, (name, look) in enumerate(found.items()):
                y = np.arange(len(values)) + 0.7 * ((place + 0.5) / len(found) - 0.5)
                means = values[:, place].mean(axis=-1)
                errors = ERRORS * values[:, place].std(axis=-1, ddof=1) / np.sqrt(values.shape[-1])
                ax.hlines(y, means - errors, means + errors, color=look["color"], linewidth=0.9)
                ax.plot(means, y, look["marker"], color=look["color"], markersize=3, markeredgewidth=0, gid=f"mass {rows} {name}")
                for height, mean, error in zip(y, means, errors, strict=True):
                    ax.annotate(
                        number(mean),
                        (mean + error, height),
                        xytext=(3, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=4.6,
                        color="#333333",
                    )
            ax.set_xlim(0, None)
            ax.margins(x=0.12)
            ax.set_title(f"{_ROWS.get(str(rows), str(rows))}, {counted(mass.sizes['prompt'], 'prompt')}")
            ax.set_xlabel("attention mass per token (10⁻²)")
            ax.grid(axis="x")
        axes[0].set_yticks(range(mass.sizes["span"]), [str(name) for name in mass["span"].values])
        axes[0].set_ylim(mass.sizes["span"] - 0.45, -0.55)
        legend_below(figure, _dots(data))
    return figure


def ranges_by_context(data: xr.Dataset, name: str) -> PaperFigure:
    """`range [length, prompt, head_of_layer]`: left every learned head by context length, right how uneven they are at each length.

    Dashed: the context length itself, the range of RoPE. Dotted: training length.
    """
    ranges = data["range"].transpose("length", "prompt", "unit")
    lengths = ranges["length"].values
    means = ranges.values.mean(axis=1)
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        for place in range(means.shape[1]):
            left.plot(
                lengths, means[:, place], "-o", color=scheme_colour("repo"), alpha=0.45, linewidth=0.5, markersize=1.8, gid="head"
            )
        left.plot(lengths, means.mean(axis=1), color="#222222", linewidth=1.2, gid="mean")
        left.plot(lengths, lengths, "--", color="#222222", linewidth=0.8, gid="context length")
        left.set(xscale="log", yscale="log", ylabel="range of positions d (positions)")
        for ax in (left, right):
            ax.set_xlabel("context length (tokens)")
        left.set_xticks(lengths, [f"{length:,}" for length in lengths])
        left.minorticks_off()
        plain_decades(left.yaxis)
        left.axvline(float(data.attrs["training_length"]), color="#222222", linewidth=0.6, linestyle=(0, (1, 1.5)))
        left.grid(axis="y")
        left.set_title(
            f"{name}: {counted(means.shape[1], 'learned head')}, mean over {counted(ranges.sizes['prompt'], 'prompt')}"
        )
        shares = means / lengths[:, None]
        right.boxplot(
            list(shares),
            positions=range(len(lengths)),
            widths=0.5,
            showfliers=True,
            medianprops={"color": scheme_colour("repo")},
            flierprops={"markersize": 2},
        )
        right.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        right.set_title("Range over context length, by head")
        right.set_ylim(0, None)
        right.grid(axis="y")
        legend_below(
            figure,
            [
                Line2D([], [], color=scheme_colour("repo"), marker="o", markersize=2, linewidth=0.5, label="a head"),
                Line2D([], [], color="#222222", linewidth=1.2, label="mean"),
                Line2D([], [], color="#222222", linestyle="--", linewidth=0.8, label="the context length (RoPE)"),
                Line2D([], [], color="#222222", linestyle=(0, (1, 1.5)), linewidth=0.6, label="training length"),
            ],
        )
    return figure


def start_layers(data: xr.Dataset) -> PaperFigure:
    """`score [method, checkpoint, length]` over `start (checkpoint)`, the layer that RePo starts at: a panel a method, a line a length."""
    starts = data["start"].values
    with style():
        figure = paper_figure(COLUMN_WIDTH, 2.1)
        panels = figure.subplots(1, data.sizes["method"], sharey=True, squeeze=False)[0]
        for ax, method in zip(panels, data["method"].values, strict=True):
            chosen = data.sel({"method": method}, drop=True)
            scores, errors = (chosen[name].transpose("length", "checkpoint").values for name in ("score", "standard_error"))
            for place, length in enumerate(data["length"].values):
                look: dict[str, Any] = {"color": scheme_colour("repo"), "marker": "os^D"[place % 4], "markersize": 3}
                line = ("-", "--", ":", "-.")[place % 4]
                ax.plot(starts, scores[place], linestyle=line, label=f"{length:,} tokens", gid=f"length {length}", **look)
                low, high = scores[place] - errors[place], scores[place] + errors[place]
                ax.vlines(starts, low, high, color=look["color"], linewidth=0.7)
            ax.set(xlabel=f"first RePo layer of {data.attrs['layers']}", ylim=(-0.03, 1.03), title=str(method))
            ax.set_xticks(sorted(set(starts.tolist())))
            ax.grid(axis="y")
        panels[0].set_ylabel("share of needles found")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def times(data: xr.Dataset) -> PaperFigure:
    """`seconds [scheme, round]`: time a token of both schemes, round by round, and the ratio RePo / RoPE."""
    seconds = 1e3 * data["seconds"].transpose("scheme", "round")
    with style():
        figure = paper_figure(COLUMN_WIDTH, 1.9)
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        for place, scheme in enumerate(seconds["scheme"].values):
            values = seconds.values[place]
            _dots_of(left, place, values, scheme_colour(str(scheme)))
        left.set_xticks(range(seconds.sizes["scheme"]), [scheme_name(str(name)) for name in seconds["scheme"].values])
        left.set(ylabel="time a token (ms)", ylim=(0, 1.12 * float(seconds.max())))
        ratios = data["ratio"].values
        _dots_of(right, 0, ratios, "#222222")
        right.axhline(1.0, color="#222222", linewidth=0.6, linestyle="--")
        right.set_xticks([0], ["RePo / RoPE"])
        right.set_title(f"median {np.median(ratios):.3f}")
        left.set_title(f"{counted(len(ratios), 'round')} in turns")
    return figure


def _dots_of(ax: Axes, place: int, values: np.ndarray, colour: str) -> None:
    shifts = np.linspace(-0.2, 0.2, len(values))
    ax.plot(place + shifts, values, "o", color=colour, markersize=2, markeredgewidth=0, alpha=0.7, gid=f"rounds {place}")
    ax.hlines(np.median(values), place - 0.3, place + 0.3, color="#222222", linewidth=1.0)
    ax.set_xlim(-0.5, place + 0.5)
    ax.grid(axis="y")


def _dots(data: xr.Dataset) -> list[Line2D]:
    entries = handles(data)
    for entry in entries:
        entry.set_linestyle("none")
    return entries
