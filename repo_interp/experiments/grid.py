"""The grid of an experiment: values of a function at every combination of labels, as a Dataset.

    Grid(axes, point).compute(store, progress)[name][a, b, ..., inner axes] = point(a, b, ...)[name]

An experiment defines its `point` and its axes. This module does the rest for all experiments: the
product of labels, the order of points, finished points on disk, progress, batches of prompts,
shapes and coordinates. Values of points may differ in size along inner axes, such as tokens of
prompts: shorter ones are padded with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Shaped

from repo_interp.storage.store import NOT_KEPT, Progress, Store


@dataclass(frozen=True)
class Grid:
    """A function of one label of every axis, and the labels of the axes."""

    axes: Mapping[str, Sequence[Any]]
    """Labels by axis; the last axis varies fastest."""
    point: Callable[..., Mapping[str, Any]]
    """Function of one label per axis that returns numbers and nested lists of numbers by name. With
    `batches` its first argument is the prompts of a batch, and the last axis of values is prompts.
    """
    inner: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the axes of values that are lists."""
    batches: Sequence[Sequence[int]] = ()
    """Numbers of the prompts that a point takes side by side. All points of a batch follow each
    other, so that a point can reuse results of the one before it for the same prompts.
    """
    name: str = "point"
    """Prefix of the keys of finished points; unique among the grids of one store."""

    def compute(
        self,
        store: Store = NOT_KEPT,
        progress: Progress | None = None,
        before: int = 0,
        total: int = 0,
    ) -> xr.Dataset:
        """Compute every point that `store` does not have yet.

        Args:
            store: Keeps finished points, from which an interrupted experiment continues.
            progress: Called with the number of finished points and of all points.
            before: Points that earlier grids of the same experiment finished.
            total: Points of all grids of the experiment; 0: of this one.

        Returns:
            Values of all points, float64, over `axes` and their inner axes. With `batches` the
            inner axes end with the prompts, in their order.
        """
        # The last axis varies fastest, which is the order of numpy's reshape below.
        labels = list(product(*self.axes.values()))
        points = {
            # Keys of the store: the grid's name, the labels, and the number of the batch
            "-".join(map(str, (self.name, *chosen, number))): partial(self.point, *batch, *chosen)
            # Batches are the outer loop: a point may reuse results
            # of the one before it for the same prompts.
            for number, batch in enumerate([[some] for some in self.batches] or [[]])
            for chosen in labels
        }

        def advance(done: int, points: int) -> None:
            assert progress is not None
            progress(before + done, total or points)

        found = list(store.get_or_compute(points, progress and advance).values())
        values = {}
        for name in found[0] if found else ():
            # The store gives lists of JSON, and an integer of a point must not decide the dtype.
            arrays = [np.asarray(at_point[name], dtype=np.float64) for at_point in found]
            if self.batches:
                # Batches are sorted by length; this index brings prompts back into their order.
                order = np.argsort(np.concatenate(self.batches))
                arrays = [
                    # Every len(labels)-th array belongs to one point; its batches are joined along
                    # the prompts.
                    np.concatenate(arrays[place :: len(labels)], axis=-1)[..., order]
                    for place in range(len(labels))
                ]
            # [point, inner ...], where prompts of different lengths leave NaN at the end
            whole = stack_padded(arrays, np.nan)
            shape = (*map(len, self.axes.values()), *whole.shape[1:])
            values[name] = (*self.axes, *self.inner.get(name, ())), whole.reshape(shape)
        return xr.Dataset(values, {axis: list(known) for axis, known in self.axes.items()})


def stack_padded(
    rows: Sequence[Any], fill: Any, dtype: Any = np.float64
) -> Shaped[np.ndarray, "row ..."]:
    """Stack rows that may differ in shape, with `fill` after the end of shorter ones.

    Args:
        rows: Arrays or nested lists with equally many axes; at least one.
        fill: Value of the entries that a row lacks.
        dtype: Type of the result.

    Returns:
        All rows, as large along every axis as the largest of them.
    """
    shape = np.max([np.shape(row) for row in rows], axis=0).astype(int)
    whole = np.full((len(rows), *shape), fill, dtype=dtype)
    for number, row in enumerate(rows):
        whole[(number, *map(slice, np.shape(row)))] = row
    return whole
