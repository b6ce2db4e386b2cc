"""Labels for what kernels return: names of axes, coordinates, long names and units, so that a run
file explains itself.

    Arrays      arrays with the names and labels of their axes: what an xr.Dataset holds, without being one yet

A layer of a batch leaves a handful of small arrays. Making a Dataset of each, and aligning
Datasets, would take longer than measuring: they stay `Arrays` until all layers and prompts are
together. Knows nothing about what is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from repo_interp.inputs import AttentionInputs

Record = Mapping[Any, tuple[Sequence[str], Tensor | np.ndarray]]
"""Axes and values by name; or, by several names, values of which each has one entry of a further
first axis.
"""


class _Awaited(NamedTuple):
    """An array that is still on an accelerator."""

    tensor: Tensor
    entry: tuple[int, ...]
    """Which of its first axis, where it is one of several."""
    layer: int
    """Where the axis `layer` goes."""


@dataclass(frozen=True)
class Arrays:
    """Arrays with the names of their axes, and labels of axes, which all arrays share."""

    given: dict[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    """By name, axes and array; on an accelerator until one is asked for."""
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def values(self) -> Mapping[str, tuple[tuple[str, ...], np.ndarray]]:
        """Axes and array by name.

        What is on an accelerator leaves it, with all that was made there since, in one copy.
        """
        if any(isinstance(array, _Awaited) for _, array in self.given.values()):
            waiting, _departing[:] = (
                [made for reference in _departing if (made := reference()) is not None],
                [],
            )
            _fetch([self.given, *(made.given for made in waiting if made.given is not self.given)])
        return self.given

    @classmethod
    def of(cls, given: Arrays | xr.Dataset) -> Arrays:
        """What `given` holds; attributes are dropped."""
        if isinstance(given, Arrays):
            return given
        values = {
            str(name): (tuple(map(str, array.dims)), array.values)
            for name, array in given.data_vars.items()
        }
        return cls(values, {str(axis): np.asarray(given[axis].values) for axis in given.indexes})

    def dataset(self) -> xr.Dataset:
        """The same as a Dataset."""
        return xr.Dataset(
            dict(self.values), coords={axis: (axis, labels) for axis, labels in self.labels.items()}
        )

    def at(self, axis: str, place: int) -> Arrays:
        """The entry number `place` of `axis` alone, with an axis of length 1: views."""
        values = {
            name: (
                axes,
                values[
                    tuple(slice(place, place + 1) if each == axis else slice(None) for each in axes)
                ],
            )
            for name, (axes, values) in self.values.items()
        }
        return Arrays(values, {**self.labels, axis: self.labels[axis][place : place + 1]})

    def sorted_by(self, axis: str) -> Arrays:
        """The same in the order of the labels of `axis`."""
        order = np.argsort(self.labels[axis], kind="stable")
        if (order == np.arange(len(order))).all():
            return self
        values = {
            name: (axes, np.take(v, order, axes.index(axis)) if axis in axes else v)
            for name, (axes, v) in self.values.items()
        }
        return Arrays(values, {**self.labels, axis: self.labels[axis][order]})


_departing: list[weakref.ref[Arrays]] = []
"""Those that hold what is on an accelerator."""


def _fetch(records: Sequence[dict[str, tuple[tuple[str, ...], Any]]]) -> None:
    """Put arrays in the places of what is awaited, by one copy for each device and kind of
    numbers.
    """
    places = [
        (record, name)
        for record in records
        for name, (_, array) in record.items()
        if isinstance(array, _Awaited)
    ]
    tensors = {id(tensor): tensor for record, name in places for tensor in record[name][1][:1]}
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors.values():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    here: dict[int, np.ndarray] = {}
    for of_kind in kinds.values():
        together = torch.cat([tensor.reshape(-1) for tensor in of_kind]).cpu()
        for tensor, part in zip(
            of_kind, together.split([tensor.numel() for tensor in of_kind]), strict=True
        ):
            here[id(tensor)] = part.view(tensor.shape).numpy()
    for record, name in places:
        axes, (tensor, entry, layer) = record[name]
        record[name] = axes, np.expand_dims(here[id(tensor)][entry], layer)


def joined(parts: Sequence[Arrays], axis: str) -> Arrays:
    """Parts one after the other along `axis`, other axes aligned by their labels; absent entries
    are NaN, of integers -1.
    """
    if len(parts) == 1:
        return parts[0]
    labels, places = _aligned(parts, axis)
    labels[axis] = np.concatenate([part.labels[axis] for part in parts])
    ends = np.cumsum([0, *(len(part.labels[axis]) for part in parts)])
    for number, place in enumerate(places):
        place[axis] = slice(ends[number], ends[number + 1])
    return Arrays(
        _put_together(
            parts,
            labels,
            places,
            _absent,
            lambda whole, place, values: whole.__setitem__(place, values),
        ),
        labels,
    )


def added(parts: Sequence[Arrays]) -> Arrays:
    """Sums of the parts, axes aligned by their labels; absent entries count 0."""
    if len(parts) == 1:
        return parts[0]
    labels, places = _aligned(parts)

    def add(whole: np.ndarray, place: tuple, values: np.ndarray) -> None:
        whole[place] += values

    return Arrays(_put_together(parts, labels, places, np.zeros_like, add), labels)


def _aligned(
    parts: Sequence[Arrays], joining: str | None = None
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Labels of all parts by axis, and of each part the places of its own among them; axes where
    all parts agree are left out.
    """
    labels: dict[str, np.ndarray] = {}
    places: list[dict[str, Any]] = [{} for _ in parts]
    for axis in dict.fromkeys(axis for part in parts for axis in part.labels if axis != joining):
        own = [part.labels.get(axis) for part in parts]
        known = [some for some in own if some is not None]
        if all(np.array_equal(known[0], some) for some in known):
            labels[axis] = known[0]
            continue
        labels[axis] = np.unique(np.concatenate(known))
        for place, some in zip(places, own, strict=True):
            if some is not None:
                found = np.searchsorted(labels[axis], some)
                together = len(found) and (np.diff(found) == 1).all()
                place[axis] = slice(found[0], found[-1] + 1) if together else found
    return labels, places


def _put_together(
    parts: Sequence[Arrays],
    labels: Mapping[str, np.ndarray],
    places: Sequence[Mapping[str, Any]],
    empty: Callable[[np.ndarray], np.ndarray],
    put: Callable[[np.ndarray, tuple, np.ndarray], None],
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    whole = {}
    for name in dict.fromkeys(name for part in parts for name in part.values):
        own = [part.values.get(name) for part in parts]
        axes, some = next(each for each in own if each is not None)
        shape = [
            len(labels[axis]) if axis in labels else size
            for axis, size in zip(axes, some.shape, strict=True)
        ]
        kind = np.result_type(*(each[1].dtype for each in own if each is not None))
        values = empty(np.empty(shape, kind))
        for place, each in zip(places, own, strict=True):
            if each is not None:
                # Slices where entries stand together: other axes need a grid of places.
                index = tuple(place.get(axis, slice(None)) for axis in axes)
                if not all(isinstance(some, slice) for some in index):
                    numbers = (
                        np.arange(size)[some] for some, size in zip(index, shape, strict=True)
                    )
                    index = np.ix_(*numbers)
                put(values, index, each[1])
        whole[name] = axes, values
    return whole


def _absent(room: np.ndarray) -> np.ndarray:
    """`room` filled with what stands for an absent entry."""
    room[...] = (
        np.nan if room.dtype.kind in "fc" else -1 if room.dtype.kind == "i" else room.dtype.type()
    )
    return room


def arrays(inputs: AttentionInputs, record: Record, **labels: Any) -> Arrays:
    """What was measured of one layer, by name: axes - among them `layer`, of length 1, which the
    values lack - and values.

    Prompts, heads and tokens have the labels that `of_layer` gives them; labels of other axes are
    given by name.
    """
    known = {
        "layer": [inputs.layer],
        "prompt": inputs.prompts.tolist(),
        "head": np.arange(inputs.heads),
        "token": np.arange(inputs.valid.shape[1]),
    } | labels
    used = dict.fromkeys(axis for axes, _ in record.values() for axis in axes)
    given = {}
    for names, (axes, values) in record.items():
        several, layer = not isinstance(names, str), list(axes).index("layer")
        if isinstance(values, Tensor):
            values = values.detach() if values.requires_grad else values
            values = values if values.device.type != "cpu" else values.numpy()
        for number, name in enumerate(names if several else (names,)):
            entry = (number,) if several else ()
            if isinstance(values, Tensor):
                given[name] = tuple(axes), _Awaited(values, entry, layer)
            else:
                given[name] = tuple(axes), np.expand_dims(np.asarray(values)[entry], layer)
    made = Arrays(given, {axis: np.asarray(known[axis]) for axis in used if axis in known})
    if any(isinstance(array, _Awaited) for _, array in given.values()):
        _departing.append(weakref.ref(made))
    return made


def of_layer(
    inputs: AttentionInputs, axes: Sequence[str], values: Tensor | np.ndarray, **coordinates: Any
) -> xr.DataArray:
    """`values` of one layer with their `axes`, among them `layer` (length 1) and, where named,
    `prompt`, `head` and `token`.

    `values` come without the axis `layer`, which is put where `axes` has it; other coordinates are
    given by name.
    """
    return (
        arrays(inputs, {"values": (axes, values)}, **coordinates).dataset()["values"].rename(None)
    )


def described(array: xr.DataArray, long_name: str, units: str) -> xr.DataArray:
    """`array` with its long name and units as attributes."""
    return array.assign_attrs(long_name=long_name, units=units)


def described_group(
    values: Mapping[Any, Any] | xr.Dataset,
    texts: Mapping[str, tuple[str, str]],
    coordinates: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """The variables of `values` that `texts` names, in its order, with their long names and units.

    `values`: a Dataset; or by name DataArrays, or axes and values, with the `coordinates` of their
    axes.
    """
    group = values if isinstance(values, xr.Dataset) else xr.Dataset(dict(values), coordinates)
    return xr.Dataset(
        {name: described(group[name], *text) for name, text in texts.items() if name in group}
    )


def parameter_attributes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as attributes of a group: numbers and texts as they are, sequences as lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in parameters.items()
    }
