"""Cells of two axes: a map on given axes, and panels of maps side by side on one color scale.

This module knows no measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm, to_hex
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle

from repo_interp.plots.marks.axis_scales import name_ticks
from repo_interp.plots.marks.chart import Drawing
from repo_interp.plots.marks.drawing import (
    bare,
    colour_bar,
    legend_below,
    lone_entry,
    scheme_handles,
    scheme_swatches,
    write_cells,
)
from repo_interp.plots.marks.reading import axis_label, schemes
from repo_interp.plots.style import (
    COLUMN_WIDTH,
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    style,
)

MISSING = "#D9D9D9"
"""Color of a cell without a value."""
WRITTEN = (16, 8)
"""Most layers and heads of a map with values written in the cells."""
SHADES = 9
"""Colors of a scale next to a map in a page."""
UPPER = 0.5
"""If all values are above this share of the largest one, a scale does not start at 0."""
FEW, CLIPPED = 1024, 99.5
"""Number of values above which a color scale of both signs ends at this percentile of their sizes.
"""


@dataclass(frozen=True)
class Panels(Drawing):
    """Panels of cells [row, column] by their titles.

    Values are written into the cells by the format `pattern`.
    """

    name: str = field()
    panels: Mapping[str, xr.DataArray]
    title: str = ""
    pattern: str = ".3g"
    look: Mapping[str, Any] = field(default_factory=dict)
    """Color map and scale; by default from all values together."""
    looks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same of single panels."""
    shown: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Numbers that the colors of a panel represent, if not its values."""
    bar: Mapping[str, Any] | None = None
    """Options of matplotlib's `colorbar`; None: no bar."""
    handles: Sequence[Patch] = ()
    """Legend of colors that represent names; white lines then separate the cells."""
    chosen: tuple[int, int] | None = None
    """Row and column of a cell with a frame."""
    cell: float = 0.26
    """Inches of a row."""
    width: float = 0.0
    """Inches of the figure; 0: as many as its cells need."""

    @style()
    def figure(self) -> PaperFigure:
        """The panels, the color bar to their right, the legend of schemes below."""
        arrays = list(self.panels.values())
        # All panels have the same axes, so the first one determines their size
        rows, columns = arrays[0].shape
        width = self.width or min(PAGE_WIDTH, max(COLUMN_WIDTH, 0.7 + 0.4 * columns * len(arrays)))
        # The cells have at least an inch of height; 0.95 is for titles, labels and the legend
        figure = paper_figure(
            width, min(PAGE_HEIGHT, 0.95 + self.cell * max(1.0 / self.cell, rows))
        )
        axes = figure.subplots(1, len(arrays), sharey=True, squeeze=False)[0].tolist()
        colours, norm = scale(np.stack([array.values for array in arrays]).astype(float))
        of_layers, images = arrays[0].dims[0] == "layer", []
        crowded = of_layers and not self.handles and (rows > WRITTEN[0] or columns > WRITTEN[1])
        # Labels of many narrow panels would touch
        most = min(16, 48 // len(arrays))
        for ax, (title, array) in zip(axes, self.panels.items(), strict=True):
            look = self.looks.get(title) or self.look or {"cmap": colours, "norm": norm}
            pattern, shown = "" if crowded else self.pattern, self.shown.get(title)
            images.append(draw_cells(ax, array, look, pattern, shown, most))
            ax.set_title(title)
            if self.handles:
                ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
                ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
                ax.grid(which="minor", color="white", linewidth=0.8)
            if ax is not axes[0]:
                ax.set_ylabel("")
            if self.chosen is not None:
                # imshow centers cells on whole numbers
                corner = self.chosen[1] - 0.5, self.chosen[0] - 0.5
                ax.add_patch(
                    Rectangle(
                        corner, 1, 1, fill=False, edgecolor="black", linewidth=1.2, gid="choice"
                    )
                )
        if self.bar is not None:
            colour_bar(figure, images[0], axes, **{"pad": 0.01, "fraction": 0.03, **self.bar})
        handles = [*self.handles, *scheme_handles(schemes(arrays[0]).values())] if of_layers else []
        if title := "; ".join(filter(None, (self.title, lone_entry(handles, "color")))):
            figure.suptitle(title, x=0.01, ha="left")
        legend_below(figure, handles)
        return figure


def draw_cells(
    ax: Axes,
    values: xr.DataArray,
    look: Mapping[str, Any],
    pattern: str = "",
    shown: np.ndarray | None = None,
    most: int = 16,
) -> AxesImage:
    """Draw an array as an image with labels along its axes.

    Swatches show the schemes of layers if rows are layers.

    Args:
        ax: Axes to draw on.
        values: Numbers [row, column].
        look: Options of the image, such as its color map and scale.
        pattern: Format of the numbers in the cells; "" writes none.
        shown: Numbers that the colors represent; None: `values`.
        most: Largest number of labels along an axis.

    Returns:
        The image, for its color bar.
    """
    row, column = map(str, values.dims)
    numbers = values.values.astype(float)
    shown = numbers if shown is None else shown
    image = ax.imshow(shown, aspect="auto", interpolation="nearest", **look)
    # NaN is transparent in an image, so the ground shows through
    ax.set_facecolor(MISSING)
    for axis, dim in ((ax.xaxis, column), (ax.yaxis, row)):
        name_ticks(axis, map(_label, values[dim].values.tolist()), most)
        axis.set_label_text(axis_label(values, dim))
    if pattern:
        # Perceived lightness of a cell decides between black and white text.
        lightness = np.asarray(image.to_rgba(shown))[..., :3] @ (0.3, 0.59, 0.11)
        write_cells(ax, numbers, pattern, np.where(lightness > 0.5, "black", "white"))
    bare(ax)
    if row == "layer" and "scheme" in values.coords:
        scheme_swatches(ax, schemes(values), "y")
    return image


def _label(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:g}"
    )


def scale(data: np.ndarray) -> tuple[str, Normalize]:
    """Choose a color map and its ends for some numbers.

    Args:
        data: Numbers of any shape.

    Returns:
        The color map, and a scale that diverges from 0 for values of both signs, and else starts at
        0, or at the smallest value if that is negative or above half of the largest.
    """
    finite = data[np.isfinite(data)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low < 0 < high:
        return "PuOr", TwoSlopeNorm(0, -reach(finite), reach(finite))
    # If the scale began at 0, values that are all large would have almost the same color.
    start = low if high > low > UPPER * high else min(0.0, low)
    # A scale needs two different ends, also if all values are 0 or one negative number.
    return "cividis", Normalize(start, high if high > low or high > 0 else low + 1)


def shades(name: str) -> list[str]:
    """Sample a color map.

    Args:
        name: Name of the color map.

    Returns:
        `SHADES` colors from its lower to its upper end, as "#rrggbb".
    """
    return [to_hex(shade) for shade in mpl.colormaps[name](np.linspace(0, 1, SHADES))]


def reach(finite: np.ndarray) -> float:
    """Choose the end of a scale around 0.

    Args:
        finite: Finite numbers.

    Returns:
        The largest absolute value; of many values, without the very largest.
    """
    sizes = np.abs(finite)
    largest = sizes.max(initial=0.0) or 1.0
    # A few outliers would make all other cells pale.
    return float((np.percentile(sizes, CLIPPED) if sizes.size > FEW else 0.0) or largest)


def colour_map(name: str, *colours: str) -> LinearSegmentedColormap:
    """Make a color map from white through some colors.

    Args:
        name: Name of the color map.
        *colours: Colors in order.

    Returns:
        The color map.
    """
    return LinearSegmentedColormap.from_list(name, ["#FFFFFF", *colours])
