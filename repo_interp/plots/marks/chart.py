"""Charts: the parts of a view.

A chart is a labeled array with all data for the figure and the page.

Heads    a number per layer and head             Grid     cells of two axes, panels side by side
Names    a name per layer and head               Lines, Dots    the means over all other axes
CustomFigure  a figure that no axis describes         those of `head_charts`: on the page, for the selected head
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from matplotlib.figure import Figure


class Chart:
    """A chart of a run.

    A `Drawing` has a figure; the page's scripts draw the charts that have `data`.
    """

    def data(self) -> dict[str, Any] | None:
        """Return the chart as JSON for the scripts of the page.

        Returns:
            The data; None for a chart that the page shows as a picture.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Drawing(Chart, ABC):
    """A chart that has a figure."""

    name: str = ""
    """The name of the figure's file; "" for a chart that only the page shows."""
    caption: str = ""
    """A sentence for the page, if the name does not describe the figure."""
    live: bool = False
    """Whether the page shows this content as a map or chart, so that it needs no picture."""

    @abstractmethod
    def figure(self) -> Figure:
        """Draw the chart as a matplotlib figure."""


@dataclass(frozen=True)
class CustomFigure(Drawing):
    """A figure that `draw` makes on demand."""

    # `field()`: unlike that of other charts, this name has no default
    name: str = field()
    draw: Callable[[], Figure]

    def figure(self) -> Figure:
        """The figure of `draw`."""
        return self.draw()


def figures_of_heads(
    stem: str,
    draw: Callable[..., Figure],
    heads: Iterable[tuple[int, int]],
    caption: str,
    live: bool = False,
) -> Iterator[CustomFigure]:
    """Chart single heads, one after the other.

    Args:
        stem: Start of the charts' names.
        draw: Function of `layer` and `head` that draws the figure.
        heads: Labels (layer, head).
        caption: Description of the figure; the head's name is put before it.
        live: Passed on to the charts.

    Returns:
        The charts.
    """
    for layer, head in heads:
        yield CustomFigure(
            f"{stem}_layer{layer}_head{head}",
            partial(draw, layer=layer, head=head),
            caption=f"Layer {layer}, head {head}: {caption}",
            live=live,
        )
