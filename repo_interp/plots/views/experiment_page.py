"""The page's sections on perturbation and extrapolation: tables, and charts as plotly figures.

    perturbation     a heat map a kind over share and reach, and what stands in its cells as a table      (Position Generalization fig. 5)
    extrapolation    divergence and log perplexity by length, divergence by layer                          (table 2)
    output_traces    attention outputs in their principal plane                                            (fig. 6)

Numbers keep six significant digits. Knows runs and plotly's language; knows nothing about pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.reading import group
from repo_interp.plots.marks.table import Cell, Table
from repo_interp.plots.views.extrapolation import METHOD_LOOKS, METHOD_NAMES, TRACE_COLOURS
from repo_interp.plots.views.perturbation import KIND_NAMES, VALUES, worse_than_without

Captioned = tuple[tuple[str, dict[str, Any]], ...]
_TITLES = {"log_perplexity": "Log perplexity", "log_perplexity_rise": "Rise over untouched targets"}
SCALE = [[0.0, "#5E3C99"], [0.25, "#B2ABD2"], [0.5, "#F7F7F7"], [0.75, "#FDB863"], [1.0, "#B35806"]]
"""Better to worse, as in the figures on paper."""
_DASHES = {"-": "solid", "--": "dash"}


def perturbation_values(run: xr.DataTree) -> tuple[str, ...]:
    """The values of perturbation that say different things: the task's score is left out where it is the log perplexity."""
    dataset = group(run, "perturbation")
    same = np.allclose(dataset["task_score"], dataset["log_perplexity"], equal_nan=True)
    return VALUES[:-1] if same else VALUES


def perturbation_tables(run: xr.DataTree) -> tuple[Table, ...]:
    """A table a value: rows are kinds and reaches, columns shares of moved tokens."""
    dataset = group(run, "perturbation")
    tables = []
    for value in perturbation_values(run):
        cells = dataset[value].transpose("kind", "l_max", "gamma")
        rows = [
            (KIND_NAMES.get(str(kind), str(kind)), int(l_max), *_cells(cells.sel(kind=kind, l_max=l_max).values))
            for kind in cells["kind"].values
            for l_max in cells["l_max"].values
        ]
        shares = (f"{100 * gamma:g} % moved" for gamma in cells["gamma"].values)
        note = (
            f"{cells.attrs['long_name'].capitalize()} ({cells.attrs['units']}), {dataset.attrs['prompts']} prompts of the task "
        )
        note += f"{dataset.attrs['task']}, in layers {', '.join(map(str, np.atleast_1d(dataset.attrs['layers'])))}."
        title = _TITLES.get(value, str(dataset.attrs["metric"]).capitalize())
        tables.append(Table(f"perturbation_{value}", title, ("kind", "farthest move", *shares), tuple(rows), note))
    return tuple(tables)


def perturbation_charts(run: xr.DataTree) -> Captioned:
    """A heat map a kind of the value that the task is scored by, coloured by how much worse it is than without."""
    value = perturbation_values(run)[-1] if len(perturbation_values(run)) == len(VALUES) else VALUES[0]
    dataset = group(run, "perturbation")
    cells, worse, reach = worse_than_without(dataset, value)
    title = _TITLES.get(value, str(dataset.attrs["metric"]))
    charts = []
    for kind in cells["kind"].values:
        trace = {
            "type": "heatmap",
            "x": [f"{100 * gamma:g} %" for gamma in cells["gamma"].values],
            "y": [str(l_max) for l_max in cells["l_max"].values],
            "z": [_numbers(row) for row in worse.sel(kind=kind).values],
            "text": [[f"{number:.3f}".replace("-0.000", "0.000") for number in row] for row in cells.sel(kind=kind).values],
            "texttemplate": "%{text}",
            "zmin": -reach,
            "zmax": reach,
            "colorscale": SCALE,
            "hovertemplate": "%{x} of tokens within %{y}: %{text}<extra></extra>",
            "colorbar": {"title": {"text": "worse"}},
        }
        axes = {
            "xaxis": {"title": {"text": "tokens moved"}, "type": "category"},
            "yaxis": {"title": {"text": "farthest move (tokens)"}, "type": "category", "autorange": "reversed"},
        }
        name = KIND_NAMES.get(str(kind), str(kind))
        charts.append((f"{name}: {title[:1].lower()}{title[1:]}", {"data": [trace], "layout": {"hovermode": "closest", **axes}}))
    return tuple(charts)


def extrapolation_table(run: xr.DataTree) -> Table:
    """A row a method and length."""
    dataset = group(run, "extrapolation")
    rows = [
        (
            METHOD_NAMES.get(str(method), str(method)),
            int(length),
            *_cells(
                [
                    one["kl"].mean(),
                    one["kl"].sel(layer=one["kl"]["layer"][-1]),
                    *(one[name] for name in ("log_perplexity", "task_score", "task_score_error")),
                ]
            ),
        )
        for method in dataset["method"].values
        for length in dataset["length"].values
        for one in (dataset.sel({"method": method, "length": length}),)
    ]
    columns = (
        "method",
        "length",
        "KL",
        "KL, last layer",
        "log perplexity there",
        str(dataset.attrs["metric"]),
        "its standard error",
    )
    note = (
        f"KL and log perplexity of the last {dataset.attrs['judged']} tokens of a prompt, {dataset.attrs['metric']} of whole prompts; "
        f"{dataset.attrs['prompts']} prompts of {dataset.attrs['task']} a length, half of those of the training length for comparison. KL "
        "in nats a head, mean over heads and layers: the plain one at the training length is the noise of fitting Gaussians to few tokens."
    )
    return Table("extrapolation", "Beyond the training length", columns, tuple(rows), note)


def extrapolation_charts(run: xr.DataTree) -> Captioned:
    """Divergence and log perplexity by length, divergence by layer at the longest."""
    dataset = group(run, "extrapolation")
    kl = dataset["kl"].transpose("method", "length", "layer")
    lengths, layers = kl["length"].values.tolist(), kl["layer"].values.tolist()
    by_length: dict[str, Any] = {"title": {"text": "length (tokens)"}, "type": "log", "tickvals": lengths, "ticktext": lengths}
    surprise = dataset["log_perplexity"].transpose("method", "length").values
    drawn = (
        ("Divergence of attention outputs by length, mean over layers", lengths, kl.values.mean(-1), by_length, "KL (nat)"),
        ("Log perplexity by length", lengths, surprise, by_length, "log perplexity (nat)"),
        (
            f"Divergence of attention outputs by layer, at {lengths[-1]:,} tokens",
            layers,
            kl.values[:, -1],
            {"title": {"text": "layer"}, "tickvals": layers},
            "KL (nat)",
        ),
    )
    return tuple(
        (
            caption,
            {
                "data": [_line(str(method), x, row) for method, row in zip(kl["method"].values, values, strict=True)],
                "layout": {"hovermode": "closest", "xaxis": axis, "yaxis": {"title": {"text": name}, "rangemode": "tozero"}},
            },
        )
        for caption, x, values, axis, name in drawn
    )


def traces_chart(run: xr.DataTree) -> Captioned:
    """Outputs at the training length as dots, those of a few queries over sliding windows as lines."""
    dataset = group(run, "output_traces")
    points = dataset["pca_reference"].transpose("point", "axis").values
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": "training length",
        "x": _numbers(points[:, 0]),
        "y": _numbers(points[:, 1]),
        "marker": {"color": "#7FB8DA", "size": 3, "opacity": 0.5},
        "hoverinfo": "skip",
    }
    lines = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"query at token {int(token):,}",
            "x": _numbers(trace[:, 0]),
            "y": _numbers(trace[:, 1]),
            "line": {"color": TRACE_COLOURS[place % len(TRACE_COLOURS)], "width": 1.5},
            "marker": {"size": [8, *[3] * (len(trace) - 1)]},
            "text": [f"keys from {int(start):,}" for start in dataset["step"].values],
            "hovertemplate": "%{text}<extra></extra>",
        }
        for place, (token, trace) in enumerate(
            zip(dataset["trace"].values, dataset["pca_trace"].transpose("trace", "step", "axis").values, strict=True)
        )
    ]
    shares = 100 * dataset["pca_share"].values
    axes = {
        "xaxis": {"title": {"text": f"first component ({shares[0]:.0f} % of variance)"}},
        "yaxis": {"title": {"text": f"second component ({shares[1]:.0f} %)"}},
    }
    caption = f"Layer {dataset.attrs['layer']}, windows of {dataset.attrs['window']:,} keys; the first window is the larger dot"
    return ((caption, {"data": [dots, *lines], "layout": {"hovermode": "closest", **axes}}),)


def _line(method: str, x: list[Any], values: np.ndarray) -> dict[str, Any]:
    look = METHOD_LOOKS.get(method, {"color": "#8A8A8A", "linestyle": "--"})
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": METHOD_NAMES.get(method, method),
        "x": x,
        "y": _numbers(values),
        "line": {"color": look["color"], "dash": _DASHES.get(look["linestyle"], "dot")},
    }


def _cells(values: Any) -> list[Cell]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _numbers(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float).ravel()]
