"""Charts beyond the training length: divergence of outputs, log perplexity, PCA traces.

Position Generalization table 2, fig. 6.

Draws the group `extrapolation`, and the group `output_traces` in fig. 6. This module knows nothing
about how methods work.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    CustomFigure,
    Finding,
    Lines,
    Table,
    colour_bar,
    group,
    panels,
    table_of,
    with_run_axis,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, style
from repo_interp.plots.view import View

METHOD_COLOURS = {
    "plain": "#222222",
    "LM-Infinite": "#009E73",
    "InfLLM": "#0072B2",
    "position interpolation": "#E69F00",
    "YaRN": "#CC79A7",
}
METHOD_NAMES = {
    "plain": "plain",
    "lm_infinite": "LM-Infinite",
    "infllm": "InfLLM",
    "interpolation": "position interpolation",
    "yarn": "YaRN",
}
_ABOVE = {
    "kl_above_noise": "KL above noise",
    "kl_above_noise_low": "from",
    "kl_above_noise_high": "to",
}
_OUTPUTS = (
    "How far attention outputs leave the distribution that they have at the training length, by method of "
    "length extension"
)
_CAPTIONS = {
    "kl": f"{_OUTPUTS} and length of the prompt. Bars: 95 % intervals.",
    "kl_by_layer": f"{_OUTPUTS} and layer, in the longest prompts.",
    "log_perplexity": "Log perplexity of the last tokens of a prompt, by method of length extension and "
    "length of the prompt; dotted: the training length.",
}
TRACE_COLUMNS = 4
"""Queries per row."""


@style()
def output_traces(run: xr.DataTree, layer: int | None = None) -> PaperFigure:
    """Draw attention outputs in the principal plane of training lengths (fig. 6).

    Outputs at training lengths are dots. A panel follows a query over a sliding window of keys and
    values, from the first window (open) to the last (filled); later ones are darker.

    Args:
        run: Tree of a run, a group per measure.
        layer: Traced layer to draw; None: the first one.

    Returns:
        The figure.

    Raises:
        InputError: The run has no traces, or no trace of the layer.
    """
    dataset = group(run, "output_traces")
    if "layer" in dataset.dims:
        layers = dataset["layer"].values.tolist()
        layer = layers[0] if layer is None else layer
        if layer not in layers:
            raise InputError(
                f"layer {layer} was not traced; these were: {', '.join(map(str, layers))}"
            )
        dataset = dataset.sel(layer=layer)
        dataset = dataset.assign_attrs(layer=layer, window=int(dataset["window"]))
    points = dataset["pca_reference"].transpose("point", "axis").values
    traces = dataset["pca_trace"].transpose("trace", "step", "axis")
    shares, outside = 100 * dataset["pca_share"].values, 100 * dataset["trace_outside"].values
    figure, axes = panels(
        len(traces), TRACE_COLUMNS, 1.65, 0.8, PAGE_WIDTH, sharex=True, sharey=True
    )
    steps = Normalize(float(traces["step"].min()), float(traces["step"].max()))
    shades = LinearSegmentedColormap.from_list("windows", ["#E9B98F", "#D55E00", "#5A2600"])
    for ax, trace, share in zip(axes, traces, outside, strict=True):
        ax.plot(
            points[:, 0],
            points[:, 1],
            ".",
            color="#7FB8DA",
            markersize=1.5,
            alpha=0.5,
            gid="reference",
            # Thousands of dots would make SVG and PDF heavy.
            rasterized=True,
        )
        line = trace.dropna("step").values
        look: dict[str, Any] = {
            "cmap": shades,
            "norm": steps,
            "linewidth": 0.9,
            "gid": f"trace {int(trace['trace'])}",
        }
        ax.add_collection(
            # A segment has the color of the step at which it ends.
            LineCollection(list(pairwise(line)), array=traces["step"].values[1 : len(line)], **look)
        )
        ax.plot(
            *line[0],
            "o",
            markerfacecolor="white",
            markeredgecolor=shades(0.5),
            markersize=3.5,
            zorder=4,
        )
        ax.plot(*line[-1], "o", color=shades(1.0), markeredgewidth=0, markersize=3.5, zorder=4)
        ax.set_title(f"query {int(trace['trace']):,}\n{share:.0f} % outside")
    figure.supxlabel(f"first component ({shares[0]:.0f} % of variance)")
    figure.supylabel(f"second component ({shares[1]:.0f} %)")
    colour_bar(
        figure,
        ScalarMappable(steps, shades),
        axes,
        "window starts at token",
        pad=0.01,
        fraction=0.02,
    )
    layer, window = dataset.attrs["layer"], dataset.attrs["window"]
    figure.suptitle(
        f"Layer {layer}, windows of {window} keys; dots: outputs at the training length",
        x=0.01,
        ha="left",
    )
    return figure


def extrapolation_table(run: xr.DataTree) -> Table:
    """Tabulate divergence, log perplexity and score by length.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per method and length.
    """
    dataset = group(run, "extrapolation")
    kl = dataset["kl"].transpose("method", "length", "layer")
    metric, prompts = str(dataset.attrs["metric"]), int(dataset.attrs["prompts"])
    columns = [("KL", kl.mean("layer"))]
    above = dataset[[name for name in _ABOVE if name in dataset]]
    columns += [
        (_ABOVE[str(name)], array.mean({*array.dims} - {"method", "length"}))
        for name, array in above.items()
    ]
    columns += [
        ("KL, last layer", kl[..., -1]),
        ("log perplexity there", dataset["log_perplexity"]),
    ]
    columns += [
        (metric, dataset["task_score"]),
        ("its standard error", dataset["task_score_error"]),
    ]
    note = (
        f"KL and log perplexity of the last {dataset.attrs['judged']} tokens of a prompt, "
        f"{dataset.attrs['metric']} of whole prompts; "
        f"{prompts // 2} prompts of {dataset.attrs['task']} per length, beside "
        f"{prompts - prompts // 2} others of the training length. "
        "KL in nats per head, mean over heads and layers: the plain one at the training "
        "length is the noise of fitting Gaussians to few "
        "tokens. Methods are ranked by what is above it, as far as its 95 % intervals (from, "
        "to) do not overlap."
    )
    return table_of("extrapolation", "Beyond the training length", columns, note, METHOD_NAMES)


def charts_by_length(run: xr.DataTree) -> Iterator[Lines]:
    """Chart KL and log perplexity by length, and KL by layer at the longest one.

    The plain KL at the first length is the noise of fitting; bars are intervals of the KL above.

    Args:
        run: Tree of a run, a group per measure.

    Yields:
        The charts.
    """
    dataset = group(run, "extrapolation")
    kl, nats, lengths = dataset["kl"], dataset["log_perplexity"], dataset["length"].values
    named = [METHOD_NAMES.get(name, name) for name in dataset["method"].values.tolist()]
    colours, by_length = dict(METHOD_COLOURS), kl
    if "plain" in named:
        noise = f"plain at {lengths[0]:,} tokens: noise of the fit"
        floor = kl.sel({"method": "plain"}, drop=True).isel(length=0, drop=True)
        attributes, named = kl.attrs, [*named, noise]
        # The noise is one number per layer; drawn as one more method, it is a horizontal line.
        wide = floor.broadcast_like(kl.isel(method=0, drop=True)).expand_dims("method")
        kl = xr.concat([kl.drop_vars("method"), wide], "method")
        kl.attrs, colours[noise] = attributes, "#9A9A9A"
        if "kl_above_noise_low" in dataset:  # missing in older runs
            axes = ("method", "length")
            ends = {
                # The lines show the whole KL, so the mean noise is added to the intervals of
                # the KL above noise.
                end: dataset[f"kl_above_noise_{end}"].transpose(*axes).values + float(floor.mean())
                for end in ("low", "high")
            }
            rows = ((0, 1), (0, 0))  # the noise has no interval
            padded = {
                end: (axes, np.pad(values, rows, constant_values=np.nan))
                for end, values in ends.items()
            }
            by_length = kl.mean("layer", keep_attrs=True).assign_coords(padded)
    length = int(dataset.attrs["training_length"])
    for name, x, values in (
        ("kl", "length", by_length),
        ("log_perplexity", "length", nats),
        ("kl_by_layer", "layer", kl.isel(length=-1)),
    ):
        labels = ("method", named[: values.sizes["method"]], {"colours": colours})
        drawn = values.assign_coords(method=labels)
        if x == "length":
            drawn.attrs["training_length"] = length
            drawn[x].attrs["units"] = "tokens"
        else:
            drawn.attrs["long_name"] += f" at {lengths[-1]:,} tokens"
        yield Lines(
            *with_run_axis(run, drawn),
            *(x, "method"),
            name=f"extrapolation_{name}",
            caption=_CAPTIONS[name],
        )


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the loss of the plain model at the longest prompts, and the best extension."""
    measured = group(run, "extrapolation")
    methods, lengths = [str(name) for name in measured["method"].values], measured["length"].values
    if "plain" not in methods or len(lengths) < 2:
        return
    nats = measured["log_perplexity"].transpose("method", "length").values
    # All methods are compared with the plain model at the first length, which needs no extension.
    rise = nats[:, -1] - nats[methods.index("plain"), 0]
    plain, best = float(rise[methods.index("plain")]), methods[int(np.nanargmin(rise))]
    sentence = (
        f"At {int(lengths[-1]):,} tokens the log perplexity is {plain:+.2g} nats per token from that at "
        f"{int(lengths[0]):,}"
    )
    sentence += (
        f"; with {METHOD_NAMES.get(best, best)} by {float(np.nanmin(rise)):+.2g}"
        if best != "plain"
        else ""
    )
    evidence = (
        f"task {measured.attrs['task']}; mean over the last {measured.attrs['judged']} tokens of "
        f"{int(measured.attrs['prompts']) // 2} prompts of each length"
    )
    yield Finding(sentence, evidence, 0.6, "extrapolation")


VIEW = View(
    "extrapolation",
    "Beyond the training length",
    "Prompts longer than those of training, run plainly and by methods of length extension: "
    "how far attention outputs leave the "
    "distribution they had (Position Generalization, table 2).",
    charts_by_length,
    tables=lambda run: (extrapolation_table(run),),
    findings=_findings,
    compared=("kl", "kl_above_noise", "log_perplexity", "task_score"),
)


def _trace_table(run: xr.DataTree) -> Table:
    """Tabulate the share of a query's windows beyond 99 % of outputs at training lengths.

    There is one row per traced query.
    """
    outside = group(run, "output_traces")["trace_outside"]
    note = (
        "Share of a query's windows whose output is further out than 99 % of the outputs "
        "at the training length."
    )
    return table_of(
        "output_traces",
        OUTPUT_TRACES.title,
        [("outside (%)", 100 * outside)],
        note,
        {"trace": "query at token"},
    )


def _trace_lead(run: xr.DataTree) -> str:
    outside = 100 * float(group(run, "output_traces")["trace_outside"].mean())
    return (
        "Attention outputs at the training length, and those of a few later queries as their "
        "window of keys slides on (Position "
        f"Generalization, fig. 6). {outside:.2g} % of the lines' points are further out than "
        "99 % of the dots, by Mahalanobis' distance."
    )


def _trace_charts(run: xr.DataTree) -> list[Chart]:
    traces = group(run, "output_traces")
    several = traces["layer"].values.tolist() if "layer" in traces.dims else []
    names = {f"output_traces_layer_{layer}": layer for layer in several} or {"output_traces": None}
    caption = (
        "Attention outputs at the training length (dots), and those of later queries as their window of "
        "keys slides on (lines), in the plane of their two principal components."
    )
    return [
        CustomFigure(name, partial(output_traces, run, layer), caption=caption)
        for name, layer in names.items()
    ]


OUTPUT_TRACES = View(
    "output_traces",
    "Attention outputs over sliding windows",
    _trace_lead,
    _trace_charts,
    tables=lambda run: (_trace_table(run),),
    compared=("trace_outside",),
    not_averaged=("pca_reference", "pca_trace", "pca_share"),
)
