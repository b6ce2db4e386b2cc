"""Looks of checkpoints side by side: the first one of a scheme has the scheme's color.

A layout has the color of its scheme; a layout of two schemes has the color of the more frequent
one. Further checkpoints of a scheme are dashed, in colors that no scheme has: shades of one color
are hard to distinguish in a legend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import to_hex, to_rgb

from repo_interp.plots.glyphs import legible
from repo_interp.plots.style import scheme_colour, scheme_name

_MIXED = {"r2n1": ("rope", "R2N1"), "n2r1": ("nope", "N2R1")}
FURTHER_COLOURS = ("#9A2CA0", "#8F8A00", "#1B2A6B", "#B0003A", "#007C80")
"""Colors of further checkpoints of schemes: purple, olive, navy, crimson, teal."""
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D")


def layout_colour(layout: str) -> str:
    """Return the color of a layout of schemes.

    Args:
        layout: Layout, such as "repo@1".

    Returns:
        The color of its scheme; for two schemes, of the more frequent one.
    """
    name = layout.split("@")[0]
    return scheme_colour(_MIXED.get(name, (name, ""))[0])


def layout_name(layout: str) -> str:
    """Write a layout as papers do: "repo@1" -> "RePo from layer 1".

    Likewise "repo@1/3" -> "RePo after 1/3" and "r2n1" -> "R2N1".

    Args:
        layout: Layout as the run names it.

    Returns:
        The text.
    """
    scheme, at, start = layout.partition("@")
    name = _MIXED[scheme][1] if scheme in _MIXED else scheme_name(scheme)
    if not at:
        return name
    # a share of the layers, or one of them
    return f"{name} {'after' if '/' in start else 'from layer'} {start}"


def _further_colour(place: int) -> str:
    """Return color number `place` for checkpoints that are not the first of their scheme."""
    around, place = divmod(place, len(FURTHER_COLOURS))
    # Lighter from round to round, so that no two have one color
    red, green, blue = (np.array(to_rgb(FURTHER_COLOURS[place])) + around) / (1 + around)
    return to_hex((red, green, blue))


def looks(data: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Choose color, dashes, marker and legend text of every checkpoint.

    The first checkpoint of a scheme has its color; further ones differ from all in color, dashes and
    marker. The text is the coordinate
    `label (checkpoint)`, else the name of the layout, else, if several have this layout, the name
    of the checkpoint.

    Args:
        data: Dataset with an axis `checkpoint`.

    Returns:
        Options of matplotlib by checkpoint.
    """
    layouts = [str(layout) for layout in data["layout"].values]
    labels = (
        dict(zip(data["checkpoint"].values, data["label"].values.astype(str), strict=True))
        if "label" in data.coords
        else {}
    )
    seen: dict[str, int] = {}
    by_name, further = {}, 0
    for name, layout in zip(data["checkpoint"].values.astype(str), layouts, strict=True):
        colour = layout_colour(layout)
        place = seen.get(colour, 0)
        seen[colour] = place + 1
        if place:
            colour, further = _further_colour(further), further + 1
        by_name[name] = {
            "color": colour,
            "linestyle": _DASHES[place % len(_DASHES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "label": legible(
                labels.get(name) or (layout_name(layout) if layouts.count(layout) == 1 else name)
            ),
        }
    return by_name
