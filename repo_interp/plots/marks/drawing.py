"""Marks that several figures share: legends, swatches of schemes, panels, color bars, notes.

This module knows axes and arrays, and nothing about runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from repo_interp.plots.glyphs import legible
from repo_interp.plots.marks.reading import UNKNOWN
from repo_interp.plots.style import (
    COLUMN_WIDTH,
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    scheme_name,
)

LEGEND_ENTRY, LEGEND_LETTER = 0.3, 0.054
"""Widths of the mark of a legend entry and of a letter of its text, in inches."""


def scheme_handles(schemes: Iterable[str], marker: str = "s") -> list[Line2D]:
    """Make legend entries of position schemes, without repeats.

    Args:
        schemes: Schemes, possibly repeated.
        marker: Marker of matplotlib.

    Returns:
        One entry per scheme; none for a single scheme, which the axis names (`scheme_swatches`).
    """
    named = [*dict.fromkeys(filter(None, schemes))]
    return [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=marker,
            markersize=4,
            color=scheme_colour(scheme),
            label=scheme_name(scheme),
        )
        for scheme in (named if len(named) > 1 else ())
    ]


def legend_below(
    figure: Figure, handles: Sequence[Patch | Line2D], length: float | None = None
) -> None:
    """Draw a legend below the figure, in as few rows as the width allows.

    Args:
        figure: Figure to write on.
        handles: Legend entries; a single entry needs no legend, and none is drawn.
        length: Length of the entries' marks in font sizes; None: matplotlib's.
    """
    if len(handles) > 1:
        more = (
            0.0
            if length is None
            else (length - mpl.rcParams["legend.handlelength"])
            * mpl.rcParams["legend.fontsize"]
            / 72
        )
        # Widths are estimated by letters: measuring them would need a drawn figure.
        widths = [
            LEGEND_ENTRY + more + LEGEND_LETTER * len(legible(str(handle.get_label())))
            for handle in handles
        ]
        # matplotlib fills columns one after the other; each is as wide as its widest entry
        columns = next(
            # The least number of rows that fits the width; columns = widths / rows, rounded up
            -(-len(widths) // rows)
            for rows in range(1, len(widths) + 1)
            if rows == len(widths)
            or sum(max(widths[start : start + rows]) for start in range(0, len(widths), rows))
            <= figure.get_figwidth()
        )
        figure.legend(
            handles=list(handles),
            loc="outside lower center",
            ncols=columns,
            borderpad=0.1,
            handlelength=length,
        )


def lone_entry(handles: Sequence[Patch | Line2D], mark: str) -> str:
    """Write a legend of one entry in words instead of drawing it: "shaded: needle".

    Args:
        handles: Legend entries.
        mark: Name of the entry's mark.

    Returns:
        The text; empty without entries and with several.
    """
    return f"{mark}: {handles[0].get_label()}" if len(handles) == 1 else ""


def colour_bar(
    figure: FigureBase,
    image: ScalarMappable,
    axes: Axes | Sequence[Axes],
    label: str = "",
    **options: Any,
) -> Colorbar:
    """Draw a color bar without a frame beside some axes.

    Args:
        figure: Figure or subfigure of the axes.
        image: Image or collection with the color map.
        axes: Axes that give the bar its space.
        label: Label of the bar.
        **options: Passed to matplotlib's `colorbar`.

    Returns:
        The color bar.
    """
    bar = figure.colorbar(image, ax=axes, label=label, **options)
    cast(Any, bar.outline).set_visible(False)
    return bar


def panels(
    count: int,
    columns: int,
    height: float,
    around: float,
    width: float | None = None,
    **options: Any,
) -> tuple[PaperFigure, list[Axes]]:
    """Make a figure of panels, row by row; places left over are empty.

    Args:
        count: Number of panels.
        columns: Most panels in a row.
        height: Height of a row in inches.
        around: Inches that are added to the height of all rows.
        width: Width in inches; None: the width of a page, or of a column if rows have one panel.
        **options: Passed to matplotlib's `subplots`.

    Returns:
        The figure and the axes of its panels.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = (PAGE_WIDTH if columns > 1 else COLUMN_WIDTH) if width is None else width
    figure = paper_figure(width, min(PAGE_HEIGHT, around + height * rows))
    # On a caller's axes only a figure with one panel can be drawn
    if count == 1:
        return figure, [figure.subplots()]
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def bare(ax: Axes) -> None:
    """Remove the frame of the axes and the marks of their ticks, as around a map.

    Args:
        ax: Axes to draw on.
    """
    ax.spines[:].set_visible(False)
    ax.tick_params(which="both", length=0)


def say(ax: Axes, text: str, place: float | None = None, colour: str = "#8A8A8A") -> None:
    """Write that something is not there.

    Args:
        ax: Axes to draw on.
        text: Text to write.
        place: x of vertical text; None: horizontal text in the middle of the axes.
        colour: Color of the text.
    """
    along = ax.transAxes if place is None else ax.get_xaxis_transform()
    look: Any = {
        "ha": "center",
        "va": "center",
        "color": colour,
        "rotation": 0 if place is None else 90,
    }
    ax.text(0.5 if place is None else place, 0.5, text, transform=along, **look)


def note(
    ax: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    size: float,
    **look: Any,
) -> None:
    """Write a text next to a point, centered vertically.

    Args:
        ax: Axes to draw on.
        text: Text to write.
        point: x and y of the point, in data coordinates.
        offset: Distance from the point, in points of the paper.
        size: Size of the letters, in points.
        **look: Passed to matplotlib's `annotate`.
    """
    ax.annotate(
        text,
        point,
        xytext=offset,
        textcoords="offset points",
        fontsize=size,
        **{"va": "center", **look},
    )


def scheme_swatches(ax: Axes, schemes: Mapping[int, str], axis: Literal["x", "y"]) -> None:
    """Draw a bar in the color of the scheme next to every layer of an axis.

    If all layers have one scheme, the label of the axis names it, and there are no bars.

    Args:
        ax: Axes to draw on; the axis must have its label already.
        schemes: Scheme by place along the axis; "" draws no bar.
        axis: Axis whose unit steps are layers.
    """
    named = {*schemes.values()} - {""}
    if len(named) < 2:
        ax.tick_params(axis=axis, which="both", length=0)
        label = (ax.xaxis if axis == "x" else ax.yaxis).label
        known = [scheme_name(scheme) for scheme in named - {UNKNOWN}]
        label.set_text(" ".join([label.get_text(), *(f"({name})" for name in known)]))
        return
    along = ax.get_yaxis_transform() if axis == "y" else ax.get_xaxis_transform()
    # In points, not data: thickness and distance of the bars do not depend on the size of the map
    aside = offset_copy(
        along,
        ax.get_figure(root=True),
        *((-3.5, 0.0) if axis == "y" else (0.0, -3.5)),
        units="points",
    )
    for place, (layer, scheme) in enumerate(schemes.items()):
        if not scheme:
            continue
        ends = ([0, 0], [place - 0.5, place + 0.5])
        bar = Line2D(
            *(ends if axis == "y" else ends[::-1]),
            transform=aside,
            # They lie outside of the axes
            clip_on=False,
            solid_capstyle="butt",
        )
        bar.set(color=scheme_colour(scheme), linewidth=3, gid=f"scheme {layer} {scheme}")
        ax.add_line(bar)
    # Tick labels move behind the bars
    ax.tick_params(axis=axis, which="both", length=0, pad=7)


def write_cells(ax: Axes, values: np.ndarray, pattern: str, inks: np.ndarray) -> None:
    """Write numbers into the cells of an image, without a frame.

    Args:
        ax: Axes to draw on.
        values: Numbers [row, column]; only finite ones are written.
        pattern: Format of a number, such as ".3g".
        inks: Color of the text of every cell.
    """
    for row, column in np.argwhere(np.isfinite(values)):
        # A small negative number would be written as minus zero
        text = format(values[row, column], pattern).replace("-0.000", "0.000")
        ax.text(column, row, text, ha="center", va="center", fontsize=5.6, color=inks[row, column])
    bare(ax)


def envelope(values: np.ndarray, bins: int) -> np.ndarray:
    """Choose the values of a long line that keep its looks.

    Args:
        values: Numbers [x].
        bins: Width of the line in pixels.

    Returns:
        Ascending indices: all of them for a short line, else the extremes within every bin.
    """
    # A bin may keep two values, so a line this short has nothing to drop.
    if values.size <= 2 * bins:
        return np.arange(values.size)
    # The ends of a line are kept even if they are not extremes.
    shown: set[int] = {0, values.size - 1}
    for part in np.array_split(np.arange(values.size), bins):
        finite = part[np.isfinite(values[part])]
        if finite.size:
            shown.update(
                (int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()]))
            )
        else:
            shown.add(int(part[0]))
    return np.array(sorted(shown))


def counted(count: int, thing: str) -> str:
    """Write a count with its noun: "1 prompt", "2,000 prompts".

    Args:
        count: Number of things.
        thing: Noun in the singular.

    Returns:
        The text.
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def number(value: float) -> str:
    """Write a number as a label, with three significant digits.

    Args:
        value: Number to write.

    Returns:
        Text without an exponent if the number lies between 0.0001 and 100,000.
    """
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "–"
    size = abs(value)
    if size >= 1e5 or size < 1e-4:
        return f"{value:.1e}"
    # Three significant digits: as many decimals as are left of them
    digits = max(0, 2 - int(np.floor(np.log10(size))))
    return f"{value:.{digits}f}"


def contiguous(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Group neighboring indices: (3, 4, 5, 9) -> (3, 5), (9, 9).

    Args:
        indices: Ascending indices.

    Returns:
        The first and the last index of every stretch.
    """
    stretches: list[tuple[int, int]] = []
    for index in sorted(indices):
        if stretches and index == stretches[-1][1] + 1:
            stretches[-1] = (stretches[-1][0], index)
        else:
            stretches.append((index, index))
    return stretches
