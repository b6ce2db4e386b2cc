r"""Marks that several figures share.

Shaded spans, the ribbon of their parts, swatches of schemes, thinned lines, and token labels.

    " the" -> "␣the"   newline -> "↵"   tab -> "⇥"   nothing -> "∅"   invisible or missing glyph -> "\u200b"

Knows axes and arrays; knows nothing about runs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal, cast

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter, SymmetricalLogLocator
from matplotlib.transforms import offset_copy

from repo_interp.plots.marks.reading import PromptTokens
from repo_interp.plots.style import (
    COLUMN_WIDTH,
    PAGE_HEIGHT,
    PAGE_WIDTH,
    PaperFigure,
    code_of,
    is_drawable,
    legible,
    paper_figure,
    scheme_colour,
    scheme_name,
    span_colours,
)

LONGEST = 14
"""Characters of a token label; longer tokens end in an ellipsis."""
SHADE = 0.3
"""Opacity of a shaded span."""
LEGEND_ENTRY, LEGEND_LETTER = 0.3, 0.054
"""Inches that the mark of a legend entry and a letter of its text need."""
RIBBON = 0.035
"""Height of the ribbon of parts, in axes."""
_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def shade_spans(ax: Axes, spans: Mapping[str, Sequence[int]], names: Sequence[str]) -> None:
    """Shade the tokens of every top-level span over the height of the axes.

    Args:
        ax: Axes to draw on.
        spans: Tokens of the spans by name, as indices.
        names: All span names of the figure; they fix the colours.
    """
    colours = span_colours(names)
    for name, tokens in spans.items():
        # Parts of a span lie within their parent, whose shade they would darken
        if "." in name:
            continue
        for first, last in contiguous(tokens):
            patch = ax.axvspan(
                first - 0.5, last + 0.5, facecolor=colours[name], alpha=SHADE, linewidth=0, zorder=0
            )
            # Ids in the SVG, by which tests find the parts of a figure
            patch.set_gid(f"span {name}")


def part_ribbon(ax: Axes, spans: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[str]:
    """Draw the deepest parts of spans ("needle.1.key") as a ribbon along the top.

    Parts have shades of the colour of their parent.

    Args:
        ax: Axes to draw on.
        spans: Tokens of the spans by name, as indices.
        names: All span names of the figure; they fix the colours.

    Returns:
        Names of the parts that were drawn.
    """
    colours = span_colours(names)
    parts = [
        name
        for name in spans
        if "." in name and not any(other.startswith(name + ".") for other in spans)
    ]
    for name in parts:
        for first, last in contiguous(spans[name]):
            patch = Rectangle(
                (first - 0.5, 1 - RIBBON),
                last - first + 1,
                RIBBON,
                # x in tokens, y as a share of the axes: always at the top
                transform=ax.get_xaxis_transform(),
            )
            patch.set(facecolor=colours[name], linewidth=0, zorder=3, gid=f"part {name}")
            ax.add_patch(patch)
    return parts


def span_handles(spans: Iterable[str], names: Sequence[str]) -> list[Patch]:
    """Make legend entries of spans: shaded as on the axes, solid for parts.

    Args:
        spans: Names to list.
        names: All span names of the figure; they fix the colours.

    Returns:
        One patch per span.
    """
    colours = span_colours(names)
    return [
        Patch(facecolor=colours[name], alpha=1.0 if "." in name else SHADE, label=name)
        for name in spans
    ]


def scheme_handles(schemes: Iterable[str], marker: str = "s") -> list[Line2D]:
    """Make legend entries of position schemes, without repeats.

    Args:
        schemes: Schemes, possibly repeated.
        marker: Marker of matplotlib.

    Returns:
        One entry per scheme.
    """
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
        for scheme in dict.fromkeys(schemes)
    ]


def legend_below(
    figure: Figure, handles: Sequence[Patch | Line2D], length: float | None = None
) -> None:
    """Put a legend below everything else, in as few rows as the width allows.

    Args:
        figure: Figure to write on.
        handles: Legend entries.
        length: Length of the entries' marks in font sizes; None: matplotlib's.
    """
    if handles:
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
            # The fewest rows whose columns fit into the figure; columns = widths / rows, rounded up
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


def colour_bar(
    figure: FigureBase,
    image: ScalarMappable,
    axes: Axes | Sequence[Axes],
    label: str = "",
    **options: Any,
) -> Colorbar:
    """Draw a colour bar without a frame beside some axes.

    Args:
        figure: Figure or subfigure of the axes.
        image: Image or collection with the colour map.
        axes: Axes that give the bar its space.
        label: Label of the bar.
        **options: Passed to matplotlib's `colorbar`.

    Returns:
        The colour bar.
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
    # a caller's axes hold a figure that asks for one alone
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
        place: x of text that is written upright; None: in the middle of the axes.
        colour: Colour of the text.
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
    """Write a text beside a point, centred vertically.

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


def training_line(ax: Axes, training_length: float) -> None:
    """Draw a dotted vertical line at the training length.

    Args:
        ax: Axes to draw on.
        training_length: Length in tokens.
    """
    ax.axvline(
        float(training_length),
        color="#222222",
        linewidth=0.6,
        linestyle=(0, (1, 1.5)),
        gid="training length",
    )


def double_axis(ax: Axes, lengths: np.ndarray) -> None:
    """Make x an axis that doubles, and name all lengths on it.

    Args:
        ax: Axes to draw on.
        lengths: Positive lengths.
    """
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,.12g}" for length in lengths])
    ax.minorticks_off()


def scheme_swatches(ax: Axes, schemes: Mapping[int, str], axis: Literal["x", "y"]) -> None:
    """Draw a bar in the colour of its scheme beside every layer of an axis.

    Args:
        ax: Axes to draw on.
        schemes: Scheme by place along the axis; "" draws no bar.
        axis: Axis whose unit steps are layers.
    """
    along = ax.get_yaxis_transform() if axis == "y" else ax.get_xaxis_transform()
    # Points, not data: the bars stay as thin and as near whatever the size of the map
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


def sparse_ticks(labels: Sized, most: int) -> list[int]:
    """Choose evenly spread tick labels, the first among them.

    Args:
        labels: Labels, or anything with a length.
        most: Largest number of ticks.

    Returns:
        Indices of the chosen labels.
    """
    step = max(1, -(-len(labels) // most))
    return list(range(0, len(labels), step))


def name_ticks(axis: Axis, labels: Iterable[Any], most: int) -> None:
    """Name the places 0, 1, ... of an axis by evenly spread labels.

    Args:
        axis: `ax.xaxis` or `ax.yaxis`.
        labels: Label of every place.
        most: Largest number of labels to write; the first is among them.
    """
    labels = list(labels)
    places = sparse_ticks(labels, most)
    axis.set_ticks(places, [str(labels[place]) for place in places])


def label_tokens(
    ax: Axes,
    tokens: PromptTokens | None,
    ranked: Iterable[int],
    most: int,
    ink: Callable[[int], str] = lambda token: "#333333",
    shown: str = "token index and {}",
) -> None:
    """Label an axis of tokens with indices and upright texts.

    Args:
        ax: Axes to draw on.
        tokens: Texts of the tokens; None: the axis has indices alone.
        ranked: Tokens to name, the most important first.
        most: Largest number of texts.
        ink: Colour of the text of a token.
        shown: Label of the axis if it has texts; {} stands for the kind of texts.
    """
    ax.locator_params(axis="x", nbins=10, integer=True)
    ax.set_xlabel("token index")
    if tokens is None or tokens.texts is None:
        return
    ax.set_xlabel(shown.format(tokens.texts_are))
    # matplotlib would drop the minor ticks at the places of major ones.
    ax.xaxis.remove_overlapping_locs = False
    # Upright texts need a width each, and important tokens are placed first
    places = thin(ranked, max(1.0, tokens.count / most))
    ax.set_xticks(places, [token_label(tokens.text(token)) for token in places], minor=True)
    ax.tick_params(axis="x", which="minor", labelsize=4.6, labelrotation=90, pad=9.5, length=1.5)
    for token, label in zip(places, ax.get_xticklabels(minor=True), strict=True):
        label.set_color(ink(token))


def write_cells(ax: Axes, values: np.ndarray, pattern: str, inks: np.ndarray) -> None:
    """Write numbers into the cells of an image, without a frame.

    Args:
        ax: Axes to draw on.
        values: Numbers [row, column]; only finite ones are written.
        pattern: Format of a number, such as ".3g".
        inks: Colour of the text of every cell.
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
    # The ends of a line are seen even where they are no extremes
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


def plain_decades(axis: Axis) -> None:
    """Write plain numbers (0.1, 1,000) at the major ticks of a logarithmic axis.

    Minor ticks get no label.

    Args:
        axis: `ax.xaxis` or `ax.yaxis`.
    """
    axis.set_major_formatter(
        # matplotlib writes the minus sign at other ticks, and a hyphen would look odd beside it
        FuncFormatter(lambda value, _: f"{value:,.12g}".replace("-", "\N{MINUS SIGN}"))
    )
    axis.set_minor_formatter(NullFormatter())


def signed_decades(ax: Axes, name: Literal["x", "y"], linear: float) -> None:
    """Make an axis logarithmic on both sides of 0, and linear between `-linear` and `linear`.

    Args:
        ax: Axes whose data are drawn.
        name: The axis.
        linear: Size below which the axis is linear, in its units.
    """
    getattr(ax, f"set_{name}scale")("symlog", linthresh=linear)
    axis = getattr(ax, f"{name}axis")
    axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=[1.0]))
    plain_decades(axis)
    # Limits that were found on a linear axis leave no room beside the largest value
    ax.autoscale_view(scalex=name == "x", scaley=name == "y")


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


def token_label(text: str) -> str:
    """Write the text of a token as a label for a figure.

    Args:
        text: Text of the token.

    Returns:
        One line, in which the current fonts can draw all characters.
    """
    label = "".join(_visible(character) for character in text) or "∅"
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    kind = unicodedata.category(character)
    # Control characters and other blanks are invisible, and a missing glyph is an empty box
    if kind[0] in "CZ" or not is_drawable(character):
        return code_of(character)
    # A mark that combines would sit on the letter before it: it gets the dotted circle to stand on
    return "◌" + character if kind == "Mn" else character


def thin(candidates: Iterable[int], gap: float) -> list[int]:
    """Choose candidates that stay apart from all that were chosen before.

    Args:
        candidates: Indices, the most important first.
        gap: Smallest distance between two chosen indices.

    Returns:
        Ascending indices.
    """
    chosen: list[int] = []
    for candidate in candidates:
        if all(abs(candidate - other) >= gap for other in chosen):
            chosen.append(candidate)
    return sorted(chosen)


def contiguous(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Group neighbouring indices: (3, 4, 5, 9) -> (3, 5), (9, 9).

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
