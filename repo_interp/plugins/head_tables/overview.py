"""Overview of the atlas: heads x numbers, with similar heads and similar numbers side by side.

    z = (x - mean over heads) / standard deviation over heads

Heads and numbers are ordered by hierarchical clustering with average linkage; the distance between
heads is Euclidean, between numbers 1 - |r|. Names, and numbers that are equal for all heads, are
left out. A missing number is drawn at the mean (z = 0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import squareform

from repo_interp.errors import InputError
from repo_interp.plots.marks import bare, colour_bar, group, heads_of
from repo_interp.plots.style import PAGE_HEIGHT, PAGE_WIDTH, PaperFigure, paper_figure, style

MOST_NAMED_ROWS = 64
"""Most heads that the overview draws."""
REACH = 3.0
"""Standard deviations at which the colors of the overview saturate."""


def head_columns(atlas: xr.Dataset) -> dict[str, xr.DataArray]:
    """List all numbers and texts per head of the group `atlas`.

    Args:
        atlas: Group `atlas` of a run.

    Returns:
        Arrays [layer, head] by column name, a variable or VARIABLE[LABEL].
    """
    columns: dict[str, xr.DataArray] = {}
    for name, variable in atlas.data_vars.items():
        further = [str(dim) for dim in variable.dims if dim not in ("layer", "head")]
        # Variables with the axis `label` describe rules (thresholds, nulls), not heads.
        if not {"layer", "head"} <= set(variable.dims) or len(further) > 1 or "label" in further:
            continue
        parts = {
            f"{name}[{label}]": variable.sel({axis: label})
            for axis in further
            for label in variable[axis].values
        }
        columns |= {
            column: part.transpose("layer", "head")
            for column, part in (parts or {str(name): variable}).items()
        }
    return columns


def names_of(texts: xr.DataArray) -> np.ndarray:
    """Split the names of every head, in their order.

    Args:
        texts: Names [layer, head], separated by commas.

    Returns:
        Tuples of names [layer, head].
    """
    # Without otypes, vectorize would convert the tuples to arrays.
    return np.vectorize(
        lambda names: tuple(part for part in str(names).split(", ") if part), otypes=[object]
    )(texts.transpose("layer", "head").values)


@style()
def atlas_overview(run: xr.DataTree) -> PaperFigure:
    """Draw heads and their numbers, clustered.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: There are fewer than three heads, or fewer than two numbers that vary.
    """
    atlas = group(run, "atlas")
    values, columns, heads = standardised(atlas)
    if len(columns) < 2 or len(heads) < 3:
        raise InputError(
            "an overview needs two numbers that differ, and three heads; this run has "
            f"{len(columns)} and {len(heads)}"
        )
    names = (
        names_of(atlas["name"]).ravel() if "name" in atlas else np.full(len(heads), None, object)
    )
    # Heads with a name first, then by distance from the mean
    distances = np.linalg.norm(values, axis=1)
    shown = np.lexsort((-distances, [not of for of in names]))[:MOST_NAMED_ROWS]
    order, links = clustered(values[shown])
    # linkage needs the condensed form. Rounding makes 1 - |r| slightly negative, or not quite 0
    # on the diagonal; `clip` and `checks=False` allow for this.
    apart = squareform(np.clip(1 - np.abs(np.corrcoef(values.T)), 0, None), checks=False)
    of_columns = dendrogram(linkage(apart, "average"), no_plot=True)["leaves"]
    figure = paper_figure(PAGE_WIDTH, min(PAGE_HEIGHT, 1.9 + 0.125 * len(shown)))
    engine: Any = figure.get_layout_engine()
    # Small letters are wider in print than in the layout's measurement
    engine.set(rect=(0, 0.03, 0.97, 0.97))
    tree, ax = figure.subplots(1, 2, width_ratios=(1, 8), sharey=False)
    _draw_tree(tree, links, len(shown))
    image = ax.imshow(
        values[shown][order][:, of_columns],
        cmap="PuOr_r",
        vmin=-REACH,
        vmax=REACH,
        aspect="auto",
        gid="overview",
    )
    ax.set_xticks(
        range(len(columns)),
        [columns[place].replace("_", " ") for place in of_columns],
        rotation=90,
        fontsize=5,
    )
    ax.yaxis.tick_right()
    ax.yaxis.set_label_position("right")
    texts = []
    for place in shown[order]:
        of = names[place] or ()
        more = f" +{len(of) - 2}" if len(of) > 2 else ""
        texts.append(f"L{heads[place][0]} H{heads[place][1]} {', '.join(of[:2])}{more}")
    ax.set_yticks(range(len(texts)), texts, fontsize=4.6)
    if len(shown) < len(heads):
        ax.set_ylabel(
            f"{len(shown)} of {len(heads)} heads: those with a name first, then those that differ "
            "most from the mean"
        )
    bare(ax)
    look = {"location": "top", "pad": 0.01, "fraction": 0.03, "aspect": 50, "extend": "both"}
    colour_bar(figure, image, ax, "deviations from the mean over heads", **look)
    return figure


def standardised(atlas: xr.Dataset) -> tuple[np.ndarray, list[str], list[tuple[int, int]]]:
    """Standardize the numbers that vary over heads to z-scores.

    Args:
        atlas: Group `atlas` of a run.

    Returns:
        Z-scores [head of any layer, column], names of the columns, and the heads (layer, head).
    """
    varying, heads = {}, heads_of(atlas)
    for name, column in head_columns(atlas).items():
        if column.dtype.kind in "fiu":
            values = column.values.astype(float).ravel()
            known = values[np.isfinite(values)]
            # A relative bound, since numbers that are equal for all heads may differ by rounding
            if known.size > 1 and known.std() > 1e-9 * (1 + np.abs(known).max()):
                varying[name] = np.where(
                    np.isfinite(values), (values - known.mean()) / known.std(), 0.0
                )
    return (
        np.stack(list(varying.values()), axis=1) if varying else np.zeros((len(heads), 0)),
        list(varying),
        heads,
    )


def clustered(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Order rows by average linkage.

    Args:
        rows: Numbers [row, number].

    Returns:
        Order of the rows, and the linkage; the given order and None for fewer than three rows.
    """
    if len(rows) < 3:
        return np.arange(len(rows)), None
    # Reordering leaves is slow for many rows, and only helps if the row labels are legible.
    links = linkage(rows, "average", optimal_ordering=len(rows) <= MOST_NAMED_ROWS)
    return np.array(dendrogram(links, no_plot=True)["leaves"]), links


def _draw_tree(ax: Any, links: np.ndarray | None, heads: int) -> None:
    if links is not None:
        drawn = dendrogram(links, no_plot=True)
        for across, along in zip(drawn["dcoord"], drawn["icoord"], strict=True):
            # scipy draws leaf k at 10 k + 5; here it is at row k of the image.
            ax.plot(across, (np.array(along) - 5) / 10, color="#5A5A5A", linewidth=0.4)
    ax.set_ylim(heads - 0.5, -0.5)
    ax.invert_xaxis()
    ax.set_axis_off()
