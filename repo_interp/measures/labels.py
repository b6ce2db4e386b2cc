"""Labels of arrays for a run file: axes, coordinates, long names and units.

    Arrays      arrays with the names and labels of their axes: the contents of an xr.Dataset

A layer of a batch leaves a handful of small arrays. Making a Dataset of all, and aligning Datasets,
would take longer than measuring: they stay `Arrays` until all layers and prompts are together. This
module knows nothing about measures.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.joint import Later, make

Record = Mapping[Any, tuple[str, Tensor | Later | np.ndarray]]
"""Axes, as in "prompt layer head", and values by name. Several names: an additional first axis holds
one entry per name.
"""


class _Awaited(NamedTuple):
    """An array that is still on an accelerator, or yet to be computed there."""

    tensor: Tensor | Later
    entry: tuple[int, ...]
    """Which of its first axis, where it is one of several."""
    layer: int
    """Where the axis `layer` goes."""
    heads: tuple[int, int] | None = None
    """Where an axis `head` is that may have one row for several heads, and how many heads."""

    @property
    def whole(self) -> tuple[Tensor, tuple[int, ...]]:
        """The tensor that is copied, and which of its first axes the array is."""
        if isinstance(self.tensor, Tensor):
            return self.tensor, self.entry
        call, name = self.tensor
        return call.results[name], (call.place, *self.entry)


def _placed(
    array: np.ndarray, entry: tuple[int, ...], layer: int, heads: tuple[int, int] | None
) -> np.ndarray:
    """An entry of an array, with all heads and the axis `layer`."""
    array = array[entry] if entry else array
    if heads is not None:
        axis, count = heads
        shared = count // array.shape[axis]
        array = array.repeat(shared, axis) if shared > 1 else array
    # As numpy's expand_dims, which takes longer than all else here
    return array[(*[slice(None)] * layer, None)]


@dataclass(frozen=True)
class Arrays:
    """Arrays with named axes, and labels of axes, which all arrays share."""

    given: dict[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    """By name, axes and array; on an accelerator until one is asked for."""
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def values(self) -> Mapping[str, tuple[tuple[str, ...], np.ndarray]]:
        """Axes and array by name.

        Arrays on an accelerator leave it in one copy, with all others that wait there.
        """
        if any(isinstance(array, _Awaited) for _, array in self.given.values()):
            # One copy for all that waits: a copy per array would wait for the device each time.
            # References die with arrays that nobody read: those are never copied
            waiting, _departing[:] = (
                [made for reference in _departing if (made := reference()) is not None],
                [],
            )
            _fetch([self.given, *(made.given for made in waiting if made.given is not self.given)])
        return self.given

    @classmethod
    def of(cls, given: Arrays | xr.Dataset) -> Arrays:
        """Return arrays from arrays or from a Dataset.

        Args:
            given: Arrays, which are returned as they are, or a Dataset, whose attributes are
                dropped.

        Returns:
            The arrays.
        """
        if isinstance(given, Arrays):
            return given
        values = {
            str(name): (tuple(map(str, array.dims)), array.values)
            for name, array in given.data_vars.items()
        }
        return cls(values, {str(axis): np.asarray(given[axis].values) for axis in given.indexes})

    def dataset(self) -> xr.Dataset:
        """Return the arrays as a Dataset.

        Returns:
            A Dataset with the labels as coordinates.
        """
        return xr.Dataset(
            dict(self.values), coords={axis: (axis, labels) for axis, labels in self.labels.items()}
        )

    def at(self, axis: str, place: int) -> Arrays:
        """Select one entry of an axis and keep the axis, with length 1.

        Args:
            axis: Name of the axis.
            place: Index of the entry.

        Returns:
            Views of the arrays.
        """
        values = {
            name: (
                axes,
                values[
                    tuple(slice(place, place + 1) if dim == axis else slice(None) for dim in axes)
                ],
            )
            for name, (axes, values) in self.values.items()
        }
        return Arrays(values, {**self.labels, axis: self.labels[axis][place : place + 1]})

    def sorted_by(self, axis: str) -> Arrays:
        """Sort the arrays by the labels of an axis.

        Args:
            axis: Name of the axis.

        Returns:
            Sorted copies, or the same object where the labels are in order.
        """
        order = np.argsort(self.labels[axis], kind="stable")
        if (order == np.arange(len(order))).all():
            return self
        values = {
            name: (axes, np.take(v, order, axes.index(axis)) if axis in axes else v)
            for name, (axes, v) in self.values.items()
        }
        return Arrays(values, {**self.labels, axis: self.labels[axis][order]})


_departing: list[weakref.ref[Arrays]] = []
"""Arrays objects with tensors on an accelerator."""


@cache
def _kind_of(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def _fetch(records: Sequence[dict[str, tuple[tuple[str, ...], Any]]]) -> None:
    """Copy pending arrays to the CPU, once per device, and put them in place."""
    places = [
        (record, name)
        for record in records
        for name, (_, array) in record.items()
        if isinstance(array, _Awaited)
    ]
    awaited = [record[name][1] for record, name in places]
    make(one.tensor.call for one in awaited if isinstance(one.tensor, Later))
    # Several variables may be entries of one tensor, which is copied once
    tensors = {id(tensor): tensor for tensor, _ in (one.whole for one in awaited)}
    devices: dict[torch.device, dict[torch.dtype, dict[torch.Size, list[Tensor]]]] = {}
    # Wide numbers first, so that all stand at a multiple of their size
    for tensor in sorted(tensors.values(), key=lambda tensor: -tensor.element_size()):
        of_kind = devices.setdefault(tensor.device, {}).setdefault(tensor.dtype, {})
        of_kind.setdefault(tensor.shape, []).append(tensor)
    here: dict[int, np.ndarray] = {}
    for kinds in devices.values():
        # One operator for all tensors of a shape, and bytes: concatenating dtypes would convert them
        parts = [
            torch.cat([torch.stack(some).flatten() for some in of_kind.values()]).view(torch.uint8)
            for of_kind in kinds.values()
        ]
        together, start = torch.cat(parts).cpu().numpy(), 0
        shapes = (some for of_kind in kinds.values() for some in of_kind.values())
        for tensor in (tensor for some in shapes for tensor in some):
            kind = _kind_of(tensor.dtype)
            part = together[start : start + kind.itemsize * tensor.numel()].view(kind)
            here[id(tensor)] = part.reshape(tensor.shape)
            start += part.nbytes
    for (record, name), one in zip(places, awaited, strict=True):
        tensor, entry = one.whole
        # In place: the record is the `given` of an Arrays object, which is so fetched once
        record[name] = record[name][0], _placed(here[id(tensor)], entry, one.layer, one.heads)


def concat_arrays(parts: Sequence[Arrays], axis: str) -> Arrays:
    """Concatenate arrays along an axis and align the other axes by their labels.

    Args:
        parts: Arrays of one or more parts.
        axis: Axis to concatenate along.

    Returns:
        The arrays; absent entries are NaN, or -1 of integers.
    """
    if len(parts) == 1:
        return parts[0]
    labels, places = _align(parts, axis)
    labels[axis] = np.concatenate([part.labels[axis] for part in parts])
    if not any(places) and (whole := _one_after_another(parts, axis)) is not None:
        return Arrays(whole, labels)
    # Parts stand one after the other along the axis; on other axes labels say where
    ends = np.cumsum([0, *(len(part.labels[axis]) for part in parts)])
    for number, place in enumerate(places):
        place[axis] = slice(ends[number], ends[number + 1])
    return Arrays(_put_together(parts, labels, places, add=False), labels)


def _one_after_another(
    parts: Sequence[Arrays], axis: str
) -> dict[str, tuple[tuple[str, ...], np.ndarray]] | None:
    """Join arrays whose other axes agree; None where a part lacks one, or one lacks the axis."""
    given, whole = [part.values for part in parts], {}
    if any(some.keys() != given[0].keys() for some in given):
        return None
    for name, (axes, _) in given[0].items():
        found = [some[name] for some in given]
        if axis not in axes or any(others != axes for others, _ in found):
            return None
        along = axes.index(axis)
        shapes = {(*array.shape[:along], *array.shape[along + 1 :]) for _, array in found}
        if len(shapes) > 1:
            return None
        alone, (others,) = [array for _, array in found], shapes
        shape = *others[:along], sum(array.shape[along] for array in alone), *others[along:]
        # Rows first, whatever the order of the parts: sums of measures round by it
        joined = np.empty(shape, np.result_type(*alone))
        whole[name] = axes, np.concatenate(alone, along, joined)
    return whole


def sum_arrays(parts: Sequence[Arrays]) -> Arrays:
    """Add arrays of the same names, with axes aligned by their labels.

    Args:
        parts: Arrays of one or more parts.

    Returns:
        The sums; absent entries count 0.
    """
    if len(parts) == 1:
        return parts[0]
    labels, places = _align(parts)
    return Arrays(_put_together(parts, labels, places, add=True), labels)


def _align(
    parts: Sequence[Arrays], joining: str | None = None
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Return the union of labels by axis, and the indices of every part into it.

    Axes on which all parts agree have no indices.
    """
    labels: dict[str, np.ndarray] = {}
    places: list[dict[str, Any]] = [{} for _ in parts]
    for axis in dict.fromkeys(axis for part in parts for axis in part.labels if axis != joining):
        by_part = [part.labels.get(axis) for part in parts]
        known = [some for some in by_part if some is not None]
        first = known[0]
        if all(some is first or np.array_equal(first, some) for some in known):
            labels[axis] = first
            continue
        # Sorted union: a longer prompt has more tokens, distances, chunks
        labels[axis] = np.unique(np.concatenate(known))
        for place, some in zip(places, by_part, strict=True):
            if some is not None:
                # Neighboring labels are a slice, so that values are copied without an index.
                found = np.searchsorted(labels[axis], some)
                together = len(found) and (np.diff(found) == 1).all()
                place[axis] = slice(found[0], found[-1] + 1) if together else found
    return labels, places


def _put_together(
    parts: Sequence[Arrays],
    labels: Mapping[str, np.ndarray],
    places: Sequence[Mapping[str, Any]],
    add: bool,
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Write the arrays of parts to their places, added up or beside absent entries."""
    whole, given = {}, [part.values for part in parts]
    for name in dict.fromkeys(name for some in given for name in some):
        by_part = [some.get(name) for some in given]
        axes, some = next(found for found in by_part if found is not None)
        # Axes without labels must agree, and keep the size of the first part
        shape = [
            len(labels[axis]) if axis in labels else size
            for axis, size in zip(axes, some.shape, strict=True)
        ]
        kind = np.result_type(*(found[1].dtype for found in by_part if found is not None))
        values = np.zeros(shape, kind) if add else np.full(shape, _absent(kind), kind)
        for place, found in zip(places, by_part, strict=True):
            if found is not None:
                # Slices where entries stand together: other axes need a grid of places.
                index = tuple(place.get(axis, slice(None)) for axis in axes)
                if not all(isinstance(some, slice) for some in index):
                    numbers = (
                        np.arange(size)[some] for some, size in zip(index, shape, strict=True)
                    )
                    index = np.ix_(*numbers)
                if add:
                    values[index] += found[1]
                else:
                    values[index] = found[1]
        whole[name] = axes, values
    return whole


def _absent(kind: np.dtype) -> Any:
    """Return the value of an absent entry: NaN, -1, or an empty text."""
    if kind.kind in "fc":
        return np.nan
    return -1 if kind.kind == "i" else kind.type()


def arrays(inputs: AttentionInputs, record: Record, **labels: Any) -> Arrays:
    """Label values of one layer.

    Prompts, heads and tokens get their numbers as labels. Heads that share positions, or a key, are
    listed singly.

    Args:
        inputs: The layer and the batch that were measured.
        record: Axes and values by name. The axes name `layer`, of length 1, which the values lack;
            along `head`, tensors may have one row for several heads.
        **labels: Labels of other axes, by the name of the axis.

    Returns:
        The arrays; those on an accelerator are copied to the CPU when one is read.
    """
    # Numbers within the whole analysis, by which batches and processes are aligned
    known = {
        "layer": [inputs.layer],
        "prompt": inputs.prompts.tolist(),
        "head": np.arange(inputs.heads),
        "token": np.arange(inputs.valid.shape[1]),
    } | labels
    used = dict.fromkeys(axis for axes, _ in record.values() for axis in axes.split())
    given = {}
    for names, (named, values) in record.items():
        axes = tuple(named.split())
        several, layer = not isinstance(names, str), axes.index("layer")
        rows = (axes.index("head") - 1, inputs.heads) if "head" in axes else None
        if isinstance(values, Tensor):
            # numpy refuses tensors that require gradients
            values = values.detach() if values.requires_grad else values
            values = values if values.device.type != "cpu" else values.numpy()
        for number, name in enumerate(names if several else (names,)):
            entry = (number,) if several else ()
            given[name] = (
                axes,
                _Awaited(values, entry, layer, rows)
                if isinstance(values, Tensor | Later)
                else _placed(np.asarray(values), entry, layer, rows),
            )
    # Only axes in use: a label without an array would count in an alignment
    made = Arrays(given, {axis: _numbers(known[axis]) for axis in used if axis in known})
    # Weak: arrays that nobody reads are not copied.
    if any(isinstance(array, _Awaited) for _, array in given.values()):
        _departing.append(weakref.ref(made))
    return made


def _numbers(labels: Any) -> np.ndarray:
    # numpy counts a range one number at a time
    return (
        np.arange(labels.start, labels.stop, labels.step)
        if isinstance(labels, range)
        else np.asarray(labels)
    )


def of_layer(
    inputs: AttentionInputs, axes: Sequence[str], values: Tensor | np.ndarray, **coordinates: Any
) -> xr.DataArray:
    """Label one array of one layer.

    Args:
        inputs: The layer and the batch that were measured.
        axes: Axes of the result, with `layer` (length 1) and, where the values have them, `prompt`,
            `head` and `token`.
        values: Values on these axes but `layer`.
        **coordinates: Labels of other axes, by the name of the axis.

    Returns:
        A DataArray with coordinates.
    """
    labelled = arrays(inputs, {"values": (" ".join(axes), values)}, **coordinates)
    return labelled.dataset()["values"].rename(None)


def with_attrs(array: xr.DataArray, long_name: str, units: str) -> xr.DataArray:
    """Set the long name and the units of an array.

    Args:
        array: Array to copy with new attributes.
        long_name: Description of one entry.
        units: Units; "1": none.

    Returns:
        The array with the attributes `long_name` and `units`.
    """
    return array.assign_attrs(long_name=long_name, units=units)


def described_group(
    values: Mapping[Any, Any] | xr.Dataset,
    texts: Mapping[str, str | tuple[str, str]],
    coordinates: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Make a Dataset of the variables that have texts, in the order of the texts.

    Args:
        values: A Dataset; or by name DataArrays, or axes and values.
        texts: Long name by name of the variable, its units behind it in brackets, as charts label
            axes; none: "1". Or a pair of both.
        coordinates: Coordinates of axes of `values` that are given without them.

    Returns:
        A Dataset whose variables have the attributes `long_name` and `units`.
    """
    # Texts must not reach the variables of `values`, of which a new Dataset has copies
    if isinstance(values, xr.Dataset):
        group = values.copy()
    else:
        given = {name: values[name] for name in texts if name in values}
        group = xr.Dataset(given, coordinates and _coordinates(coordinates))
    # Selected, not put together: variables of one Dataset are aligned, and aligning them again takes
    # longer than measuring
    names = [name for name in texts if name in group]
    made = group[names]
    made.attrs = {}
    for name in made.data_vars:
        long_name, units = label_of(texts[str(name)])
        made.variables[name].attrs.update(long_name=long_name, units=units)
    return made


def _coordinates(given: Mapping[str, Any]) -> xr.Coordinates | Mapping[str, Any]:
    """Coordinates of axes, with the index that pandas made when the same labels were first given."""
    if not all(isinstance(some, np.ndarray | list | range) for some in given.values()):
        return given
    labels = {axis: _numbers(some) for axis, some in given.items()}
    if any(some.ndim != 1 or some.dtype.kind not in "iufUb" for some in labels.values()):
        return given
    known = [
        _axis(axis, some.dtype.str, len(some), some.tobytes()) for axis, some in labels.items()
    ]
    variables, indexes = {}, {}
    for coordinate in known:
        variables |= coordinate.variables
        indexes |= coordinate.xindexes
    return xr.Coordinates(variables, indexes)


@lru_cache(maxsize=256)
def _axis(axis: str, dtype: str, size: int, labels: bytes) -> xr.Coordinates:
    # Most groups of a run have the same layers, heads and tokens
    return xr.Coordinates({axis: np.frombuffer(labels, dtype, size).copy()})


def label_of(text: str | tuple[str, str]) -> tuple[str, str]:
    """Split a label into its parts.

    Args:
        text: "long name [units]", "long name", or a pair of both.

    Returns:
        Long name and units; "1" without.
    """
    if isinstance(text, tuple):
        return text
    long_name, _, units = text.removesuffix("]").partition(" [")
    return long_name, units or "1"


def parameter_attributes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in the form of attributes of a group.

    Args:
        parameters: Values by name.

    Returns:
        The same, with tuples as lists.
    """
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in parameters.items()
    }
