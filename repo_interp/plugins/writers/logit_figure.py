"""Figure of one attention logit: a map of pairs of writers, and a chart by rotary pair.

    left     contribution by writer of the query (rows) and of the key (columns), over rotary pairs;
             the `MOST` writers of each side with the largest sums of sizes, and the sum of the rest
    right    by rotary pair: the whole logit, and the largest product of two writers

Draws the result of `ri.logit_writers`. This module knows nothing about models.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    colour_bar,
    draw_cells,
    look_around_zero,
    require_result,
    token_label,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

MOST = 9
_SIDES = ("query_writer", "key_writer")


@style()
def logit_writers(found: xr.Dataset) -> PaperFigure:
    """Draw the writers of a logit.

    Args:
        found: Result of `ri.logit_writers`.

    Returns:
        The figure.

    Raises:
        InputError: `found` is not a result of `ri.logit_writers`.
    """
    require_result(found, ("contribution", "rounding"), "writers of a logit are", "logit_writers")
    parts = found["contribution"].reset_coords(drop=True)
    product = parts.sum("pair", keep_attrs=True)
    largest = dict(
        zip(_SIDES, np.unravel_index(product.values.argmax(), product.shape), strict=True)
    )
    largest_parts = parts.isel(largest)
    for side in _SIDES:
        product = _largest(product, side)
    figure = paper_figure(PAGE_WIDTH, 3.0)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    look = look_around_zero("RdBu_r", product) | {"gid": "products"}
    image = draw_cells(left, product, look, pattern=".1f")
    left.tick_params(axis="x", rotation=90)
    left.set(xlabel="writer of the key", ylabel="writer of the query")
    colour_bar(figure, image, left, "logits", fraction=0.046)
    places = np.arange(parts.sizes["pair"])
    words = " · ".join(str(largest_parts[side].item()) for side in _SIDES)
    for values, aside, colour, name in (
        (parts.sum(_SIDES), -0.2, "#333333", "all"),
        (largest_parts, 0.2, "#D55E00", words),
    ):
        bars = right.bar(places + aside, values.values, 0.4, color=colour, label=name)
        bars[0].set_gid(f"first bar of {name}")
    names = ["rest" if pair == -1 else str(pair) for pair in parts["pair"].values]
    every = -(-len(names) // 8)
    right.set_xticks(places[::every], names[::every])
    right.axhline(0, color="#222222", linewidth=0.5)
    right.set(xlabel="rotary pair", ylabel="logits")
    right.legend(fontsize=6)
    attrs = found.attrs
    tokens = (f"{attrs[side]} {token_label(attrs[f'{side}_text'])}" for side in ("query", "key"))
    less = f" less that for key {attrs['against']}" if "against" in attrs else ""
    figure.suptitle(
        f"L{attrs['layer']} H{attrs['head']}, query {next(tokens)}, key {next(tokens)}{less}: logit "
        f"{float(found['logit']):.2f}"
    )
    return figure


def _largest(product: xr.DataArray, side: str) -> xr.DataArray:
    """Keep the writers with the largest sums of sizes, in order, and add up all others."""
    if product.sizes[side] <= MOST + 1:
        return product
    sizes = abs(product).sum([other for other in _SIDES if other != side])
    kept = np.sort(np.argsort(-sizes.values, kind="stable")[:MOST])
    others = np.setdiff1d(np.arange(len(sizes)), kept)
    rest = product.isel({side: others}).sum(side).expand_dims({side: [f"{len(others)} others"]})
    return xr.concat([product.isel({side: kept}), rest], side).transpose(*_SIDES)
