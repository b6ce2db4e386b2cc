"""Shares of the patterns of chunks by head (RePo fig. 3): the chart of the group `patterns`."""

from __future__ import annotations

import xarray as xr

from repo_interp.plots.marks import Panels
from repo_interp.plots.views.patterns import share_grid


def stacked_shares(run: xr.DataTree) -> Panels:
    """Chart the shares of the patterns (RePo fig. 3).

    Stored figures know this function by its name, from when it drew stacked bars.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        A panel per pattern, with its share of all chunks of learned layers in the title.
    """
    return share_grid(run)
