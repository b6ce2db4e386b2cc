"""The figures of disentanglement, rotation, perturbation and extrapolation that a run allows, by file name; and their page section.

Of maps, those of the heads with the largest, the median and the smallest r are drawn. Knows which figures there are; knows nothing
about how one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.reading import group, has_groups, schemes
from repo_interp.plots.marks.table import Table
from repo_interp.plots.style import PaperFigure, scheme_name
from repo_interp.plots.views import disentanglement as fits
from repo_interp.plots.views.extrapolation import extrapolation_by_length
from repo_interp.plots.views.extrapolation import output_traces as traces_in_plane
from repo_interp.plots.views.perturbation import perturbation_grid
from repo_interp.plots.views.rotation import rotating_heads, rotating_pairs, rotation_grid, telling_pairs

Named = Iterator[tuple[str, PaperFigure]]


def three_axis(run: xr.DataTree) -> Named:
    """Correlations of the fits that there are, and with maps and axes fig. 2."""
    yield "fit_correlations", fits.fit_correlations(run)
    dataset = group(run, "three_axis")
    if has_groups(run, ["maps"]) and "distance_axis" in dataset:
        for layer, head in drawn_heads(run, dataset):
            yield f"three_axis_layer{layer}_head{head}", fits.three_axis_fit(run, layer, head)


def fake_distance(run: xr.DataTree) -> Named:
    """With maps and axes fig. 3; the correlations where `three_axis` does not draw them."""
    if not has_groups(run, ["three_axis"]):
        yield "fit_correlations", fits.fit_correlations(run)
    dataset = group(run, "fake_distance")
    if has_groups(run, ["maps"]) and "position_axis" in dataset:
        for layer, head in drawn_heads(run, dataset):
            yield f"fake_distance_layer{layer}_head{head}", fits.fake_distance_fit(run, layer, head)


def rotation(run: xr.DataTree) -> Named:
    """Fig. 4 of the head that slow dominating components carry most, and fig. 9; nothing where no layer rotates."""
    dataset = group(run, "rotation")
    chosen = telling_pairs(dataset)
    if chosen is not None and rotating_heads(dataset):
        yield f"rotating_pairs_layer{chosen[0]}_head{chosen[1]}", rotating_pairs(run, *chosen)
        yield "rotating_pairs", rotation_grid(run)


def perturbation(run: xr.DataTree) -> Named:
    """Fig. 5, for log perplexity and, where it is another number, the task's score."""
    yield "perturbation_log_perplexity", perturbation_grid(run)
    yield "perturbation_rise", perturbation_grid(run, "log_perplexity_rise")
    dataset = group(run, "perturbation")
    if not np.allclose(dataset["task_score"], dataset["log_perplexity"], equal_nan=True):
        yield "perturbation_task_score", perturbation_grid(run, "task_score")


def extrapolation(run: xr.DataTree) -> Named:
    """Divergence and log perplexity by length."""
    yield "extrapolation", extrapolation_by_length(run)


def output_traces(run: xr.DataTree) -> Named:
    """Fig. 6."""
    yield "output_traces", traces_in_plane(run)


CORRELATIONS = {
    "three_axis": {
        "r": "r of the three-axis fit",
        "r_attention": "r on attention weights",
        "r_position": "r with learned distances",
        "r_shuffled": "r, distances shuffled",
        "r2_held_out": "R² on held-out rows",
    },
    "fake_distance": {"r": "r of the fake-distance fit"},
    "rotation": {"closed_form_r": "r of the closed form f + g"},
}
"""Variables [prompt, layer, head] of each group that are correlations, the main one first, and what they are called."""


def correlation_table(run: xr.DataTree, name: str) -> Table:
    """A row a layer: the mean over heads and prompts of every correlation of group `name`, and the smallest and largest head's of the
    main one. Raises InputError when the run has not this group.
    """
    dataset = group(run, name)
    present = [variable for variable in CORRELATIONS[name] if variable in dataset]
    means = [fits.mean_r(dataset, variable) for variable in present]
    parts = [
        (str(layer), scheme_name(scheme), [values.sel(layer=layer).values for values in means])
        for layer, scheme in schemes(dataset).items()
    ]
    parts.append(("all", "", [values.values for values in means]))
    rows = [
        (layer, scheme, _of(values[0], np.min), _of(values[0], np.max), *(_of(part, np.mean) for part in values))
        for layer, scheme, values in parts
    ]
    columns = ("layer", "scheme", "smallest head", "largest head", *(CORRELATIONS[name][variable] for variable in present))
    note = "Means over heads and prompts; a dash where nothing varies or a layer has no such thing."
    return Table(name, CORRELATIONS[name][present[0]].removeprefix("r of ").capitalize(), columns, tuple(rows), note)


def correlation_charts(run: xr.DataTree, name: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """A heat map of the main correlation of group `name`, layers by heads (plotly); for fake distance the axes of the head with the
    median r too.
    """
    dataset = group(run, name)
    variable, what = next(iter(CORRELATIONS[name].items()))
    charts = [(f"{what} by layer and head", _heat_map(fits.mean_r(dataset, variable)))]
    if "position_axis" in dataset and fits.example_heads(dataset):
        layer, head = fits.example_heads(dataset)[:2][-1]
        axes = dataset.sel(layer=layer, head=head)
        charts.append(
            (f"Axes of the fit of layer {layer}, head {head}, for the last query of the first prompt", _axes_chart(axes))
        )
    return tuple(charts)


def _axes_chart(axes: xr.Dataset) -> dict[str, Any]:
    traces = [
        {"type": "scatter", "mode": "lines", "name": label, "y": _numbers(axes[name].values)}
        for name, label in (("position_axis", "position axis, by distance"), ("semantic_axis", "semantic axis, by key"))
    ]
    titles = {"xaxis": {"title": {"text": "distance, or key (tokens)"}}, "yaxis": {"title": {"text": "logits"}}}
    return {"data": traces, "layout": {"hovermode": "closest", **titles}}


def _heat_map(values: xr.DataArray) -> dict[str, Any]:
    values = values.transpose("layer", "head")
    trace = {
        "type": "heatmap",
        "x": [int(head) for head in values["head"].values],
        "y": [int(layer) for layer in values["layer"].values],
        "z": [_numbers(row) for row in values.values],
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "hovertemplate": "L%{y} H%{x}: r = %{z}<extra></extra>",
    }
    axes = {
        "xaxis": {"title": {"text": "head"}, "dtick": 1},
        "yaxis": {"title": {"text": "layer"}, "autorange": "reversed", "dtick": 1},
    }
    return {"data": [trace], "layout": {"hovermode": "closest", **axes}}


def drawn_heads(run: xr.DataTree, dataset: xr.Dataset) -> list[tuple[int, int]]:
    """Of the heads that have maps, those to draw."""
    maps = group(run, "maps")
    here = dataset.sel(layer=np.intersect1d(dataset["layer"], maps["layer"]), head=np.intersect1d(dataset["head"], maps["head"]))
    return fits.example_heads(here)


def _of(values: np.ndarray, reduce: Callable[[np.ndarray], Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if finite.size else None


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
