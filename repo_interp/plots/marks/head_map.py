"""Values of every head, layer by layer: a map, dots with their null, a table by layer.

On a page, a click on the map opens a head.

    map    a cell per layer and head; values of both signs diverge from 0
    dot    mean over prompts of the head's score        gray bar   the same of its null

Heads go from left to right within their layer. This module knows no measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repo_interp.plots.marks.arrays import MEAN, digits_of, nanmean, nested_digits, over_prompts
from repo_interp.plots.marks.axis_scales import name_ticks, plain_decades, signed_decades
from repo_interp.plots.marks.chart import Drawing
from repo_interp.plots.marks.drawing import (
    colour_bar,
    legend_below,
    panels,
    say,
    scheme_handles,
    scheme_swatches,
)
from repo_interp.plots.marks.panels import MISSING, WRITTEN, draw_cells, scale, shades
from repo_interp.plots.marks.reading import head_axes, schemes, unit_label
from repo_interp.plots.marks.table import Cell, Table, cells
from repo_interp.plots.style import (
    COLUMN_WIDTH,
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    scheme_name,
    style,
)

CONTROL = "#8A8A8A"
"""Color of a null."""
RANGE = "smallest to largest prompt"
"""Text of the thin line of a head in the legend."""
LOG_ABOVE = 50.0
"""Ratio of the largest to the smallest value of a head from which an axis is logarithmic."""
TICK = 0.18
"""Width of the label of a layer in inches."""
ROW = 3
"""Panels of dots in a row."""
_LEVEL: Mapping[str, Any] = {"color": "#222222", "linestyle": "--", "linewidth": 0.7}


@dataclass(frozen=True)
class Heads(Drawing):
    """`values` [layer, head] with `long_name` and `units`, as a figure and as the page's map.

    `control` holds their null.
    """

    values: xr.DataArray
    control: xr.DataArray | None = None
    prompts: xr.DataArray | None = None
    """The same [prompt, layer, head], of which `values` are the means."""
    colours: np.ndarray | None = None
    """Colors [layer, head], if they do not represent the values."""
    texts: xr.DataArray | None = None
    """Texts [layer, head] that `values` are numbers of, such as kinds, and "" for none."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Meaning of each text; a page without positions opens with such a map."""
    live: bool = field(default=True, kw_only=True)

    @style()
    def figure(self) -> PaperFigure:
        """The map of the values."""
        values = self.values
        width = COLUMN_WIDTH if values.sizes["head"] <= 20 else PAGE_WIDTH
        figure = paper_figure(width, 0.9 + 0.15 * max(8, values.sizes["layer"]))
        head_grid(values, figure.subplots())
        legend_below(figure, scheme_handles(schemes(values).values()))
        return figure

    def data(self) -> dict[str, Any]:
        """The map as JSON.

        It has `values` and `control` by layer and head with six significant digits, the color of
        every cell, and the prompts that the values are means over.
        """
        values = self.values.transpose("layer", "head")
        data = values.values.astype(float)
        colours, norm = scale(data)
        # [layer, head] of texts, from [layer, head, rgba]
        cells = np.vectorize(to_hex, signature="(n)->()")(mpl.colormaps[colours](norm(data)))
        control = None if self.control is None else self.control.transpose("layer", "head")
        prompts = (
            None if self.prompts is None else self.prompts.transpose("prompt", "layer", "head")
        )
        return {
            "title": _title(values),
            "variable": str(values.name or ""),
            "texts": None
            if self.texts is None
            else self.texts.transpose("layer", "head").values.tolist(),
            "meanings": dict(self.meanings) or None,
            "mean": str(values.attrs.get(MEAN, "")),
            **head_axes(values),
            "values": nested_digits(data),
            "colours": np.where(
                np.isfinite(data), cells if self.colours is None else self.colours, MISSING
            ).tolist(),
            "scale": shades(colours) if self.colours is None else None,
            "ends": digits_of([norm.vmin, norm.vmax]),
            "prompts": {
                "numbers": prompts["prompt"].values.tolist(),
                "values": nested_digits(prompts.values),
            }
            if prompts is not None and prompts.sizes["prompt"] > 1
            else None,
            "control": None if control is None else nested_digits(control.values),
        }


def head_grid(values: xr.DataArray, ax: Axes, limits: tuple[float, float] | None = None) -> Axes:
    """Draw one number per head as a map of layers and heads.

    The name and the units of the array become the title. NaN is gray. Values of both signs diverge
    from 0. If there are few heads, their values are written in the cells.

    Args:
        values: Numbers (layer, head).
        ax: Axes to draw on.
        limits: Ends of the colors; they diverge from 0 if these have both signs. None: the ends of
            `values`.

    Returns:
        `ax`.
    """
    values = values.transpose("layer", "head")
    colours, norm = (
        scale(values.values)
        if limits is None
        else (scale(np.array(limits))[0], Normalize(*limits, clip=True))
    )
    few = values.sizes["layer"] <= WRITTEN[0] and values.sizes["head"] <= WRITTEN[1]
    shown = draw_cells(ax, values, {"cmap": colours, "norm": norm}, ".3g" if few else "")
    colour_bar(ax.figure, shown, ax, pad=0.02, fraction=0.05)
    ax.set_title("\n".join(filter(None, [_title(values), str(values.attrs.get(MEAN, ""))])))
    return ax


@dataclass(frozen=True)
class HeadDots(Drawing):
    """Panels with one dot per head and a gray bar of its null, by title.

    Heads of a layer are drawn from left to right; a thin line spans the smallest to the largest
    prompt. Attributes of values: `limits` of the axis, and `least`, below which a change is
    rounding.
    """

    name: str = field()
    panels: Mapping[str, tuple[xr.DataArray, xr.DataArray]]
    """Values and their null [layer, head] or [prompt, layer, head]."""
    control: str
    """Text of the null in the legend."""
    label: str
    levels: Mapping[str, float] = field(default_factory=dict)
    """Height of a dashed line by the title of its panel."""
    level: str = ""
    """Text of that line in the legend."""

    @style()
    def figure(self) -> PaperFigure:
        """The chart as a figure."""
        figure, axes = panels(len(self.panels), ROW, 1.9, 0.6, PAGE_WIDTH)
        kinds: dict[str, None] = {}
        for ax, (title, (values, control)) in zip(axes, self.panels.items(), strict=True):
            _draw_by_head(ax, values, over_prompts(control))
            # Panels may have different layers: the legend names the schemes of all
            kinds |= dict.fromkeys(schemes(values).values())
            if title in self.levels:
                ax.axhline(self.levels[title], **_LEVEL, gid="level")
            scale = ""
            if "limits" in values.attrs:
                ax.set_ylim(*values.attrs["limits"])
            else:
                scale = _scale_heads(ax, values, self.levels.get(title))
            ax.set_title("\n".join(filter(None, (title, scale))))
        for ax in axes[::ROW]:
            ax.set_ylabel(self.label)
        ink = scheme_colour(next(iter(kinds)))
        several = any(values.sizes.get("prompt", 1) > 1 for values, _ in self.panels.values())
        marks = {
            # With one scheme, which the axis names, the legend explains the dot
            "head": {"color": ink, "marker": "o", "markersize": 4, "linestyle": "none"},
            RANGE: {"color": ink, "linewidth": 0.6, "alpha": 0.45} if several else {},
            self.control: {"color": CONTROL, "linewidth": 1.4},
            self.level: _LEVEL,
        }
        named = scheme_handles(kinds, "o")
        if named:
            del marks["head"]
        lines = [
            Line2D([], [], **look, label=label) for label, look in marks.items() if label and look
        ]
        legend_below(figure, [*named, *lines])
        return figure


def _draw_by_head(ax: Axes, values: xr.DataArray, control: xr.DataArray) -> None:
    """Draw one dot per head, from left to right within the layers."""
    named = schemes(values)
    ends = [values.min("prompt"), values.max("prompt")] if "prompt" in values.dims else []
    parts = [
        part.transpose("layer", "head").values for part in (over_prompts(values), control, *ends)
    ]
    heads = values.sizes["head"]
    offsets = np.linspace(-0.36, 0.36, heads) if heads > 1 else np.zeros(1)
    # Bars of neighboring heads do not touch: 0.72 is the width of all heads of a layer
    half = 0.45 * min(0.28, 0.72 / max(1, heads - 1))
    for place, (scheme, *of_layer) in enumerate(zip(named.values(), *parts, strict=True)):
        known, colour = np.isfinite(of_layer[0]), scheme_colour(scheme)
        if not known.any():
            say(ax, "none", place)
            continue
        x, (central, beside, *spread) = place + offsets[known], (part[known] for part in of_layer)
        ax.hlines(beside, x - half, x + half, color=CONTROL, linewidth=1.4, gid=f"control {place}")
        if spread:
            ax.vlines(x, *spread, color=colour, alpha=0.45, linewidth=0.6, gid=f"range {place}")
        size = 3.0 if heads <= 16 else 1.8
        look = {"color": colour, "markersize": size, "markeredgewidth": 0}
        ax.plot(x, central, "o", **look, gid=f"heads {place}")
    # Labels of narrow panels would touch
    inches = ax.bbox.width / cast(Figure, ax.get_figure(root=True)).dpi
    name_ticks(ax.xaxis, named, max(2, int(inches / TICK)))
    ax.set(xlabel="layer", xlim=(-0.6, len(named) - 0.4))
    ax.grid(axis="y")
    scheme_swatches(ax, named, "x")


def _scale_heads(ax: Axes, values: xr.DataArray, level: float | None) -> str:
    """Make the axis logarithmic where values spread far; of both signs, say so in words."""
    # The dashed level is drawn too, and must lie within a logarithmic axis
    beside = [] if level is None else [level]
    finite = np.append(values.values[np.isfinite(values.values)], beside)
    sizes, least = np.abs(finite[finite != 0]), values.attrs.get("least", 0.0)
    # A change below `least` is rounding, and would stretch a logarithmic axis for nothing
    small = max(least, sizes.min(initial=np.inf))
    if sizes.max(initial=0.0) > LOG_ABOVE * small:
        if finite.min() > 0:
            ax.set_yscale("log")
            plain_decades(ax.yaxis)
        else:
            return signed_decades(ax, "y", small)
    elif finite.min(initial=0.0) >= 0:
        ax.set_ylim(0, None)
    return ""


def head_rows(
    columns: Sequence[xr.DataArray], heads: Iterable[tuple[int, int]]
) -> list[tuple[Cell, ...]]:
    """Make rows of a table with one row per head.

    Args:
        columns: Numbers [layer, head], a column for every array.
        heads: Labels (layer, head) in the order of the rows.

    Returns:
        Rows of layer, head, scheme and the numbers.
    """
    named = schemes(columns[0])
    return [
        (
            layer,
            head,
            scheme_name(named[layer]),
            *cells(column.sel(layer=layer, head=head) for column in columns),
        )
        for layer, head in heads
    ]


def layer_table(name: str, title: str, values: Mapping[str, xr.DataArray], note: str) -> Table:
    """Make a table with one row per layer and a last one for all layers of each scheme.

    Args:
        name: Name of the table's file.
        title: Title of the table.
        values: Numbers [layer, head] by the name of their column.
        note: Text below the table.

    Returns:
        Means over heads, and the smallest and the largest head of the first array.
    """
    main, *_ = columns = list(values.values())
    named = schemes(main)
    parts = [(str(layer), scheme_name(scheme), layer) for layer, scheme in named.items()]
    kinds: dict[str, list[int]] = {}
    for layer, scheme in named.items():
        kinds.setdefault(scheme_name(scheme), []).append(layer)
    parts += [("all", kind if len(kinds) > 1 else "", layers) for kind, layers in kinds.items()]
    rows = []
    for label, scheme, layers in parts:
        ends = main.sel(layer=layers).min(), main.sel(layer=layers).max()
        means = (nanmean(column.sel(layer=layers).values) for column in columns)
        rows.append((label, scheme, *cells((*ends, *means))))
    return Table(
        name,
        title,
        ("layer", "scheme", "smallest head", "largest head", *values),
        tuple(rows),
        note,
    )


def _title(values: xr.DataArray) -> str:
    return unit_label(str(values.attrs.get("long_name") or values.name or ""), values)
