"""The figures of a comparison: the variables of every measure by one rule, from their own axes; positions and scores their own way.

    mean over prompts first; then, by the axes that are left beside `run`,
      layer, head                    maps side by side, and their difference       steps: lines over the training step
      names (span, pattern, kind)    dots, all layers and heads together           steps: one line per name
      numbers (distance, component)  curves laid over each other, one panel per layer
      two block axes                 maps of the head in which runs differ most

    positions  one row per run, one column per head: those whose learned positions spread most; every panel has its own range
    atlas      what heads are called, one map per run
    scores     lines over the lengths of test sets, or dots over their names, and one map per run over the task's axes

`View.compared` says which variables have a figure; a measure without a view is drawn by the rule, whatever it holds. Knows shapes, and the
groups `positions`, `scores` and `atlas`; knows nothing about how they are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.comparison.head_names import names_beside
from repo_interp.comparison.looks import Runs, name_columns, name_figure, runs_of, runs_with_values, spread
from repo_interp.comparison.side_by_side import BESIDE, blocks_beside, categories, curves, heads_beside, over_steps
from repo_interp.failures import until_failure
from repo_interp.plots.catalogue import view_of
from repo_interp.plots.marks.arrays import nanmean, over_prompts, ranked
from repo_interp.plots.marks.drawing import legend_below, shade_spans, span_handles
from repo_interp.plots.marks.reading import LEARNED_SCHEMES, ordered_spans, prompt_tokens
from repo_interp.plots.marks.scores import draw_map, draw_scores
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plots.views.positions import draw_positions

HEADS = 3
"""Heads whose positions are drawn token by token."""
_HEADS = ("layer", "head")
_MOST_PANELS = 2
_SIDES = 2


@dataclass(frozen=True)
class Drawn:
    """One figure of a comparison: the measure it belongs to, the name of its file, and its caption."""

    measure: str
    name: str
    figure: PaperFigure
    caption: str


Captioned = Iterator[tuple[str, PaperFigure, str]]
"""Figures with their name and caption, drawn one after the other."""


def comparison_figures(comparison: xr.DataTree, failures: list[str] | None = None) -> Iterator[Drawn]:
    """All figures of `comparison` (see `repo_interp.compare`), measure by measure, drawn one after the other.

    A measure whose figures cannot be drawn has one line in `failures`; without that list its error is raised.
    """
    runs = runs_of(comparison)
    for measure in comparison.children:
        drawn = partial(_of_measure, comparison, measure, runs)
        yield from until_failure(drawn, f"the figures of {measure!r}", failures)


def _of_measure(comparison: xr.DataTree, measure: str, runs: Runs) -> Iterator[Drawn]:
    if measure in OWN_WAYS:
        for name, figure, caption in OWN_WAYS[measure](comparison, runs):
            yield Drawn(measure, name, figure, caption)
    dataset, view = comparison[measure].to_dataset(), view_of(measure)
    compared = tuple(map(str, dataset.data_vars)) if view is None or view.compared is None else view.compared
    for variable in compared:
        if variable in dataset:
            for suffix, figure, caption in draw_variable(dataset[variable], runs):
                yield Drawn(measure, "_".join(filter(None, (measure, variable, suffix))), figure, caption)


def draw_variable(array: xr.DataArray, runs: Runs) -> Captioned:
    """`array` [run, ...] by the rule of the module: the end of the figure's name, the figure and its caption.

    Nothing where no rule fits, or fewer than two runs have a value.
    """
    if array.dtype.kind != "f" or len(runs_with_values(array)) < 2:
        return
    prompts = array.sizes.get("prompt", 0)
    values = over_prompts(array)
    caption = f"{array.attrs.get('long_name', array.name)}{f', mean over {prompts} prompts' if prompts > 1 else ''}."
    blocks = [str(dim) for dim in values.dims if str(dim).endswith("_block")]
    names = [str(dim) for dim in values.dims if dim != "run" and values[dim].dtype.kind in "OUS"]
    numbers = [str(dim) for dim in values.dims if dim not in ("run", *_HEADS, *names, *blocks)]
    steps = runs.steps is not None
    if len(blocks) == _SIDES and not numbers and not names:
        maps, head = _most_different(values)
        yield "", blocks_beside(maps, runs, head), f"{caption} {head}, the head in which the runs differ most."
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


def _curves(values: xr.DataArray, runs: Runs, names: list[str], numbers: list[str], caption: str) -> Captioned:
    """Curves over the longest axis of numbers: panels over another axis, else over layers; one figure per label of a third."""
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
            of_label = values.sel({apart: label})
            if np.isfinite(of_label.values).any():
                named = of_label.assign_attrs(long_name=f"{values.attrs.get('long_name', values.name)}: {label}")
                yield str(label), curves(named, runs, x, panel), f"{caption[:-1]}: {apart} {label}."


def _most_different(values: xr.DataArray) -> tuple[xr.DataArray, str]:
    """The maps of the head in which runs differ most from the first, by the mean square; and the head in words."""
    heads = [dim for dim in _HEADS if dim in values.dims]
    moved = values.transpose("run", *heads, ...)
    data = moved.values
    squares = nanmean((data[1:] - data[:1]) ** 2, axis=(0, *range(1 + len(heads), data.ndim)))
    place = np.unravel_index(int(np.nanargmax(np.nan_to_num(squares, nan=-1.0))), squares.shape)
    chosen = moved.isel(dict(zip(heads, map(int, place), strict=True)))
    return chosen, ", ".join(f"{dim} {int(chosen[dim])}" for dim in heads)


def position_panels(comparison: xr.DataTree, runs: Runs) -> Captioned:
    """Positions of the first prompt in the heads whose positions spread most, run below run; nothing where the prompts differ."""
    dataset = comparison["positions"].to_dataset()
    if comparison.attrs.get("same_prompts") != "yes" or not {"position", "token_count"} <= set(dataset.data_vars):
        return
    position = dataset["position"].transpose("run", "prompt", "layer", "head", "token")
    learned = np.isin(dataset["scheme"].transpose("run", "layer").values, LEARNED_SCHEMES)
    ranges = nanmean(dataset["position_range"].transpose("run", "layer", "head", "prompt").values, axis=3)
    ranges = np.where(learned[:, :, None], ranges, np.nan) if learned.any() else ranges
    heads = ranked(nanmean(ranges, axis=0))[:HEADS]
    shown = spread(runs_with_values(position), BESIDE)
    if not heads or not shown:
        return
    tokens = prompt_tokens(dataset.sel(run=shown[0]), int(dataset["prompt"].values[0]))
    names = ordered_spans(map(str, dataset["span"].values)) if "span" in dataset.dims else []
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.5 + 1.15 * len(shown))
        axes: Any = figure.subplots(len(shown), len(heads), sharex=True, squeeze=False)
        for row, name in enumerate(shown):
            for column, (layer, head) in enumerate(heads):
                ax = axes[row, column]
                scheme = str(dataset["scheme"].sel(run=name).values[layer])
                colour = scheme_colour(scheme) if runs.steps is None else runs.looks[name]["color"]
                values = position.sel(run=name).values[0, layer, head, : tokens.count]
                draw_positions(ax, values, str(colour))
                shade_spans(ax, tokens.top_spans, names)
                if not row:
                    ax.set_title(f"layer {int(dataset['layer'][layer])}, head {int(dataset['head'][head])}")
                ax.locator_params(axis="y", nbins=4)
            axes[row, 0].set_ylabel(runs.title(name))
        name_columns(axes, "token index")
        figure.supylabel("position (each panel its own range)", fontsize=7)
        legend_below(figure, span_handles(tokens.top_spans, names))
    yield (
        "positions_by_token",
        figure,
        f"Positions of the {tokens.count} tokens of the first prompt, in the heads whose positions spread most.",
    )


def score_figures(comparison: xr.DataTree, runs: Runs) -> Captioned:
    """The mean score by test set with its standard error, log perplexity, and the map over the task's axes."""
    dataset = comparison["scores"].to_dataset()
    scored = runs_with_values(dataset["mean_score"])
    dataset = dataset.sel(run=scored)
    metric = str(dataset.attrs.get("metric", "score"))
    for variable, errors in (("mean_score", "standard_error"), ("log_perplexity", None)):
        if variable not in dataset:
            continue
        caption = f"{dataset[variable].attrs['long_name']} by test set{'; bars: standard error over prompts' if errors else ''}."
        if runs.steps is not None:
            yield f"scores_{variable}_over_steps", over_steps(dataset[variable], runs, "test_set"), caption
            continue
        with style():
            figure = paper_figure(COLUMN_WIDTH if len(scored) <= 4 else PAGE_WIDTH, 2.4)
            ax = figure.subplots()
            draw_scores(ax, _by_test_set(dataset, runs, variable, errors))
            numbers = _lengths(dataset["test_set"].values)
            ax.set_xlabel("test set" if numbers is None else "test set (length)")
            ax.set_title(
                f"{metric if errors else 'log perplexity'}, {dataset.attrs.get('count', '')} prompts each".replace(",  ", ", ")
            )
            legend_below(figure, runs.handles(scored))
        yield f"scores_{variable}", figure, caption
    if "score_map" in dataset and dataset["score_map"].ndim == 3 and str(dataset["score_map"].attrs.get("units")) == "1":
        caption = f"{dataset['score_map'].attrs['long_name']}, in per cent."
        yield "scores_map", _score_maps(dataset["score_map"].sel(run=spread(scored, BESIDE)), runs), caption


def _by_test_set(dataset: xr.Dataset, runs: Runs, variable: str, errors: str | None) -> xr.Dataset:
    """One variable in the form that `plots.marks.scores` draws."""
    numbers = _lengths(dataset["test_set"].values)
    coordinates = {
        "checkpoint": dataset["run"].values,
        "layout": ("checkpoint", [runs.layouts[runs.names.index(name)] for name in dataset["run"].values]),
        "test_set": dataset["test_set"].values if numbers is None else numbers,
    }
    values = dataset[variable].transpose("run", "test_set")
    units = {"long_name": dataset.attrs.get("metric", "score") if errors else "log perplexity", "units": values.attrs["units"]}
    drawn = xr.Dataset({"score": (("checkpoint", "test_set", "seed"), values.values[..., None], units)}, coords=coordinates)
    if errors is not None and errors in dataset:
        drawn["standard_error"] = (("checkpoint", "test_set"), dataset[errors].transpose("run", "test_set").values)
    return drawn.sortby("test_set") if numbers is not None else drawn


def _lengths(test_sets: np.ndarray) -> np.ndarray | None:
    """Test sets as numbers; None where one is not."""
    return test_sets.astype(int) if all(str(name).isdecimal() for name in test_sets) else None


def _score_maps(maps: xr.DataArray, runs: Runs) -> PaperFigure:
    rows, columns = (dim for dim in maps.dims if dim != "run")
    maps = maps.transpose("run", rows, columns)
    with style():
        width = min(PAGE_WIDTH, 0.6 + maps.sizes["run"] * max(0.9, 0.34 * maps.sizes[columns]))
        figure = paper_figure(width, 0.8 + 0.15 * maps.sizes[rows])
        axes: Any = figure.subplots(1, maps.sizes["run"], sharey=True, squeeze=False)
        for ax, name, values in zip(axes[0], maps["run"].values, maps.values, strict=True):
            draw_map(ax, 100 * values)
            ax.set_title(runs.title(str(name)))
            ax.set_xticks(range(maps.sizes[columns]), [str(label) for label in maps[columns].values])
            ax.set_yticks(range(maps.sizes[rows]), [str(label) for label in maps[rows].values])
            ax.set_xlabel(str(columns))
        axes[0, 0].set_ylabel(str(rows))
        name_figure(figure, f"{maps.attrs['long_name']} (%)", "")
    return figure


OWN_WAYS: Mapping[str, Callable[[xr.DataTree, Runs], Captioned]] = {
    "positions": position_panels,
    "scores": score_figures,
    "atlas": names_beside,
}
"""Groups that are drawn in their own way, beside the variables that their view names."""
