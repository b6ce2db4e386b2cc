"""The map of heads as a page draws it, and the head and the score on which the page opens.

    {"scores": {NAME: {"values", "colours", "scale", "ends", "meaning"}},
     "outlines": [layer, head, point], "by_index": [layer, head], "orders": {...} or null}

This module knows nothing about passes and sessions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.colors import Colormap

from repo_interp.explorer.head_scores import LOOKS, ORDER
from repo_interp.plots.marks.arrays import ranked_heads
from repo_interp.plots.marks.panels import MISSING, scale, shades
from repo_interp.storage.json_values import as_json


def opening(heads: xr.Dataset, about: str) -> tuple[str, tuple[int, int] | None]:
    """Choose the score and the head on which a page opens.

    Args:
        heads: Map of the heads.
        about: Span that the prompts are about.

    Returns:
        Name of the score, and (layer, head); None if no head has the score.
    """
    scores = _scores(heads)
    names = [str(name) for name in scores["score"].values]
    # A map of one value in all heads shows nothing to begin with
    known = [name for name in names if np.ptp(scores.sel(score=name).fillna(0.0).values) > 0]
    ranges = [name for name, is_one in zip(names, scores["by_index"].values, strict=True) if is_one]
    wanted = ("mirror", f"attention to {about}", ORDER, *ranges)
    first = next((name for name in wanted if name in known), LOOKS[1])
    by_first = scores.sel(score=first, drop=True)
    # A clock may run backwards
    ranked = ranked_heads(abs(by_first) if first == ORDER else by_first)
    return first, ranked[0] if ranked else None


@cache
def _color_map(name: str) -> Colormap:
    # Matplotlib makes a copy whenever it is asked, whose table costs more than its colors
    return mpl.colormaps[name]


def map_json(heads: xr.Dataset, clean: xr.Dataset | None = None) -> dict[str, Any]:
    """Write a map of heads as JSON.

    Args:
        heads: Map of the heads.
        clean: Map without edits, whose colors edited scores have; None: `heads` is that.

    Returns:
        Scores with their colors by name, outlines [layer, head, point], and orders.
    """
    scores, meanings = {}, heads["meaning"].values.tolist()
    # [score, layer, head] each. Both states share a scale, or halving all scores would leave the
    # map as it was
    states = [_scores(state).values for state in (heads, clean) if state is not None]
    for number, name in enumerate(heads["score"].values):
        values, *others = (state[number] for state in states)
        color_map, norm = scale(np.stack([values, *others]))
        # Levels of all heads at once, as matplotlib's `to_hex` gives them one by one
        levels = np.round(_color_map(color_map)(norm(values))[..., :3] * 255).astype(int)
        colors = [["#{:02x}{:02x}{:02x}".format(*one) for one in row] for row in levels.tolist()]
        for layer, head in np.argwhere(~np.isfinite(values)).tolist():
            colors[layer][head] = MISSING
        scores[str(name)] = {
            "values": as_json(values),
            "colours": colors,
            "scale": shades(color_map),
            "ends": [float(norm.vmin or 0.0), float(norm.vmax or 0.0)],
            "meaning": meanings[number],
        }
    outline, index = heads["outline"], _by_index(heads)
    return {
        "scores": scores,
        # The same line in all heads is not informative.
        "outlines": as_json(outline.where(~index).values),
        "by_index": index.values.tolist(),
        "orders": _orders(heads),
    }


def _orders(heads: xr.Dataset) -> dict[str, Any] | None:
    """Orders by distance: one row for all heads of a layer with the same positions.

    None if all positions are the token index.
    """
    if "order" not in heads:
        return None
    order, rows = heads["order"].transpose("layer", "head", "distance"), {}
    for layer, of_layer in zip(order["layer"].values.tolist(), order.values, strict=True):
        for head, values in zip(order["head"].values.tolist(), of_layer, strict=True):
            if np.isfinite(values).any():
                row = rows.setdefault((layer, values.tobytes()), {"heads": [], "values": values})
                row["heads"].append([layer, head])
    return {
        "distances": order["distance"].values.tolist(),
        "rows": [
            {"heads": row["heads"], "values": as_json(row["values"])} for row in rows.values()
        ],
    }


def _by_index(heads: xr.Dataset) -> xr.DataArray:
    """Whether positions are the token index [layer, head]."""
    outline = heads["outline"]
    return (outline == outline["point"]).all("point").transpose("layer", "head")


def _scores(heads: xr.Dataset) -> xr.DataArray:
    """Scores [score, layer, head], without those of the token index that hide learned ones.

    The token index ranges over the prompt; compared with it, learned ranges are almost 0.
    """
    scores, index = heads["head_score"], _by_index(heads)
    return scores if index.all() else scores.where(~(index & scores["by_index"]))
