"""Charts of rotary pairs in the plane: the terms of a head's logits by rotary component.

Position Generalization fig. 4, 9.

    arrow    mean q_r conj(mean k_r) / sqrt(d_head), at distance 0: its horizontal part is its term in the logit
    circle   the key's deviation times the mean query's size, about the arrow's head
    arc      how far the arrow turns over the largest distance (max_rotation); a whole circle from one turn on

Slow dominating components (observation 1), chosen by means over all prompts, are colored; others
are gray. r is the mean over the prompts with slow dominating components, since the closed form of a
prompt uses the components of that prompt: a head can have an r and no color, or colors and no r.
Numbers at the arrow heads are components; 0 is the fastest. Only the longest arrows have a circle,
an arc and, if there is space, a number. Draws the group `rotation`. This module knows nothing about
how it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import Arc, Circle
from matplotlib.ticker import MaxNLocator

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    CustomFigure,
    HeadArrows,
    HeadNumber,
    Panels,
    evenly_spaced,
    figures_of_heads,
    group,
    heads_of,
    heads_where,
    layer_colour,
    layer_scheme,
    note,
    number,
    panels,
    pick,
    ranked_heads,
    schemes,
)
from repo_interp.plots.style import (
    COLUMN_WIDTH,
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    style,
)
from repo_interp.plots.view import View
from repo_interp.plugins.three_axis.view import correlation_maps, correlation_tables

CORRELATIONS = {"closed_form_r": "r of the closed form f + g"}
NUMBERED = 8
"""Components with number, circle and arc, in a figure of one head."""
NUMBERED_SMALL = 4
CHOICES = (
    "Colored: slow dominating by the means over all prompts. r: logits and the closed form "
    "f + g, whose components are chosen in each "
    "prompt by its own means, so that r and colors need not go together."
)
"""Caption on the choice of slow dominating components for the colors and for r."""
TITLE = (
    "Mean pairs, every head on its own scale. Colored: slow dominating by the means over "
    "all prompts.\n"
    "r: logits and the closed form f + g, from the components that are slow dominating "
    "within a prompt"
)
ARROWS = (
    "mean pairs of queries and keys as arrows. Circle: how far keys spread; arc: how far the pair turns "
    "over the largest distance, dotted: a whole turn or more; number: the rotary component."
)
"""Caption on the elements of an arrow."""
ADDS = "adds to the logit at distance 0 (logits)"
SHORT = 0.15
"""Share of half a panel below which an arrow has no number."""
MOST_ROWS = 72
"""Most rows of heads in the chart of norms; with more heads, a row is the mean of a layer."""
COLUMNS = 4
"""Heads per row in a figure of many."""
OTHERS = "#8A8A8A"
SIDES = (0.0, np.pi / 3, -np.pi / 3, np.pi / 2, -np.pi / 2)
"""Directions of a number from the tip of its arrow, in radians relative to the arrow."""
GAP = 0.09
"""Least distance of two numbers in a figure of one head, as a share of half its width."""
RIGHT_ANGLE = "at a right angle (logits)"


@style()
def rotating_pairs(run: xr.DataTree, layer: int, head: int) -> PaperFigure:
    """Draw the mean pairs of one head as arrows (fig. 4).

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.

    Returns:
        The figure.

    Raises:
        InputError: The run has no rotation, or the layer does not rotate.
    """
    dataset = group(run, "rotation")
    figure = paper_figure(COLUMN_WIDTH, COLUMN_WIDTH)
    ax = figure.subplots()
    draw_pairs(ax, _of_head(dataset, layer, head), layer_colour(dataset, layer), NUMBERED)
    ax.set(xlabel=ADDS, ylabel=RIGHT_ANGLE)
    correlation = _correlation(dataset, layer, head).replace(", r", "; closed form r")
    ax.set_title(f"Layer {layer} ({layer_scheme(dataset, layer)}), head {head}{correlation}")
    return figure


@style()
def rotation_grid(run: xr.DataTree, most: int = 12) -> PaperFigure:
    """Draw the mean pairs of several heads as arrows (fig. 9).

    Args:
        run: Tree of a run, a group per measure.
        most: Largest number of heads, evenly spread over the layers that rotate.

    Returns:
        The figure.

    Raises:
        InputError: The run has no rotation, or no layer rotates.
    """
    dataset = group(run, "rotation")
    heads = rotating_heads(dataset)
    if not heads:
        raise InputError("no layer of this run rotates anything, so it has no rotary pairs")
    chosen = evenly_spaced(heads, most)
    figure, axes = panels(len(chosen), COLUMNS, 1.75, 0.45, PAGE_WIDTH)
    for ax, (layer, head) in zip(axes, chosen, strict=True):
        pairs, colour = _of_head(dataset, layer, head), layer_colour(dataset, layer)
        draw_pairs(ax, pairs, colour, NUMBERED_SMALL, SHORT)
        ax.set_title(f"L{layer} H{head}{_correlation(dataset, layer, head)}", pad=2)
    figure.suptitle(TITLE, x=0.01, ha="left")
    figure.supxlabel(ADDS)
    figure.supylabel(RIGHT_ANGLE)
    return figure


def _arrows(pairs: xr.Dataset) -> xr.DataArray:
    """Return the mean pairs [..., component] as complex numbers, in units of the logit."""
    query, key = (
        pairs[f"{side}_mean_re"] + 1j * pairs[f"{side}_mean_im"] for side in ("query", "key")
    )
    # 1 / sqrt(d_head): a component is a pair of entries.
    return query * key.conj() / np.sqrt(2 * pairs.sizes["component"])


def draw_pairs(ax: Axes, pairs: xr.Dataset, colour: str, numbered: int, short: float = 0.0) -> Axes:
    """Draw the mean pairs of one head with an equal aspect.

    Args:
        ax: Axes to draw on.
        pairs: Variables [component] of the group `rotation`.
        colour: Color of the arrows.
        numbered: Largest number of arrows with a number.
        short: Share of half the axes' extent; shorter arrows have no number.

    Returns:
        `ax`.
    """
    arrows, slow = _arrows(pairs).values, pairs["slow_dominating"].values == 1
    query = np.hypot(pairs["query_mean_re"].values, pairs["query_mean_im"].values)
    deviation = query * pairs["key_deviation"].values / np.sqrt(2 * arrows.size)
    lengths = np.abs(arrows)
    longest = np.argsort(-lengths, kind="stable")[:numbered]
    # The scale fits the circles of the longest arrows. Wider circles of short arrows would make
    # the arrows too small to see.
    reach = max(1e-12, 1.05 * float((lengths + deviation)[longest].max(initial=0.0)))
    named = {
        int(component): complex(arrows[component])
        for component in longest
        if lengths[component] >= short * reach
    }
    places = _number_places(named, GAP * reach if not short else short * reach)
    # The slowest first, so that fast arrows are drawn over slow ones of equal zorder.
    for component in np.arange(arrows.size)[::-1]:
        tip, shade = complex(arrows[component]), colour if slow[component] else OTHERS
        line = {
            "arrowstyle": "-|>",
            "color": shade,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 5,
        }
        look: Any = {"gid": f"arrow {component}", "zorder": 3 if slow[component] else 2}
        ax.annotate("", (tip.real, tip.imag), (0, 0), arrowprops=line, **look)
        if component in longest:
            rotation = float(pairs["max_rotation"].values[component])
            _around(ax, tip, float(deviation[component]), rotation, shade, int(component))
    for component, place in places.items():
        ink = colour if slow[component] else "#444444"
        look = {"ha": "center", "color": ink, "gid": f"number {component}", "zorder": 4}
        note(ax, str(component), (place.real, place.imag), (0, 0), 6, **look)
    ax.axhline(0, color="#E4E4E4", linewidth=0.5, zorder=0)
    ax.axvline(0, color="#E4E4E4", linewidth=0.5, zorder=0)
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    return ax


def _number_places(tips: Mapping[int, complex], gap: float) -> dict[int, complex]:
    """Place numbers at the `tips` of arrows, the longest first; skip numbers without space.

    A number is beyond its tip or a little to one side of it, at least `gap` from all others.
    """
    places: dict[int, complex] = {}
    for component, tip in tips.items():
        outward = tip / abs(tip) if tip else 1.0
        for turn in SIDES:
            place = tip + 0.7 * gap * outward * np.exp(1j * turn)
            # A number farther out could be read as the number of another arrow
            if all(abs(place - other) >= gap for other in places.values()):
                places[component] = complex(place)
                break
    return places


def rotating_heads(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """List all heads that have rotary pairs.

    Args:
        dataset: Group of a run.

    Returns:
        Labels (layer, head).
    """
    # 1: slow dominating, 0: another pair, -1: the layer does not rotate
    return heads_where((dataset["slow_dominating"] >= 0).any("component"))


def head_to_show(dataset: xr.Dataset) -> tuple[int, int] | None:
    """Find the head with the largest weight of slow dominating components.

    The weight is their share of sum_r |q_r| |k_r| over all components of the head.

    Args:
        dataset: Group of a run.

    Returns:
        Labels (layer, head); None if no layer rotates.
    """
    products = dataset["query_norm"] * dataset["key_norm"]
    total = products.sum("component")
    # A head of zeros has no share; this avoids a division by 0.
    share = products.where(dataset["slow_dominating"] == 1).sum("component") / total.where(
        total > 0
    )
    return next(iter(ranked_heads(share)), None)


def _of_head(dataset: xr.Dataset, layer: int, head: int) -> xr.Dataset:
    # `pick` is called for its error about an unknown layer or head.
    pick(dataset["slow_dominating"], layer=layer, head=head)
    pairs = dataset.sel(layer=layer, head=head)
    if (pairs["slow_dominating"] < 0).all():
        raise InputError(
            f"layer {layer} ({schemes(dataset)[layer]}) rotates nothing, so it has no rotary pairs"
        )
    return pairs


def _around(
    ax: Axes,
    tip: complex,
    deviation: float,
    rotation: float,
    colour: str,
    component: int,
) -> None:
    """Deviation circle and arc of one arrow."""
    radius, start = abs(tip), np.degrees(np.angle(tip))
    circle = Circle(
        (tip.real, tip.imag),
        deviation,
        fill=False,
        edgecolor=colour,
        linewidth=0.4,
        gid=f"deviation {component}",
    )
    ax.add_patch(circle)
    whole = rotation >= 2 * np.pi
    arc = Arc(
        (0, 0),
        2 * radius,
        2 * radius,
        theta1=start,
        # matplotlib draws arcs counterclockwise from theta1, the sense in which positions turn
        # pairs.
        theta2=start + (360 if whole else np.degrees(rotation)),
    )
    arc.set(
        edgecolor=colour,
        linewidth=0.5 if whole else 0.9,
        linestyle=(0, (1, 2)) if whole else "-",
        gid=f"arc {component}",
    )
    ax.add_patch(arc)


def _correlation(dataset: xr.Dataset, layer: int, head: int) -> str:
    """Format the mean r of theorem 2's closed form for a head.

    The mean is over prompts with an r; the text has their number and the number of all prompts.
    """
    values = dataset["closed_form_r"].sel(layer=layer, head=head).values
    known = values[np.isfinite(values)]
    some = "" if known.size == values.size else f" ({known.size}/{values.size})"
    return f", r = {number(float(known.mean()))}{some}" if known.size else ""


def norms_grid(pairs: xr.Dataset) -> Panels:
    """Chart mean norms of the pairs of queries and keys.

    A row is a head of the layers that rotate, or a layer if there are many heads.

    Args:
        pairs: Group `rotation` of a run.

    Returns:
        The chart.
    """
    rotating = pairs.isel(
        layer=np.flatnonzero(pairs["query_norm"].notnull().all(("head", "component")))
    )
    few = rotating.sizes["layer"] * rotating.sizes["head"] <= MOST_ROWS
    names = [f"L{layer} H{head}" for layer, head in heads_of(rotating)]
    panels = {}
    for title, name in (("queries", "query_norm"), ("keys", "key_norm")):
        norms = rotating[name].transpose("layer", "head", "component")
        labels = {"head": names, "component": norms["component"].values}
        panels[title] = (
            xr.DataArray(norms.values.reshape(-1, norms.shape[-1]), labels, tuple(labels))
            if few
            else norms.mean("head")
        )
    cell = 0.055 if few else 0.15
    return Panels(
        "pair_norms",
        panels,
        pattern="",
        bar={"label": "mean norm"},
        cell=cell,
        width=PAGE_WIDTH,
        caption="Mean norm of the rotary pairs of queries and of keys, by component; 0 turns fastest.",
    )


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart norms of the pairs, fig. 4 and 9, r by head, and arrows of the chosen head.

    Fig. 4 shows the head with the largest weight of slow dominating components. Both figures need
    layers that rotate. r is the correlation of the closed form.
    """
    pairs = group(run, "rotation")
    if bool(pairs["query_norm"].notnull().any()):
        yield norms_grid(pairs)
    chosen = head_to_show(pairs)
    if chosen is not None and rotating_heads(pairs):
        draw = partial(rotating_pairs, run)
        yield from figures_of_heads("rotating_pairs", draw, [chosen], ARROWS, live=True)
        yield CustomFigure(
            "rotating_pairs",
            partial(rotation_grid, run),
            caption=f"Heads, evenly spread over the layers that rotate: {ARROWS}",
            live=True,
        )
    yield from correlation_maps(pairs, CORRELATIONS)
    arrows = _arrows(pairs)
    yield HeadNumber(
        "r of the closed form, from the slow dominating components of the prompt itself",
        pairs["closed_form_r"],
    )
    title = "Mean rotary pairs; colored: slow dominating by the means over all prompts"
    yield HeadArrows(
        title, ADDS, arrows.real, arrows.imag, (pairs["slow_dominating"] == 1).astype(float)
    )


VIEW = View(
    "rotation",
    "Rotating pairs",
    "Correlation of the logits with f + g, the closed form of the few slow rotary components "
    "that dominate a head (Position "
    f"Generalization, theorem 2). {CHOICES}",
    _charts,
    tables=correlation_tables("rotation", CORRELATIONS),
    informative=lambda run: bool(rotating_heads(group(run, "rotation"))),
    compared=("query_norm", "key_norm", "closed_form_r"),
    not_averaged=("start_angle", "query_mean_re", "query_mean_im", "key_mean_re", "key_mean_im"),
)
