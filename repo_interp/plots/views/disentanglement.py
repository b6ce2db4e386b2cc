"""Position and semantics in the logits of a head (Position Generalization fig. 2, 3), and how well two fits tell them apart.

    three axes      W_ij ~ a_{i-j} + b_i + c_j        logit map, its three axes, their sum
    fake distance   W'_dj ~ a_d + b_j                 fake map with its two axes along its sides, their sum

Maps are the block means of the group `maps`; the sums of axes are averaged over the same blocks, exactly: with A the running sum of
a's running sum, a sums over a block to A(below) - A(above) at its corners. Draws the groups `three_axis`, `fake_distance` and `maps`.

Knows nothing about how fits are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from repo_interp.errors import InputError
from repo_interp.plots.marks.arrays import nanmean, ranked
from repo_interp.plots.marks.drawing import counted, envelope, legend_below, number, scheme_handles
from repo_interp.plots.marks.reading import group, has_groups, pick, schemes
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_HEIGHT, PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plots.views.mass import head_grid

FITS = {"three_axis": "three-axis", "fake_distance": "fake-distance"}
PIXELS = 600
"""Points of an axis that are drawn, at least."""
SHOWN = (1, 99)
"""Percentiles of a map at which its colours end."""


def fit_correlations(run: xr.DataTree) -> PaperFigure:
    """r over layers and heads of each fit that the run has, the mean over prompts; layers beside their schemes.

    Raises InputError when the run has neither `three_axis` nor `fake_distance`.
    """
    present = [name for name in FITS if has_groups(run, [name])]
    if not present:
        group(run, "three_axis")
    fits = {name: mean_r(group(run, name)) for name in present}
    sizes = next(iter(fits.values())).sizes
    with style():
        width = COLUMN_WIDTH if len(fits) == 1 and sizes["head"] <= 20 else PAGE_WIDTH
        figure = paper_figure(width, min(PAGE_HEIGHT, 0.9 + 0.15 * max(8, sizes["layer"])))
        axes = figure.subplots(1, len(fits), squeeze=False)[0]
        for ax, (name, values) in zip(axes, fits.items(), strict=True):
            head_grid(values, ax)
            ax.set_title(f"r of the {FITS[name]} fit: mean {number(float(nanmean(values.values)))}")
        named = schemes(group(run, present[0]))
        legend_below(figure, scheme_handles(named.values()))
    return figure


def mean_r(dataset: xr.Dataset, name: str = "r") -> xr.DataArray:
    """Variable `name` [prompt, layer, head] as its mean over prompts; NaN where no prompt has one."""
    values = dataset[name].transpose("layer", "head", "prompt")
    return values.isel(prompt=0, drop=True).copy(data=nanmean(values.values, axis=2))


def example_heads(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """Heads (layer, head) with the largest, the median and the smallest r: what a figure of a few should show. Fewer where fewer."""
    means = mean_r(dataset)
    order = ranked(means.values)
    places = dict.fromkeys((0, (len(order) - 1) // 2, len(order) - 1)) if order else {}
    layers, heads = means["layer"].values, means["head"].values
    return [(int(layers[order[place][0]]), int(heads[order[place][1]])) for place in places]


def three_axis_fit(run: xr.DataTree, layer: int, head: int) -> PaperFigure:
    """A head's logit map, its distance, query and key axes, and their sum, of the first prompt (fig. 2).

    Raises InputError when the run has no `maps`, or no axes: `three_axis` keeps them with axes="first_prompt".
    """
    maps, fit = group(run, "maps"), group(run, "three_axis")
    if "distance_axis" not in fit:
        raise InputError('this run has no axes; analyse again with the parameter axes="first_prompt" of three_axis')
    shown = pick(maps["logit_map"], layer=layer, head=head).transpose("query_block", "key_block")
    axes = {name: pick(fit[f"{name}_axis"], layer=layer, head=head).values for name in ("distance", "query", "key")}
    starts, tokens = shown["key_block"].values, axes["query"].size
    rebuilt = additive_means(axes["distance"], axes["query"], axes["key"], edges_of(starts, tokens))
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        left, middle, right = np.asarray(figure.subfigures(1, 3, width_ratios=(1.0, 0.9, 1.17))).tolist()
        limits = _limits(shown.values)
        _map(left.subplots(), shown.values, tokens, limits, "Logits", "key", "query")
        image = _map(right.subplots(), rebuilt, tokens, limits, f"Sum of the axes, r = {_r(fit, layer, head)}", "key", "query")
        right.colorbar(image, ax=right.axes, pad=0.02, fraction=0.05, label="logits").outline.set_visible(False)  # pyright: ignore
        colour = scheme_colour(schemes(fit)[layer])
        for ax, (name, values) in zip(np.ravel(np.asarray(middle.subplots(3, 1))), axes.items(), strict=True):
            _line(ax, values, colour, name)
            ax.set_title(f"{name} axis", pad=2)
        figure.suptitle(_where(fit, layer, head, tokens, maps), x=0.01, ha="left", fontsize=7.5)
    return figure


def fake_distance_fit(run: xr.DataTree, layer: int, head: int) -> PaperFigure:
    """A head's fake-distance map with its two axes along its sides, and their sum, of the first prompt (fig. 3).

    Raises InputError when the run has no `maps`, or no axes of `fake_distance`.
    """
    maps, fit = group(run, "maps"), group(run, "fake_distance")
    if "position_axis" not in fit:
        raise InputError('this run has no axes; analyse again with the parameter axes="first_prompt" of fake_distance')
    shown = pick(maps["fake_map"], layer=layer, head=head).transpose("distance_block", "key_block")
    position, semantic = (pick(fit[name], layer=layer, head=head).values for name in ("position_axis", "semantic_axis"))
    tokens, starts = semantic.size, shown["key_block"].values
    edges = edges_of(starts, tokens)
    sizes = np.diff(edges)
    by_distance, by_key = (np.add.reduceat(axis, edges[:-1]) / sizes for axis in (position, semantic))
    rebuilt = by_distance[:, None] + by_key
    with style():
        figure = paper_figure(PAGE_WIDTH, 3.0)
        grid = figure.add_gridspec(2, 3, width_ratios=(1, 0.28, 1.12), height_ratios=(0.28, 1))
        limits, colour = _limits(shown.values), scheme_colour(schemes(fit)[layer])
        ax, along, beside, beneath = (figure.add_subplot(grid[place]) for place in ((1, 0), (0, 0), (1, 1), (1, 2)))
        _map(ax, shown.values, tokens, limits, "", "key", "fake distance")
        _line(along, semantic, colour, "semantic")
        along.set_title("Fake-distance logits; above: semantic axis, right: position axis")
        along.tick_params(labelbottom=False)
        _upright_line(beside, position, colour, "position")
        beside.tick_params(labelleft=False)
        image = _map(beneath, rebuilt, tokens, limits, f"Sum of the axes, r = {_r(fit, layer, head)}", "key", "fake distance")
        figure.colorbar(image, ax=beneath, pad=0.02, fraction=0.05, label="logits").outline.set_visible(False)  # pyright: ignore
        figure.suptitle(_where(fit, layer, head, tokens, maps), x=0.01, ha="left", fontsize=7.5)
    return figure


def additive_means(distance: np.ndarray, query: np.ndarray, key: np.ndarray, edges: Sequence[int] | np.ndarray) -> np.ndarray:
    """Means of a_{i-j} + b_i + c_j over the causal pairs of every block [query_block, key_block]; NaN where there are none.

    `edges`: where blocks begin, and where the last one ends. Costs tokens x blocks, never tokens x tokens.
    """
    edges = np.asarray(edges)
    tokens, starts = edges[-1], edges[:-1]
    # Keys of each block that each query sees, and queries of each block that see each key.
    seen = np.clip(np.arange(tokens)[:, None] + 1 - starts, 0, np.diff(edges))
    seeing = np.clip(edges[1:][:, None] - np.arange(tokens), 0, np.diff(edges)[:, None])
    pairs = np.add.reduceat(seen, starts, axis=0)
    of_query = np.add.reduceat(query[:, None] * seen, starts, axis=0)
    of_key = np.add.reduceat(key * seeing, starts, axis=1)
    twice = np.concatenate(([0.0, 0.0], np.cumsum(np.cumsum(distance[:tokens]))))

    def corner(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return twice[np.clip(rows[:, None] - columns + 1, 0, tokens + 1)]

    of_distance = corner(edges[1:], starts) - corner(starts, starts) - corner(edges[1:], edges[1:]) + corner(starts, edges[1:])
    with np.errstate(invalid="ignore"):
        return np.where(pairs > 0, (of_query + of_key + of_distance) / np.maximum(pairs, 1), np.nan)


def edges_of(starts: np.ndarray, tokens: int) -> np.ndarray:
    """Where blocks begin, and where the last one ends."""
    return np.append(starts, tokens).astype(np.int64)


def _map(ax: Axes, values: np.ndarray, tokens: int, limits: tuple[float, float], title: str, across: str, down: str):
    image = ax.imshow(
        values,
        cmap="viridis",
        vmin=limits[0],
        vmax=limits[1],
        extent=(0, tokens, tokens, 0),
        interpolation="nearest",
        aspect="auto",
        gid=f"map {title.split(',')[0]}".strip(),
    )
    ax.set(xlabel=f"{across} (token)", ylabel=f"{down} (token)" if down != "fake distance" else "fake distance (tokens)")
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    return image


def _line(ax: Axes, values: np.ndarray, colour: str, name: str) -> None:
    kept = envelope(values, PIXELS)
    ax.plot(kept, values[kept], color=colour, linewidth=0.7, gid=f"axis {name}")
    ax.set(xlim=(0, max(1, values.size - 1)))
    ax.grid(axis="y")


def _upright_line(ax: Axes, values: np.ndarray, colour: str, name: str) -> None:
    kept = envelope(values, PIXELS)
    ax.plot(values[kept], kept, color=colour, linewidth=0.7, gid=f"axis {name}")
    ax.set(ylim=(max(1, values.size - 1), 0), xlabel="logits")
    ax.grid(axis="x")


def _limits(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(values, SHOWN)
    return float(low), float(high) if high > low else float(low) + 1.0


def _r(fit: xr.Dataset, layer: int, head: int) -> str:
    value = float(pick(fit["r"], layer=layer, head=head).values[0])
    return f"{value:.3f}" if np.isfinite(value) else "–"


def _where(fit: xr.Dataset, layer: int, head: int, tokens: int, maps: xr.Dataset) -> str:
    size = int(maps["block_size"])
    pixel = "" if size == 1 else f"; a pixel is the mean over {size} x {size} pairs"
    return f"Layer {layer} ({schemes(fit)[layer]}), head {head}, first prompt, {counted(tokens, 'token')}{pixel}"
