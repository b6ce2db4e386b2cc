"""Beyond the training length (Position Generalization table 2, fig. 6): divergence of attention outputs, log perplexity, PCA traces.

Draws the group `extrapolation`; fig. 6 the group `output_traces`. Knows nothing about how methods work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.plots.marks.drawing import counted, legend_below, scheme_swatches
from repo_interp.plots.marks.reading import group, schemes, unit_label
from repo_interp.plots.marks.table import Table, cells
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plots.view import View

METHOD_LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"color": "#222222", "marker": "o", "linestyle": "-"},
    "lm_infinite": {"color": "#009E73", "marker": "s", "linestyle": "-"},
    "interpolation": {"color": "#E69F00", "marker": "^", "linestyle": "--"},
    "yarn": {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
}
METHOD_NAMES = {"plain": "plain", "lm_infinite": "LM-Infinite", "interpolation": "position interpolation", "yarn": "YaRN"}
FLOOR: dict[str, Any] = {"color": "#9A9A9A", "linewidth": 0.8, "linestyle": (0, (3, 2)), "zorder": 0}
TRACE_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#4B2BD6", "#804020")


@style()
def extrapolation_by_length(run: xr.DataTree) -> PaperFigure:
    """KL of attention outputs (mean over layers) and log perplexity by length, and KL by layer at the longest (table 2).

    Raises InputError when the run has no extrapolation.
    """
    dataset = group(run, "extrapolation")
    kl = dataset["kl"].transpose("method", "length", "layer")
    lengths = dataset["length"].values
    figure = paper_figure(PAGE_WIDTH, 2.2)
    by_length, surprise, by_layer = figure.subplots(1, 3)
    for method, values in zip(kl["method"].values, kl.values, strict=True):
        look = _look(str(method))
        by_length.plot(lengths, values.mean(-1), **look, gid=f"kl {method}")
        by_layer.plot(range(values.shape[1]), values[-1], **look, gid=f"layers {method}")
        nats = dataset["log_perplexity"].sel({"method": method}).values
        surprise.plot(lengths, nats, **look, gid=f"log perplexity {method}")
    floor = kl.sel({"method": "plain"}).values[0] if "plain" in kl["method"].values else None
    if floor is not None:
        by_length.axhline(floor.mean(), **FLOOR, gid="noise")
        by_layer.plot(range(len(floor)), floor, **FLOOR, gid="noise by layer")
    by_length.set_title(unit_label("KL of attention outputs", kl))
    surprise.set_title(unit_label(f"log perplexity, last {dataset.attrs['judged']} tokens", dataset["log_perplexity"]))
    by_layer.set_title(unit_label(f"KL at {lengths[-1]} tokens", kl))
    for ax in (by_length, surprise):
        _length_axis(ax, lengths, int(dataset.attrs["training_length"]))
    by_length.set_ylim(0, None)
    by_layer.set(ylim=(0, None), xlim=(-0.5, kl.sizes["layer"] - 0.5), xlabel="layer", xticks=range(kl.sizes["layer"]))
    by_layer.set_xticklabels([str(layer) for layer in kl["layer"].values])
    scheme_swatches(by_layer, schemes(dataset), "x")
    by_layer.grid(axis="y")
    handles = [Line2D([], [], **_look(str(name)), label=METHOD_NAMES.get(str(name), str(name))) for name in kl["method"].values]
    noise = [] if floor is None else [Line2D([], [], **FLOOR, label=f"plain at {lengths[0]:,} tokens: noise of the fit")]
    legend_below(figure, [*handles, *noise])
    return figure


@style()
def output_traces(run: xr.DataTree) -> PaperFigure:
    """Attention outputs at training lengths as dots in their principal plane; each line follows one query over a sliding window of keys
    and values (fig. 6). Raises InputError when the run has no traces.
    """
    dataset = group(run, "output_traces")
    points = dataset["pca_reference"].transpose("point", "axis").values
    traces = dataset["pca_trace"].transpose("trace", "step", "axis").values
    shares = 100 * dataset["pca_share"].values
    figure = paper_figure(COLUMN_WIDTH, COLUMN_WIDTH)
    ax = figure.subplots()
    ax.plot(points[:, 0], points[:, 1], ".", color="#7FB8DA", markersize=2, alpha=0.5, gid="reference", rasterized=True)
    for place, trace in enumerate(traces):
        colour = TRACE_COLOURS[place % len(TRACE_COLOURS)]
        ax.plot(trace[:, 0], trace[:, 1], color=colour, linewidth=0.8, gid=f"trace {place}")
        ax.plot(*trace[0], "o", color=colour, markersize=3)
    ax.set(xlabel=f"first component ({shares[0]:.0f} % of variance)", ylabel=f"second component ({shares[1]:.0f} %)")
    layer, window = dataset.attrs["layer"], dataset.attrs["window"]
    ax.set_title(f"Layer {layer}: {counted(len(traces), 'trace')} over windows of {window} keys")
    return figure


def _length_axis(ax: Axes, lengths: np.ndarray, training_length: int) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.axvline(training_length, color="#222222", linewidth=0.6, linestyle=(0, (1, 1.5)), gid="training length")
    ax.set_xlabel("length (tokens)")
    ax.grid(axis="y")


def _look(method: str) -> dict[str, Any]:
    return {"markersize": 3, **METHOD_LOOKS.get(method, {"color": "#8A8A8A", "marker": "x", "linestyle": ":"})}


def extrapolation_table(run: xr.DataTree) -> Table:
    """One row per method and length: divergence, log perplexity and the task's score."""
    dataset = group(run, "extrapolation")
    rows = [
        (
            METHOD_NAMES.get(str(method), str(method)),
            int(length),
            *cells([own["kl"].mean(), own["kl"][-1], own["log_perplexity"], own["task_score"], own["task_score_error"]]),
        )
        for method in dataset["method"].values
        for length in dataset["length"].values
        for own in (dataset.sel({"method": method, "length": length}),)
    ]
    metric = str(dataset.attrs["metric"])
    columns = ("method", "length", "KL", "KL, last layer", "log perplexity there", metric, "its standard error")
    note = (
        f"KL and log perplexity of the last {dataset.attrs['judged']} tokens of a prompt, {dataset.attrs['metric']} of whole prompts; "
        f"{dataset.attrs['prompts']} prompts of {dataset.attrs['task']} per length, half of those of the training length for comparison. "
        "KL in nats per head, mean over heads and layers: the plain one at the training length is the noise of fitting Gaussians to few "
        "tokens."
    )
    return Table("extrapolation", "Beyond the training length", columns, tuple(rows), note)


def _figures(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    yield "extrapolation", extrapolation_by_length(run)


VIEW = View(
    "extrapolation",
    "Beyond the training length",
    "Prompts longer than those of training, run plainly and by methods of length extension: how far attention outputs leave the "
    "distribution they had (Position Generalization, table 2).",
    _figures,
    tables=lambda run: (extrapolation_table(run),),
    compared=("kl", "log_perplexity", "task_score"),
)


def _trace_figures(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    yield "output_traces", output_traces(run)


def _trace_table(run: xr.DataTree) -> Table:
    """One row per query that is followed: how much of its line is further out than 99 % of the outputs at training lengths."""
    outside = group(run, "output_traces")["trace_outside"]
    rows = tuple((int(token), 100 * float(share)) for token, share in zip(outside["trace"].values, outside.values, strict=True))
    return Table(
        "output_traces",
        "Attention outputs over sliding windows",
        ("query at token", "outside (%)"),
        rows,
        "Share of a query's windows whose output is further out than 99 % of the outputs at the training length.",
    )


def _trace_lead(run: xr.DataTree) -> str:
    outside = 100 * float(group(run, "output_traces")["trace_outside"].mean())
    return (
        "Attention outputs at the training length, and those of a few later queries as their window of keys slides on (Position "
        f"Generalization, fig. 6). {outside:.2g} % of the lines' points are further out than 99 % of the dots, by Mahalanobis' distance."
    )


OUTPUT_TRACES = View(
    "output_traces",
    "Attention outputs over sliding windows",
    _trace_lead,
    _trace_figures,
    tables=lambda run: (_trace_table(run),),
    compared=("trace_outside",),
    not_averaged=("pca_reference", "pca_trace", "pca_share"),
)
