"""The figures of a comparison: every measure's variables by one rule, from their own axes, and what is drawn its own way.

    mean over prompts first; then, by the axes that are left beside `run`,
      layer, head                    maps side by side, and their difference       steps: lines over the training step
      names (span, pattern, kind)    dots, all layers and heads together           steps: a line a name
      numbers (distance, component)  curves laid over each other, a panel a layer
      two block axes                 maps of the head in which runs differ most

A measure of another package is drawn by the rule, whatever it holds; of ours, FEATURED says which variables. `register` adds a way of
drawing. Knows which variables are worth a figure; knows nothing about how one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr

from repo_interp.comparison.looks import Runs, runs_of
from repo_interp.comparison.over_steps import over_steps
from repo_interp.comparison.own_ways import position_panels, score_figures
from repo_interp.comparison.side_by_side import blocks_beside, categories, curves, heads_beside
from repo_interp.plots.marks.arrays import nanmean
from repo_interp.plots.style import PaperFigure

FEATURED: Mapping[str, tuple[str, ...]] = {
    "positions": ("position_range",),
    "patterns": ("pattern_share", "sensitivity"),
    "attention_mass": ("mass_per_token", "mass"),
    "components": ("logit_by_distance", "vaf", "vaf_band", "still_share"),
    "three_axis": ("r", "r_position", "distance_axis"),
    "fake_distance": ("r", "position_axis"),
    "rotation": ("query_norm", "key_norm", "closed_form_r"),
    "maps": ("logit_map", "fake_map"),
    "gates": ("separator_share", "last_segment_mass", "separator_gate"),
    "segments": ("variance_between", "boundary_f1"),
    "perturbation": ("log_perplexity_rise", "task_score"),
    "extrapolation": ("kl", "log_perplexity", "task_score"),
    "output_traces": ("trace_outside",),
    "scores": (),
}
"""Variables that have a figure; the others of these measures are in the tables and in compare.nc."""

_HEADS = ("layer", "head")
_MOST_PANELS = 2
_SIDES = 2


@dataclass(frozen=True)
class Drawn:
    """One figure of a comparison: the measure it belongs to, the name of its file, and what the page says below."""

    measure: str
    name: str
    figure: PaperFigure
    caption: str


Drawer = Callable[[xr.DataTree, Runs], Iterator[tuple[str, PaperFigure, str]]]
"""Figures of a comparison by name, with a caption each."""

_OWN: dict[str, list[Drawer]] = {"positions": [position_panels], "scores": [score_figures]}


def register(measure: str, draw: Drawer) -> None:
    """Add figures of `measure` beside those of the rule."""
    _OWN.setdefault(measure, []).append(draw)


def comparison_figures(comparison: xr.DataTree) -> Iterator[Drawn]:
    """All figures of `comparison` (see `repo_interp.comparison.align.compare`), measure by measure, one after the other."""
    runs = runs_of(comparison)
    for measure in comparison.children:
        for draw in _OWN.get(measure, []):
            for name, figure, caption in draw(comparison, runs):
                yield Drawn(measure, name, figure, caption)
        dataset = comparison[measure].to_dataset()
        for variable in FEATURED.get(measure, tuple(map(str, dataset.data_vars))):
            if variable in dataset:
                for suffix, figure, caption in draw_variable(dataset[variable], runs):
                    yield Drawn(measure, "_".join(filter(None, (measure, variable, suffix))), figure, caption)


def draw_variable(array: xr.DataArray, runs: Runs) -> Iterator[tuple[str, PaperFigure, str]]:
    """`array` [run, ...] by the rule of the module: what its name ends in, the figure and a caption. Nothing where no rule
    fits, or fewer than two runs have a value.
    """
    if (
        array.dtype.kind != "f"
        or np.isfinite(array.values).any(array.get_axis_num([d for d in array.dims if d != "run"])).sum() < 2
    ):
        return
    prompts = array.sizes.get("prompt", 0)
    values = over_prompts(array)
    caption = f"{array.attrs.get('long_name', array.name)}{f', mean over {prompts} prompts' if prompts > 1 else ''}."
    blocks = [str(dim) for dim in values.dims if str(dim).endswith("_block")]
    names = [str(dim) for dim in values.dims if dim != "run" and values[dim].dtype.kind in "OUS"]
    numbers = [str(dim) for dim in values.dims if dim not in ("run", *_HEADS, *names, *blocks)]
    steps = runs.steps is not None
    if len(blocks) == _SIDES and not numbers and not names:
        chosen, said = _most_different(values)
        yield "", blocks_beside(chosen, runs, said), f"{caption} {said}, the head in which the runs differ most."
    elif not numbers and not names and {"layer", "head"} <= set(values.dims):
        yield "", heads_beside(values, runs), caption
        if steps:
            yield "over_steps", over_steps(values, runs, None), caption
    elif not numbers and not names and "layer" in values.dims:
        yield "", curves(values, runs, "layer", None), caption
    elif len(names) == 1 and not numbers:
        yield "", over_steps(values, runs, names[0]) if steps else categories(values, runs, names[0]), caption
    elif numbers and len(names) + len(numbers) <= _MOST_PANELS + 1:
        yield from _curves(values, runs, names, numbers, caption)
    elif set(values.dims) == {"run"}:
        values = values.expand_dims(of=[str(array.name)])
        yield "", over_steps(values, runs, "of") if steps else categories(values, runs, "of"), caption


def over_prompts(array: xr.DataArray) -> xr.DataArray:
    """`array` as the mean over its prompts; NaN where no prompt has a value."""
    if "prompt" not in array.dims:
        return array
    moved = array.transpose("prompt", ...)
    return moved.isel(prompt=0, drop=True).copy(data=nanmean(moved.values.astype(float), axis=0))


def _curves(
    values: xr.DataArray, runs: Runs, names: list[str], numbers: list[str], caption: str
) -> Iterator[tuple[str, PaperFigure, str]]:
    """Curves over the longest axis of numbers; a figure a name; panels over what else there is, else over layers."""
    x = max(numbers, key=lambda dim: values.sizes[dim])
    others = [dim for dim in [*numbers, *names] if dim != x]
    if values.sizes[x] == 1 and not others:
        yield "", categories(values.assign_coords({x: [f"{label:g}" for label in values[x].values]}), runs, x), caption
    elif not others:
        yield "", curves(values, runs, x, "layer" if "layer" in values.dims else None), caption
    elif len(others) == 1:
        yield "", curves(values, runs, x, others[0]), caption
    else:
        panel, apart = sorted(others, key=lambda dim: dim in names)
        for label in values[apart].values:
            one = values.sel({apart: label})
            if np.isfinite(one.values).any():
                said = f"{caption[:-1]}: {apart} {label}."
                named = one.assign_attrs(long_name=f"{values.attrs.get('long_name', values.name)}: {label}")
                yield str(label), curves(named, runs, x, panel), said


def _most_different(values: xr.DataArray) -> tuple[xr.DataArray, str]:
    """The maps of the head in which runs differ most from the first, by the mean square; and which it is."""
    heads = [dim for dim in _HEADS if dim in values.dims]
    moved = values.transpose("run", *heads, ...)
    data = moved.values
    squares = nanmean((data[1:] - data[:1]) ** 2, axis=(0, *range(1 + len(heads), data.ndim)))
    place = np.unravel_index(int(np.nanargmax(np.nan_to_num(squares, nan=-1.0))), squares.shape)
    chosen = moved.isel(dict(zip(heads, map(int, place), strict=True)))
    return chosen, ", ".join(f"{dim} {int(chosen[dim])}" for dim in heads)
