"""Figures of one head on one prompt: its attention pattern, and the parts of one logit.

The data come from `ri.attention_pattern` and `ri.explain_logit`.
"""

from __future__ import annotations

import math

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.image import AxesImage

from repo_interp.errors import InputError, quoted
from repo_interp.plots.marks import (
    colour_bar,
    draw_cells,
    note,
    number,
    panels,
    require_result,
    token_label,
)
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

PAIRS = 8
"""Rotary pairs with a bar; all other pairs share one bar."""
NOTHING = 1e-3
"""Share of the longest bar below which a bar is invisible: its number is to the right of the axis.
"""
NAMED = 32
"""Most tokens with their texts as labels of the axes."""
_ONE, _ALL = ("query", "key"), ("head", "query", "key")
_PART, _REST, _WHOLE, _STILL = "#0072B2", "#B9B9B9", "#333333", "#D55E00"


@style()
def attention_pattern(pattern: xr.DataArray) -> PaperFigure:
    """Draw the attention pattern of one head, or of all heads of a layer.

    Colors follow the square root of the attention, so that weak attention is visible.

    Args:
        pattern: Attention [query, key] or [head, query, key], from `ri.attention_pattern`.

    Returns:
        The figure, with one panel per head.

    Raises:
        InputError: `pattern` is not an array from `ri.attention_pattern`.
    """
    if not isinstance(pattern, xr.DataArray) or pattern.dims not in (_ONE, _ALL):
        raise InputError(
            "a pattern is what ri.attention_pattern returns, [query, key] or [head, query, key]; "
            f"got {quoted(pattern)}"
        )
    layer = f"Layer {pattern.attrs.get('layer')}"
    if pattern.dims == _ONE:
        figure = paper_figure(COLUMN_WIDTH, COLUMN_WIDTH * 0.9)
        axes = [figure.subplots()]
        image = _draw_pattern(axes[0], pattern, most=8)
        _name_tokens(axes[0], pattern)
        axes[0].set_title(f"{layer}, head {pattern.attrs.get('head')}")
    else:
        count = pattern.sizes["head"]
        columns = math.ceil(math.sqrt(2 * count)) if count > 3 else count
        side = PAGE_WIDTH / (columns + 0.6)
        figure, axes = panels(count, columns, side, 0.5, PAGE_WIDTH, sharex=True, sharey=True)
        images = [
            _draw_pattern(ax, pattern.sel(head=head), most=4)
            for ax, head in zip(axes, pattern["head"].values, strict=True)
        ]
        for ax, head in zip(axes, pattern["head"].values, strict=True):
            ax.label_outer()
            ax.set_title(f"head {head}")
        figure.suptitle(layer)
        # All panels share one scale
        image = images[0]
    colour_bar(figure, image, axes, "attention", ticks=(0, 0.01, 0.1, 0.25, 0.5, 1), fraction=0.046)
    return figure


def _draw_pattern(ax: Axes, pattern: xr.DataArray, most: int) -> AxesImage:
    look = {"cmap": "viridis", "norm": PowerNorm(0.5, 0, 1), "gid": "pattern"}
    # Keys that a query does not see stay empty
    seen = pattern.where(pattern["seen"]) if "seen" in pattern.coords else pattern
    image = draw_cells(ax, seen, look, most=most)
    ax.set_aspect("equal")
    ax.set(xlabel="key", ylabel="query")
    return image


def _name_tokens(ax: Axes, pattern: xr.DataArray) -> None:
    """Label the tokens of both axes by their texts, if they are few."""
    if "text" not in pattern.coords:
        return
    text = [token_label(str(token)) for token in pattern["text"].values]
    if any(text) and len(text) <= NAMED:
        ax.set_xticks(range(len(text)), text, rotation=90)
        ax.set_yticks(range(len(text)), text)
        ax.tick_params(labelsize=4.5 if len(text) > NAMED // 2 else None)


@style()
def logit_parts(parts: xr.Dataset) -> PaperFigure:
    """Draw the parts of one logit: rotary pairs, other terms, and the three-axis fit.

    A dot marks the value of a pair at equal positions, which depends on contents only. The last bar
    on both sides is the logit, the sum of the bars above it.

    Args:
        parts: Parts of the logit, from `ri.explain_logit`.

    Returns:
        The figure.

    Raises:
        InputError: `parts` is not a dataset from `ri.explain_logit`.
    """
    variables = ("pair", "fit", "logit")
    require_result(parts, variables, "the parts of a logit are", "explain_logit")
    pair, still = parts["pair"].values, parts["pair_at_equal_positions"].values
    # Chosen by size, but drawn in the order of components, the fastest first.
    largest = np.sort(np.argsort(-np.abs(pair), kind="stable")[:PAIRS])
    others = np.setdiff1d(np.arange(len(pair)), largest)
    bars: list[tuple[str, float, float, str]] = []
    for place in largest:
        name = f"pair {place}, θ {number(float(parts['frequency'][place]))}"
        bars.append((name, float(pair[place]), float(still[place]), _PART))
    if len(others):
        bars.append(
            (
                f"{len(others)} other pairs",
                float(pair[others].sum()),
                float(still[others].sum()),
                _REST,
            )
        )
    added = [
        (name.replace("_", " "), float(parts[name]), np.nan, _REST)
        for name in ("bias", "soft_cap", "rounding")
    ]
    # Terms that are 0 have no bar; rounding always has one, since bars must add up to the logit.
    bars += [bar for bar in added if bar[0] == "rounding" or bar[1]]
    shades = {"remainder": _REST}
    fit = [
        (str(name), float(value), np.nan, shades.get(str(name), _PART))
        for name, value in parts["fit"].to_series().items()
    ]
    figure = paper_figure(PAGE_WIDTH, 0.75 + 0.155 * (len(bars) + 1))
    left, right = figure.subplots(1, 2)
    whole = ("logit", float(parts["logit"]), np.nan, _WHOLE)
    _bars(left, [*bars, whole], "Rotary pairs, exact; dots: at equal positions")
    _bars(right, [*fit, whole], f"Three-axis fit of the head, r = {parts.attrs['fit_r']:.2f}")
    named = {name: parts.attrs[f"{name}_text"] for name in ("query", "key")}
    tokens = [
        f"{name} {parts.attrs[name]}{f' ({token_label(text)})' if text else ''}"
        for name, text in named.items()
    ]
    figure.suptitle(
        f"Layer {parts.attrs['layer']}, head {parts.attrs['head']}: {', '.join(tokens)}",
        x=0.01,
        ha="left",
    )
    return figure


def _bars(ax: Axes, bars: list[tuple[str, float, float, str]], title: str) -> None:
    """Draw horizontal bars of (name, length, place of a dot, color) with their numbers.

    The first bar is the top one.
    """
    names, values, dots, colours = zip(*bars, strict=True)
    y = np.arange(len(bars))
    for bar, name in zip(ax.barh(y, values, color=colours, height=0.7), names, strict=True):
        bar.set_gid(f"part {name}")
    # Bars of parts that have no dot are NaN
    ax.plot(dots, y, "o", color=_STILL, markersize=2.6, gid="at equal positions")
    for place, (value, dot) in enumerate(zip(values, dots, strict=True)):
        side = -1 if value < 0 and abs(value) > NOTHING * max(map(abs, values)) else 1
        # Beyond the dot, which would hide the number; `fmax` takes the value without a dot
        end = side * np.fmax(side * value, side * dot)
        # Below 5e-4 three decimals would show +0.000 for a nonzero number.
        text = f"{value:+.3f}" if abs(value) >= 5e-4 or not value else f"{value:+.0e}"
        note(ax, text, (end, place), (3 * side, 0), 5.5, ha="right" if side < 0 else "left")
    ax.axvline(0, color="#333333", linewidth=0.6)
    ax.set_yticks(y, names)
    ax.tick_params(axis="y", length=0)
    # matplotlib puts the first bar at the bottom.
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set(xlabel="logits", title=title)
