"""The report page's charts as plotly figures: plain dictionaries of `data` and `layout`, drawn by plotly.js in the page.

A point that stands for a head has `customdata` [layer, head]: choosing it opens the head in the explorer. Texts that come
from outside are escaped, since plotly reads tags in them. Numbers keep six significant digits. Same colours as the figures on
paper. Knows runs and plotly's language; knows nothing about pages.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.arrays import nanmean, ranked
from repo_interp.plots.marks.reading import group, pick, schemes
from repo_interp.plots.style import PATTERN_COLOURS, scheme_colour, scheme_name
from repo_interp.plots.views.mass import LOG_ABOVE as MASS_LOG_ABOVE
from repo_interp.plots.views.mass import UNIT, shown_spans, uniform_share
from repo_interp.plots.views.ranges import LOG_ABOVE

Chart = dict[str, Any]


def mass_by_span(run: xr.DataTree) -> Chart:
    """Attention mass per token x 100: a box a span and scheme over heads, dots for prompts, a diamond for the table's mean."""
    dataset = group(run, "attention_mass")
    spans = shown_spans(dataset)
    per_token = UNIT * dataset["mass_per_token"].sel(span=spans).transpose("span", "prompt", "layer", "head").values
    table = dataset["table"].sel(span=spans).values
    heads, prompts = nanmean(per_token, axis=1), nanmean(per_token, axis=(2, 3))
    names = [escape(span) for span in spans]
    traces = []
    for kind, places in _by_scheme(dataset).items():
        shown = heads[:, places].reshape(len(spans), -1)
        place, head = np.nonzero(np.isfinite(shown))
        traces.append(
            {
                "type": "box",
                "name": scheme_name(kind),
                "x": [names[one] for one in place],
                "y": _numbers(shown[place, head]),
                "marker": {"color": scheme_colour(kind), "size": 3},
                "line": {"width": 1},
                "boxpoints": "outliers",
                "hoverinfo": "y+name",
            }
        )
    place, prompt = np.nonzero(np.isfinite(prompts))
    numbers = dataset["prompt"].values
    traces += [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "a prompt",
            "x": [names[one] for one in place],
            "y": _numbers(prompts[place, prompt]),
            "text": [f"prompt {numbers[one]}" for one in prompt],
            "marker": {"color": "#333333", "symbol": "line-ew-open", "size": 9},
            "hovertemplate": "%{text}: %{y}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "mean (table 4)",
            "x": names,
            "y": _numbers(table),
            "marker": {"color": "#000000", "symbol": "diamond", "size": 9},
            "hovertemplate": "%{x}: %{y}<extra>mean</extra>",
        },
    ]
    positive = table[table > 0]
    log = positive.size > 0 and positive.max() / positive.min() > MASS_LOG_ABOVE
    axes = {
        "xaxis": {"categoryorder": "array", "categoryarray": names},
        "yaxis": {"title": {"text": "mass per token (10<sup>−2</sup>)"}, "type": "log" if log else "linear"},
        "boxmode": "group",
    }
    return {"data": traces, "layout": _layout(**axes)}


def heads_ranked(run: xr.DataTree, span: str = "needle") -> Chart:
    """Every head by its rank in attention mass on `span`, in per cent, coloured by scheme."""
    dataset = group(run, "attention_mass")
    means = UNIT * nanmean(pick(dataset["mass"], span=span).transpose("layer", "head", "prompt").values, axis=2)
    ranking = ranked(means)
    layers, heads = dataset["layer"].values, dataset["head"].values
    traces = []
    for kind, places in _by_scheme(dataset).items():
        own = [(rank, layer, head) for rank, (layer, head) in enumerate(ranking, start=1) if layer in places]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": scheme_name(kind),
                "x": [rank for rank, _, _ in own],
                "y": _numbers([means[layer, head] for _, layer, head in own]),
                "customdata": [[int(layers[layer]), int(heads[head])] for _, layer, head in own],
                "marker": {"color": scheme_colour(kind), "size": 6},
                "hovertemplate": "L%{customdata[0]} H%{customdata[1]}: %{y} %<extra>rank %{x}</extra>",
            }
        )
    uniform = uniform_share(run, span)
    lines = [] if uniform is None else [_level(UNIT * uniform, f"{escape(span)}'s share of the tokens", "dot")]
    return {
        "data": traces,
        "layout": _layout(
            xaxis={"title": {"text": "rank"}},
            yaxis={"title": {"text": f"mass on {escape(span)} (%)"}, "rangemode": "tozero"},
            shapes=lines,
        ),
    }


def pattern_shares(run: xr.DataTree) -> Chart:
    """Stacked shares of the patterns, a bar a head, layer by layer."""
    patterns = group(run, "patterns")
    shares = 100 * patterns["pattern_share"].transpose("layer", "head", "pattern").values
    layers, heads = patterns["layer"].values, patterns["head"].values
    place, head = (axis.ravel() for axis in np.indices(shares.shape[:2]))
    width = len(heads) + max(0.6, 0.12 * len(heads))
    customdata = [[int(layers[one]), int(heads[other])] for one, other in zip(place, head, strict=True)]
    traces = [
        {
            "type": "bar",
            "name": escape(str(name)),
            "x": _numbers(place * width + head),
            "y": _numbers(shares[place, head, code]),
            "customdata": customdata,
            "marker": {"color": PATTERN_COLOURS[str(name)], "line": {"width": 0}},
            "hovertemplate": f"L%{{customdata[0]}} H%{{customdata[1]}}: %{{y}} % {escape(str(name))}<extra></extra>",
        }
        for code, name in enumerate(patterns["pattern"].values)
    ]
    middles = np.arange(len(layers)) * width + (len(heads) - 1) / 2
    return {
        "data": traces,
        "layout": _layout(
            barmode="stack",
            bargap=0.08 if len(heads) <= 8 else 0,
            xaxis={
                "title": {"text": "layer, and its heads from left to right"},
                "tickvals": _numbers(middles),
                "ticktext": [str(layer) for layer in layers],
                "ticklen": 0,
            },
            yaxis={"title": {"text": "share of chunks (%)"}, "range": [0, 100]},
        ),
    }


def position_ranges(run: xr.DataTree) -> Chart:
    """Mean range of every head over prompts, heads side by side within their layer; the mean context length as a line."""
    positions = group(run, "positions")
    ranges = nanmean(positions["position_range"].transpose("layer", "head", "prompt").values, axis=2)
    layers, heads = positions["layer"].values, positions["head"].values
    offsets = np.linspace(-0.32, 0.32, len(heads)) if len(heads) > 1 else np.zeros(1)
    traces = []
    for kind, places in _by_scheme(positions).items():
        own = [(layer, head) for layer in places for head in range(len(heads)) if np.isfinite(ranges[layer, head])]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": scheme_name(kind),
                "x": _numbers([layer + offsets[head] for layer, head in own]),
                "y": _numbers([ranges[layer, head] for layer, head in own]),
                "customdata": [[int(layers[layer]), int(heads[head])] for layer, head in own],
                "marker": {"color": scheme_colour(kind), "size": 6},
                "hovertemplate": "L%{customdata[0]} H%{customdata[1]}: %{y} positions<extra></extra>",
            }
        )
    positive = ranges[np.isfinite(ranges) & (ranges > 0)]
    context = float(positions["token_count"].mean())
    log = positive.size > 0 and positive.size == np.isfinite(ranges).sum() and context / positive.min() > LOG_ABOVE
    ticks = {"tickvals": list(range(len(layers))), "ticktext": [str(layer) for layer in layers]}
    return {
        "data": traces,
        "layout": _layout(
            xaxis={"title": {"text": "layer"}, **ticks},
            yaxis={"title": {"text": "range (positions)"}, "type": "log" if log else "linear"},
            shapes=[_level(context, "context length", "dash")],
        ),
    }


def _by_scheme(dataset: xr.Dataset) -> dict[str, list[int]]:
    """Places of the layers of each scheme."""
    places: dict[str, list[int]] = {}
    for place, scheme in enumerate(schemes(dataset).values()):
        places.setdefault(scheme, []).append(place)
    return places


def _level(value: float, name: str, dash: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": _numbers([value])[0],
        "y1": _numbers([value])[0],
        "line": {"color": "#222222", "width": 1, "dash": dash},
        "name": name,
        "showlegend": True,
    }


def _layout(**given: Any) -> dict[str, Any]:
    return {"hovermode": "closest", **given}


def _numbers(values: Any) -> list[float | None]:
    """Numbers with six significant digits, for JSON; None for what is no number."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float).ravel()]
