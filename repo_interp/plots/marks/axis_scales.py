"""Scales and ticks of axes: decades in plain numbers, lengths that double, labels that do not touch.

This module knows axes, and nothing about the drawn data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any, Literal, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, SymmetricalLogLocator

TICK_LETTER, TICK_GAP = 0.06, 0.04
"""Inches of a letter of a tick label, and between two labels."""


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
    """Make x an axis that doubles, with a tick at every length.

    Lengths are labeled in order, except labels that would touch the previous one.

    Args:
        ax: Axes to draw on.
        lengths: Positive lengths, ascending.
    """
    labels = [f"{length:,.12g}" for length in lengths]
    # Inches of a length along the axes; the layout makes these a little wider later.
    inches = ax.bbox.width / cast(Figure, ax.get_figure(root=True)).dpi
    at = np.log2(lengths) * inches / max(float(np.ptp(np.log2(lengths))), 1e-9)
    end = -np.inf
    for place, label in enumerate(labels):
        half = (TICK_LETTER * len(label) + TICK_GAP) / 2
        if at[place] - half < end:
            labels[place] = ""
        else:
            end = at[place] + half
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, labels)
    ax.minorticks_off()


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


def name_columns(axes: Sequence[Axes], columns: int, label: str) -> None:
    """Label the x axis below the lowest panel of every column.

    The last row may have fewer panels than columns.

    Args:
        axes: Panels, row by row.
        columns: Panels in a row.
        label: Label of the x axis.
    """
    for lowest in axes[-columns:]:
        lowest.set_xlabel(label)
        # Shared axes hide tick labels above the last row, even with no panel below
        lowest.tick_params(labelbottom=True)


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


def plain_decades(axis: Axis) -> None:
    """Write plain numbers (0.1, 1,000) at the major ticks of a logarithmic axis.

    Minor ticks get no label.

    Args:
        axis: `ax.xaxis` or `ax.yaxis`.
    """
    axis.set_major_formatter(
        # matplotlib writes a minus sign at other ticks, so no hyphen here
        FuncFormatter(lambda value, _: f"{value:,.12g}".replace("-", "\N{MINUS SIGN}"))
    )
    axis.set_minor_formatter(NullFormatter())


def signed_decades(ax: Axes, name: Literal["x", "y"], linear: float) -> str:
    """Make an axis logarithmic on both sides of 0, and linear between `-linear` and `linear`.

    Args:
        ax: Axes with drawn data.
        name: The axis.
        linear: Size below which the axis is linear, in its units.

    Returns:
        Text about the linear part, for the label of the axis.
    """
    getattr(ax, f"set_{name}scale")("symlog", linthresh=linear)
    axis = getattr(ax, f"{name}axis")
    axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=[1.0]))
    plain_decades(axis)
    # Limits from a linear axis leave no margin at the largest value
    ax.autoscale_view(scalex=name == "x", scaley=name == "y")
    return f"logarithmic beyond ±{linear:.1g}"
