"""What a comparison draws in its own way: positions token by token, and scores by test set.

    positions  a row a run, a column a head: those whose learned positions spread most; every panel its own range
    scores     lines over the lengths of test sets, or dots over their names (`plots.scores`), and a map a run over the task's axes

Knows the groups `positions` and `scores` of a comparison; knows nothing about how they are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.comparison.looks import Runs, spread
from repo_interp.comparison.over_steps import over_steps
from repo_interp.comparison.side_by_side import BESIDE, name_columns, name_figure
from repo_interp.plots.marks.arrays import nanmean, ranked
from repo_interp.plots.marks.drawing import legend_below, shade_spans, span_handles
from repo_interp.plots.marks.reading import LEARNED_SCHEMES, ordered_spans, prompt_tokens
from repo_interp.plots.marks.scores import draw_map, draw_scores
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plots.views.positions import draw_positions

HEADS = 3
Named = Iterator[tuple[str, PaperFigure, str]]


def position_panels(comparison: xr.DataTree, runs: Runs) -> Named:
    """Positions of the first prompt in the heads that spread most, run below run; nothing where runs saw different prompts."""
    dataset = comparison["positions"].to_dataset()
    if comparison.attrs.get("same_prompts") != "yes" or not {"position", "token_count"} <= set(dataset.data_vars):
        return
    position = dataset["position"].transpose("run", "prompt", "layer", "head", "token")
    learned = np.isin(dataset["scheme"].transpose("run", "layer").values, LEARNED_SCHEMES)
    ranges = nanmean(dataset["position_range"].transpose("run", "layer", "head", "prompt").values, axis=3)
    ranges = np.where(learned[:, :, None], ranges, np.nan) if learned.any() else ranges
    chosen = ranked(nanmean(ranges, axis=0))[:HEADS]
    known = [name for name in runs.names if np.isfinite(position.sel(run=name).values).any()]
    shown = spread(known, BESIDE)
    if not chosen or not shown:
        return
    tokens = prompt_tokens(dataset.sel(run=shown[0]), int(dataset["prompt"].values[0]))
    names = ordered_spans(map(str, dataset["span"].values)) if "span" in dataset.dims else []
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.5 + 1.15 * len(shown))
        axes: Any = figure.subplots(len(shown), len(chosen), sharex=True, squeeze=False)
        for row, name in enumerate(shown):
            for column, (layer, head) in enumerate(chosen):
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


def score_figures(comparison: xr.DataTree, runs: Runs) -> Named:
    """The mean score by test set with its standard error, log perplexity, and the map over the task's axes."""
    dataset = comparison["scores"].to_dataset()
    known = np.asarray(np.isfinite(dataset["mean_score"].transpose("run", "test_set").values).any(axis=1))
    having = [name for name, found in zip(runs.names, known, strict=True) if found]
    dataset = dataset.sel(run=having)
    metric = str(dataset.attrs.get("metric", "score"))
    for variable, errors in (("mean_score", "standard_error"), ("log_perplexity", None)):
        if variable not in dataset:
            continue
        caption = f"{dataset[variable].attrs['long_name']} by test set{'; bars: standard error over prompts' if errors else ''}."
        if runs.steps is not None:
            yield f"scores_{variable}_over_steps", over_steps(dataset[variable], runs, "test_set"), caption
            continue
        with style():
            figure = paper_figure(COLUMN_WIDTH if len(having) <= 4 else PAGE_WIDTH, 2.4)
            ax = figure.subplots()
            draw_scores(ax, _by_test_set(dataset, runs, variable, errors))
            numbers = _lengths(dataset["test_set"].values)
            ax.set_xlabel("test set" if numbers is None else "test set (length)")
            ax.set_title(
                f"{metric if errors else 'log perplexity'}, {dataset.attrs.get('count', '')} prompts each".replace(",  ", ", ")
            )
            legend_below(figure, runs.handles(having))
        yield f"scores_{variable}", figure, caption
    if "score_map" in dataset and dataset["score_map"].ndim == 3 and str(dataset["score_map"].attrs.get("units")) == "1":
        caption = f"{dataset['score_map'].attrs['long_name']}, in per cent."
        yield "scores_map", _score_maps(dataset["score_map"].sel(run=spread(having, BESIDE)), runs), caption


def _by_test_set(dataset: xr.Dataset, runs: Runs, variable: str, errors: str | None) -> xr.Dataset:
    """What `plots.scores` draws, of one variable."""
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
    """Test sets as numbers, where all are."""
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
