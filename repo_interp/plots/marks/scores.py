"""The looks of checkpoints side by side: one colour per scheme, dashes apart within a colour.

A layout has the colour of its scheme; layouts that mix two have the colour of the more frequent
one, dashed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import to_hex, to_rgb

from repo_interp.plots.style import (
    legible,
    scheme_colour,
    scheme_name,
)

_MIXED = {"r2n1": ("rope", "R2N1"), "n2r1": ("nope", "N2R1")}
_SHADES = (("white", 0.0), ("black", 0.5), ("white", 0.35), ("black", 0.25), ("white", 0.6))
"""Of checkpoints of one scheme, in order: the color mixed into theirs, and its share."""
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D")


def layout_colour(layout: str) -> str:
    """Return the colour of a layout of schemes.

    Args:
        layout: Layout, such as "repo@1".

    Returns:
        The colour of its scheme; of two schemes, that of the more frequent one.
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


def _shade(colour: str, place: int) -> str:
    """Return the shade of a scheme's colour for its checkpoint number `place`."""
    end, share = _SHADES[place % len(_SHADES)]
    red, green, blue = (1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(end))
    return to_hex((red, green, blue)) if share else colour


def looks(data: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Choose colour, dashes, marker and legend text of every checkpoint.

    Checkpoints of a scheme share a colour and differ in shade, dashes and marker. The text is the coordinate
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
    by_name = {}
    for name, layout in zip(data["checkpoint"].values.astype(str), layouts, strict=True):
        colour = layout_colour(layout)
        place = seen.get(colour, 0)
        seen[colour] = place + 1
        by_name[name] = {
            "color": _shade(colour, place),
            "linestyle": _DASHES[place % len(_DASHES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "label": legible(
                labels.get(name) or (layout_name(layout) if layouts.count(layout) == 1 else name)
            ),
        }
    return by_name
