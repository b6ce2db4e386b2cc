"""Shared code of figures of one result: check, ends of intervals, rows by name, colors around 0.

A result is the dataset that one function of `ri` returns. This module knows no such function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm

from repo_interp.errors import InputError, quoted


def require_result(result: Any, variables: Iterable[str], what: str, function: str) -> xr.Dataset:
    """Refuse an object that is not the dataset that a function returns.

    Args:
        result: Argument of a figure.
        variables: Variables and coordinates that the dataset has.
        what: The dataset in words, with its verb: "costs of edits are".
        function: Name of the function in `ri`.

    Returns:
        The dataset.

    Raises:
        InputError: `result` is not a dataset, or lacks a variable.
    """
    if not isinstance(result, xr.Dataset) or not {*variables} <= {*result.variables}:
        raise InputError(f"{what} what ri.{function} returns; got {quoted(result)}")
    return result


def bar_lengths(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Compute the lengths of error bars from the ends of intervals.

    Args:
        values: Numbers [row].
        low: Lower ends of their intervals.
        high: Upper ends.

    Returns:
        Lengths [side, row], as matplotlib's `errorbar` takes them; 0 without an interval, such as
        for a single prompt.
    """
    return np.nan_to_num(np.stack([values - low, high - values]))


def name_rows_down(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows of a chart, the first on top, 1 high each.

    Args:
        ax: Axes to draw on.
        names: Names of the rows.
    """
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)


def look_around_zero(colours: str, *values: Any) -> dict[str, Any]:
    """Choose colors of maps that diverge from 0, on one scale.

    Args:
        colours: Name of the color map.
        *values: Numbers of the maps, of any shape; NaN are passed over.

    Returns:
        Options of an image.
    """
    largest = max(float(np.nanmax(np.abs(one))) for one in values)
    return {"cmap": colours, "norm": CenteredNorm(0, largest or 1.0)}
