"""Position and semantics in the logits of a head: the three-axis fit, and its r.

Position Generalization fig. 2.

    W_ij ~ a_{i-j} + b_i + c_j        logit map, its three axes, their sum

Maps are the block means of the group `maps`; the sum of the axes is averaged over the same blocks,
exactly: with A the running sum of a's running sum, a sums over a block to A(below) - A(above) at
its corners. Draws the groups `three_axis` and `maps`. Knows nothing about how fits are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    Finding,
    HeadCurves,
    HeadImage,
    HeadNumber,
    Heads,
    Panels,
    Table,
    colour_bar,
    counted,
    envelope,
    figures_of_heads,
    first_prompt,
    group,
    layer_colour,
    layer_scheme,
    layer_table,
    nanmean,
    number,
    over,
    over_prompts,
    pick,
    ranked_heads,
    strongest_head,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plots.view import View

FITS = {"three_axis": "three-axis", "fake_distance": "fake-distance"}
PIXELS = 600
"""Points of an axis that are drawn, at least."""
EXACT = 1 - 1e-9
"""Mean r from which a fit is exact up to rounding."""
SHOWN = (1, 99)
"""Percentiles of a map at which its colours end."""
CORRELATIONS = {
    "r": "r of the three-axis fit",
    "r_attention": "r on attention weights",
    "r_position": "r with learned distances",
    "r_shuffled": "r, distances shuffled",
    "r2_held_out": "R² on held-out rows",
}
"""Variables [prompt, layer, head] that measure how well the fit holds, the main one first, and
their labels.
"""


@style()
def fit_correlations(run: xr.DataTree) -> PaperFigure:
    """Draw r of the run's fits for every layer and head.

    r is the mean over prompts, from 0 (or -1) to 1; bars show the schemes of layers. A head that
    fits exactly, since its logits are a sum of these axes by construction, is grey: r = 1 is no
    finding there.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has neither `three_axis` nor `fake_distance`.
    """
    return correlation_grid(run).figure()


def correlation_grid(run: xr.DataTree) -> Panels:
    """Make the chart of `fit_correlations`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    panels = {}
    for name in [name for name in FITS if name in run.children] or ["three_axis"]:
        values = over_prompts(group(run, name)["r"]).transpose("layer", "head")
        # Kept out of the mean too: r = 1 by construction would lift it.
        telling = values.where(values < EXACT)
        mean = (
            f"mean {number(float(nanmean(telling.values)))}"
            if bool(telling.notnull().any())
            else ""
        )
        trivial = "grey: r = 1 by construction" if bool((values >= EXACT).any()) else ""
        panels[f"r of the {FITS[name]} fit: {'; '.join(filter(None, (mean, trivial)))}"] = telling
    low = -1.0 if any(bool((values < 0).any()) for values in panels.values()) else 0.0
    look = {"cmap": "PuOr" if low else "cividis", "norm": Normalize(low, 1.0)}
    width = 0.0 if len(panels) == 1 else PAGE_WIDTH
    return Panels("fit_correlations", panels, look=look, bar={}, cell=0.15, width=width, live=True)


def example_heads(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """Choose the heads with the largest, the median and the smallest r.

    Args:
        dataset: Group of a run.

    Returns:
        Labels (layer, head); fewer than three if there are fewer heads.
    """
    order = ranked_heads(over_prompts(dataset["r"]))
    return (
        # dict.fromkeys: with one or two heads these places coincide.
        [order[place] for place in dict.fromkeys((0, (len(order) - 1) // 2, len(order) - 1))]
        if order
        else []
    )


@style()
def three_axis_fit(run: xr.DataTree, layer: int, head: int) -> PaperFigure:
    """Draw a head's logit map, its three axes and their sum (fig. 2).

    The axes are distance, query and key. The figure shows the first prompt.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.

    Returns:
        The figure.

    Raises:
        InputError: The run has no `maps`, or no axes: `three_axis` keeps them with
            axes="first_prompt".
    """
    maps, fit = group(run, "maps"), group(run, "three_axis")
    if "distance_axis" not in fit:
        raise InputError(
            'this run has no axes; analyse again with the parameter axes="first_prompt" of '
            "three_axis"
        )
    shown = pick(maps["logit_map"], layer=layer, head=head).transpose("query_block", "key_block")
    axes = {
        name: pick(fit[f"{name}_axis"], layer=layer, head=head).values
        for name in ("distance", "query", "key")
    }
    starts, tokens = shown["key_block"].values, axes["query"].size
    rebuilt = additive_means(axes["distance"], axes["query"], axes["key"], edges_of(starts, tokens))
    figure = paper_figure(PAGE_WIDTH, 2.3)
    # Subfigures, since each third has rows of its own.
    left, middle, right = cast(Any, figure.subfigures(1, 3, width_ratios=(1.0, 0.9, 1.17)))
    limits = map_limits(shown.values)
    draw_map(left.subplots(), shown.values, tokens, limits, "Logits", "query (token)")
    title = f"Sum of the axes, r = {r_of(fit, layer, head)}"
    image = draw_map(right.subplots(), rebuilt, tokens, limits, title, "query (token)")
    colour_bar(right, image, right.axes, "logits", pad=0.02, fraction=0.05)
    colour = layer_colour(fit, layer)
    for ax, (name, values) in zip(middle.subplots(3, 1), axes.items(), strict=True):
        draw_axis(ax, values, colour, name)
        ax.set_title(f"{name} axis", pad=2)
    figure.suptitle(described(fit, layer, head, tokens, maps), x=0.01, ha="left")
    return figure


def additive_means(
    distance: np.ndarray, query: np.ndarray, key: np.ndarray, edges: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Average a_{i-j} + b_i + c_j over the causal pairs of every block.

    The cost is tokens x blocks, never tokens x tokens.

    Args:
        distance: a [token], by distance.
        query: b [token].
        key: c [token].
        edges: Starts of the blocks, and the end of the last one.

    Returns:
        Means [query_block, key_block]; NaN for blocks without causal pairs.
    """
    edges = np.asarray(edges)
    tokens, starts = edges[-1], edges[:-1]
    # Keys of a block that a query sees, and queries of a block that see a key.
    # [query, key_block] and [query_block, key]: the causal cut needs no token x token mask.
    seen = np.clip(np.arange(tokens)[:, None] + 1 - starts, 0, np.diff(edges))
    seeing = np.clip(edges[1:][:, None] - np.arange(tokens), 0, np.diff(edges)[:, None])
    pairs = np.add.reduceat(seen, starts, axis=0)
    of_query = np.add.reduceat(query[:, None] * seen, starts, axis=0)
    of_key = np.add.reduceat(key * seeing, starts, axis=1)
    # The sum of a_{i-j} over a rectangle is four corners of the double cumulative sum of a.
    twice = np.concatenate(([0.0, 0.0], np.cumsum(np.cumsum(distance[:tokens]))))

    # [row, column]; below distance 0 the sum is 0, so pairs that look ahead add nothing.
    def corner(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return twice[np.clip(rows[:, None] - columns + 1, 0, tokens + 1)]

    of_distance = (
        corner(edges[1:], starts)
        - corner(starts, starts)
        - corner(edges[1:], edges[1:])
        + corner(starts, edges[1:])
    )
    # Blocks without causal pairs divide by 1 and are then replaced by NaN.
    with np.errstate(invalid="ignore"):
        return np.where(pairs > 0, (of_query + of_key + of_distance) / np.maximum(pairs, 1), np.nan)


def edges_of(starts: np.ndarray, tokens: int) -> np.ndarray:
    """Append the end of the last block to the starts of blocks.

    Args:
        starts: First token of every block.
        tokens: Number of tokens.

    Returns:
        Starts, and the end.
    """
    return np.append(starts, tokens).astype(np.int64)


def draw_map(
    ax: Axes,
    values: np.ndarray,
    tokens: int,
    limits: tuple[float, float],
    title: str,
    down: str,
):
    """Draw block means as an image.

    Args:
        ax: Axes to draw on.
        values: Block means [row, column].
        tokens: Number of tokens.
        limits: Ends of the colours.
        title: Title of the axes.
        down: Label of the y axis.
    """
    look: Any = {
        "cmap": "viridis",
        "interpolation": "nearest",
        "aspect": "auto",
        "gid": f"map {title.split(',')[0]}".strip(),
    }
    image = ax.imshow(values, vmin=limits[0], vmax=limits[1], extent=(0, tokens, tokens, 0), **look)
    ax.set(xlabel="key (token)", ylabel=down)
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    return image


def draw_axis(ax: Axes, values: np.ndarray, colour: str, name: str) -> None:
    """Draw an axis of a fit as a line; a long one by its extremes.

    Args:
        ax: Axes to draw on.
        values: Values [token].
        colour: Colour of the line.
        name: Name of the axis.
    """
    shown = envelope(values, PIXELS)
    ax.plot(shown, values[shown], color=colour, linewidth=0.7, gid=f"axis {name}")
    ax.set(xlim=(0, max(1, values.size - 1)))
    ax.grid(axis="y")


def map_limits(values: np.ndarray) -> tuple[float, float]:
    """Compute the percentiles `SHOWN` of some values.

    Args:
        values: Numbers of any shape; NaN are ignored.

    Returns:
        Lower and upper limit; 1 apart if they are equal.
    """
    # A few extreme logits, often of the first token, would leave all others in one colour.
    low, high = np.nanpercentile(values, SHOWN)
    return float(low), float(high) if high > low else float(low) + 1.0


def r_of(fit: xr.Dataset, layer: int, head: int) -> str:
    """Write r of the fit of a head for the first prompt.

    Args:
        fit: Group of the fit.
        layer: Label of the layer.
        head: Label of the head in its layer.

    Returns:
        The text.
    """
    value = float(pick(fit["r"], layer=layer, head=head).values[0])
    return f"{value:.3f}" if np.isfinite(value) else "–"


def described(fit: xr.Dataset, layer: int, head: int, tokens: int, maps: xr.Dataset) -> str:
    """Describe the head and the prompt of a figure, and its pixels.

    Args:
        fit: Group of the fit.
        layer: Label of the layer.
        head: Label of the head in its layer.
        tokens: Number of tokens.
        maps: Group `maps` of the run.

    Returns:
        The text.
    """
    size = int(maps["block_size"])
    pixel = "" if size == 1 else f"; a pixel is the mean over {size} x {size} pairs"
    return (
        f"Layer {layer} ({layer_scheme(fit, layer)}), head {head}, first prompt, "
        f"{counted(tokens, 'token')}{pixel}"
    )


def heads_with_maps(run: xr.DataTree, fit: xr.Dataset) -> list[tuple[int, int]]:
    """List the heads of `example_heads` whose maps the run keeps.

    Args:
        run: Tree of a run, a group per measure.
        fit: Group of the fit.

    Returns:
        Labels (layer, head); none without maps.
    """
    if "maps" not in run.children:
        return []
    maps = group(run, "maps")
    both = fit.sel(
        # Maps may be kept of some layers and heads only.
        layer=np.intersect1d(fit["layer"], maps["layer"]),
        head=np.intersect1d(fit["head"], maps["head"]),
    )
    has_map = maps["logit_map"].notnull().any(("query_block", "key_block"))
    return example_heads(both.where(has_map))


def correlations(dataset: xr.Dataset, names: Mapping[str, str]) -> dict[str, xr.DataArray]:
    """Average correlations over prompts.

    Args:
        dataset: Group of a run.
        names: Label by variable.

    Returns:
        Means [layer, head] by label, of the variables that `dataset` has.
    """
    # Judged by the main correlation, which is first; the others are then as empty of meaning.
    exact = over_prompts(dataset[next(iter(names))]) >= EXACT
    present = {
        label: over_prompts(dataset[name]).where(~exact)
        for name, label in names.items()
        if name in dataset
    }
    return {
        label: values.assign_attrs(long_name=label, units="1") for label, values in present.items()
    }


def correlation_tables(
    group_name: str, names: Mapping[str, str]
) -> Callable[[xr.DataTree], Sequence[Table]]:
    """Make a function that tabulates correlations, as `layer_table` does.

    Args:
        group_name: Name of the group.
        names: Label by variable.

    Returns:
        Function of a run that returns its tables.
    """
    note = (
        "Means over heads and prompts; a dash where the correlation is undefined, or r is 1 by "
        "construction."
    )

    def tables(run: xr.DataTree) -> Sequence[Table]:
        present = correlations(group(run, group_name), names)
        return (
            layer_table(
                group_name, next(iter(present)).removeprefix("r of ").capitalize(), present, note
            ),
        )

    return tables


def correlation_maps(fit: xr.Dataset, names: Mapping[str, str]) -> list[Heads]:
    """Make maps of heads of correlations.

    Args:
        fit: Group of the fit.
        names: Label by variable.

    Returns:
        The charts.
    """
    return [Heads(values) for values in correlations(fit, names).values()]


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Correlations of the fits that there are, by head; with maps and axes fig. 2."""
    yield correlation_grid(run)
    dataset = group(run, "three_axis")
    if "distance_axis" in dataset:
        draw, heads = partial(three_axis_fit, run), heads_with_maps(run, dataset)
        yield from figures_of_heads("three_axis", draw, heads, live=True)
    yield from correlation_maps(dataset, CORRELATIONS)
    axes = {
        "Distance axis": ("distance", "distance (tokens)"),
        "Query and key axes": ("query key", "token"),
    }
    yield from fit_charts(dataset, "r of the three axes", axes)


def fit_charts(fit: xr.Dataset, title: str, axes: Mapping[str, tuple[str, str]]) -> list[Chart]:
    """Make charts of r of every prompt, and of the axes of the first one.

    Args:
        fit: Group of the fit.
        title: Title of the charts.
        axes: Names of axes and of their x axis, by title.

    Returns:
        The charts; axes are among them if the run keeps them.
    """
    charts: list[Chart] = [HeadNumber(title, fit["r"])]
    for label, (names, x) in axes.items():
        curves = {name: fit[f"{name}_axis"] for name in names.split() if f"{name}_axis" in fit}
        for curve in list(curves.values())[:1]:
            charts.append(
                HeadCurves(
                    f"{label}, first prompt", x, "logits", curve[curve.dims[-1]].values, curves
                )
            )
    return charts


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """State how much of the logits the axes explain.

    The run must hold the control with shuffled distances.
    """
    measured = group(run, "three_axis")
    if "r_shuffled" not in measured:
        return
    r, shuffled = (over_prompts(measured[name]) for name in ("r", "r_shuffled"))
    r = r.where(r < EXACT)  # r = 1 by construction says nothing of the model
    shuffled = shuffled.where(r.notnull())
    gain = r - shuffled
    # So written, a median of NaN returns too.
    if not float(gain.median()) >= 0.05:
        return
    layer, head, _ = strongest_head(gain)
    sentence = (
        "Distance matters to the logits: shuffling it takes r of the three-axis fit "
        f"from {float(r.median()):.2f} to "
    )
    sentence += f"{float(shuffled.median()):.2f} in the median head, most in L{layer} H{head}"
    yield Finding(
        sentence,
        f"{over(measured)}; r falls by .05 at least in the median head, of the heads that are not exact by construction",
        0.3,
        "three_axis",
        layer,
        head,
    )


VIEW = View(
    "three_axis",
    "Position and semantics: three axes",
    "Correlation of a head's logits with a part for the distance, one for the query and one "
    "for the key, added up (Position "
    "Generalization, sec. 3.1).",
    _charts,
    tables=correlation_tables("three_axis", CORRELATIONS),
    findings=_findings,
    compared=("r", "r_position", "distance_axis"),
    not_averaged=("distance_axis", "query_axis", "key_axis"),
)


def _map_charts(run: xr.DataTree) -> list[HeadImage]:
    """Both maps of every head over the first prompt."""
    maps, shown = group(run, "maps"), first_prompt(run)
    size = int(maps["block_size"])
    prompt, tokens = (
        (0, int(maps["key_block"].values[-1]) + size)
        if shown is None
        else (shown.prompt, shown.count)
    )
    kinds = {
        "logit": ("Logits", "query (token)", True),
        "fake": ("Fake-distance logits", "fake distance (tokens)", False),
    }
    return [
        HeadImage(
            title,
            "key (token)",
            y,
            # [layer, head, query or distance block, key block]
            maps[f"{kind}_map"].transpose(..., "key_block"),
            size,
            tokens,
            prompt,
            is_causal,
        )
        for kind, (title, y, is_causal) in kinds.items()
        if f"{kind}_map" in maps and maps[f"{kind}_map"].notnull().any()
    ]


MAPS = View(
    "maps",
    "Logit maps: where a token looks",
    "Logits of all pairs of tokens of the first prompt, as means over blocks, for the chosen "
    "head; and the attention of the chosen token.",
    _map_charts,
    compared=("logit_map", "fake_map"),
    not_averaged=("logit_map", "fake_map", "block_size"),
)
