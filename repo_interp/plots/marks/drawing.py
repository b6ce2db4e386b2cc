"""Marks that several figures share: shaded spans, the ribbon of their parts, swatches of schemes,
thinned lines, and token labels.

    " the" -> "␣the"   newline -> "↵"   tab -> "⇥"   nothing -> "∅"   invisible or missing glyph -> "\\u200b"

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
    """Shade the tokens of each top-level span of `spans` over the height of `ax`; `names`: all span
    names, which fix the colours.
    """
    colours = span_colours(names)
    for name, tokens in spans.items():
        if "." in name:
            continue
        for first, last in contiguous(tokens):
            patch = ax.axvspan(
                first - 0.5, last + 0.5, facecolor=colours[name], alpha=SHADE, linewidth=0, zorder=0
            )
            patch.set_gid(f"span {name}")


def part_ribbon(ax: Axes, spans: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[str]:
    """A ribbon along the top of `ax` with the deepest parts of spans ("needle.1.key") in shades of
    their parent.

    Returns their names.
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
                transform=ax.get_xaxis_transform(),
            )
            patch.set(facecolor=colours[name], linewidth=0, zorder=3, gid=f"part {name}")
            ax.add_patch(patch)
    return parts


def span_handles(spans: Iterable[str], names: Sequence[str]) -> list[Patch]:
    """Legend entries of spans: shaded as on the axes, solid for parts."""
    colours = span_colours(names)
    return [
        Patch(facecolor=colours[name], alpha=1.0 if "." in name else SHADE, label=name)
        for name in spans
    ]


def scheme_handles(schemes: Iterable[str], marker: str = "s") -> list[Line2D]:
    """Legend entries of position schemes, each once."""
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
    """Legend entries below everything else in `figure`: in one row, or in as few as its width
    allows.

    `length`: of their marks, in sizes of the font, where it is not the usual one.
    """
    if handles:
        more = (
            0.0
            if length is None
            else (length - mpl.rcParams["legend.handlelength"])
            * mpl.rcParams["legend.fontsize"]
            / 72
        )
        needed = sum(
            LEGEND_ENTRY + more + LEGEND_LETTER * len(legible(str(handle.get_label())))
            for handle in handles
        )
        rows = int(np.ceil(needed / figure.get_figwidth()))
        columns = -(-len(handles) // rows)
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
    """A colour bar of `image` beside `axes` without a frame; `options` go to matplotlib's
    `colorbar`.
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
    """A figure of `count` panels, at most `columns` in a row, of `height` inches with `around`
    inches besides; places left over are empty.

    `width`: inches; None: the width of a page, of a single panel that of a column. `options` go to
    matplotlib's `subplots`.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = (PAGE_WIDTH if columns > 1 else COLUMN_WIDTH) if width is None else width
    figure = paper_figure(width, around + height * rows)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


def bare(ax: Axes) -> None:
    """Take the frame of `ax` and the marks of its ticks away, as around a map."""
    ax.spines[:].set_visible(False)
    ax.tick_params(which="both", length=0)


def say(ax: Axes, text: str, place: float | None = None, colour: str = "#8A8A8A") -> None:
    """Write on `ax` that something is not there: upright at `place` along x, or in the middle."""
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
    """Write `text` on `ax` at `offset` from `point`, in points of the paper, with letters of
    `size`; centred vertically.
    """
    ax.annotate(
        text,
        point,
        xytext=offset,
        textcoords="offset points",
        fontsize=size,
        **{"va": "center", **look},
    )


def length_axis(ax: Axes, lengths: np.ndarray, training_length: float, label: str) -> None:
    """Lengths that double along x, each named, with a dotted line at the training length."""
    training_line(ax, training_length)
    double_axis(ax, lengths)
    ax.set_xlabel(label)
    ax.grid(axis="y")


def training_line(ax: Axes, training_length: float) -> None:
    """A dotted line at the training length on the axis x."""
    ax.axvline(
        float(training_length),
        color="#222222",
        linewidth=0.6,
        linestyle=(0, (1, 1.5)),
        gid="training length",
    )


def double_axis(ax: Axes, lengths: np.ndarray) -> None:
    """Make x an axis that doubles, with every one of `lengths` named."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,.12g}" for length in lengths])
    ax.minorticks_off()


def scheme_swatches(ax: Axes, schemes: Mapping[int, str], axis: Literal["x", "y"]) -> None:
    """A bar beside every layer of `axis` ("x" or "y"), whose unit steps are layers, in the colour
    of its scheme; none where that is "".
    """
    along = ax.get_yaxis_transform() if axis == "y" else ax.get_xaxis_transform()
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
            clip_on=False,
            solid_capstyle="butt",
        )
        bar.set(color=scheme_colour(scheme), linewidth=3, gid=f"scheme {layer} {scheme}")
        ax.add_line(bar)
    ax.tick_params(axis=axis, which="both", length=0, pad=7)


def sparse_ticks(labels: Sized, most: int) -> list[int]:
    """Places of at most `most` tick labels, evenly spread over `labels`, the first among them."""
    step = max(1, -(-len(labels) // most))
    return list(range(0, len(labels), step))


def name_ticks(axis: Axis, labels: Iterable[Any], most: int) -> None:
    """Name the places 0, 1, ... of `axis` by `labels`: at most `most` of them, evenly spread, the
    first among them.
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
    """Name the axis of tokens of `ax`, and write at most `most` texts upright below it: those
    `ranked` first, each in its ink.

    Without texts the axis has indices alone. `shown`: the label with texts, {} for what they are.
    """
    ax.locator_params(axis="x", nbins=10, integer=True)
    ax.set_xlabel("token index")
    if tokens is None or tokens.texts is None:
        return
    ax.set_xlabel(shown.format(tokens.texts_are))
    ax.xaxis.remove_overlapping_locs = False
    places = thin(ranked, max(1.0, tokens.count / most))
    ax.set_xticks(places, [token_label(tokens.text(token)) for token in places], minor=True)
    ax.tick_params(axis="x", which="minor", labelsize=4.6, labelrotation=90, pad=9.5, length=1.5)
    for token, label in zip(places, ax.get_xticklabels(minor=True), strict=True):
        label.set_color(ink(token))


def write_cells(ax: Axes, values: np.ndarray, pattern: str, inks: np.ndarray, size: float) -> None:
    """Write finite `values` [row, column] by the format `pattern` into the cells of an image on
    `ax`, each in its ink; no frame.
    """
    for row, column in np.argwhere(np.isfinite(values)):
        text = format(values[row, column], pattern).replace("-0.000", "0.000")
        ax.text(column, row, text, ha="center", va="center", fontsize=size, color=inks[row, column])
    bare(ax)


def envelope(values: np.ndarray, bins: int) -> np.ndarray:
    """Indices of the values to draw so that a line of `bins` pixels looks the same: all, or the
    extremes of each bin.

    Ascending.
    """
    if values.size <= 2 * bins:
        return np.arange(values.size)
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
    """Plain numbers - 0.1, 1,000 - at the major ticks of a logarithmic axis, none at the minor
    ones.
    """
    axis.set_major_formatter(
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


def counted(count: int, thing: str) -> str:
    """ "1 prompt", "2,000 prompts"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def number(value: float) -> str:
    """A number as a label: three significant digits, no exponent between 0.0001 and 100,000."""
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "–"
    size = abs(value)
    if size >= 1e5 or size < 1e-4:
        return f"{value:.1e}"
    digits = max(0, 2 - int(np.floor(np.log10(size))))
    return f"{value:.{digits}f}"


def token_label(text: str, longest: int = LONGEST) -> str:
    """`text` as a label for a figure: one line, every character visible in the current fonts, at
    most `longest` characters.
    """
    label = "".join(_visible(character) for character in text) or "∅"
    return label if len(label) <= longest else label[: longest - 1] + "…"


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    kind = unicodedata.category(character)
    if kind[0] in "CZ" or not is_drawable(character):
        return code_of(character)
    return "◌" + character if kind == "Mn" else character


def thin(candidates: Iterable[int], gap: float) -> list[int]:
    """Those of `candidates`, ranked from the first, that stay at least `gap` apart from all chosen
    before.

    Ascending.
    """
    chosen: list[int] = []
    for candidate in candidates:
        if all(abs(candidate - other) >= gap for other in chosen):
            chosen.append(candidate)
    return sorted(chosen)


def contiguous(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of neighbouring indices as (first, last), both inside: (3, 4, 5, 9) -> (3, 5), (9,
    9).
    """
    stretches: list[tuple[int, int]] = []
    for index in sorted(indices):
        if stretches and index == stretches[-1][1] + 1:
            stretches[-1] = (stretches[-1][0], index)
        else:
            stretches.append((index, index))
    return stretches
