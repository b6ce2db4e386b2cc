"""Statistics of the layers of a pass, in few large blocks of memory.

    gather(layer 0), gather(layer 1), ...     bytes, one array after the other
    statistics()                              the same arrays, as views of these bytes

The statistics of a layer take some hundred bytes to some megabytes. Separate arrays would lie between
the large tensors that a pass frees, so the C library could not merge the freed memory: 30 layers of
2,048 tokens held 400 MB of unused memory.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from repo_interp.measures.labels import Arrays
from repo_interp.measures.statistics import STATISTICS, Statistics

BLOCK = 1 << 20
"""Bytes of a block. The system provides memory only for the part that is written."""
ALIGNMENT = 64
"""Bytes: arrays begin at multiples of it."""


@dataclass(frozen=True)
class _Slot:
    """Place of one array of a layer. Two layers with the same measurements have equal slots."""

    part: str
    name: str
    axes: tuple[str, ...] | None
    """None: labels of the axis `name`."""
    kind: np.dtype
    shape: tuple[int, ...]
    apart: bool
    """Whether it stays an object: labels that all layers share, and Python objects."""

    @property
    def size(self) -> int:
        """Bytes in a block."""
        return (
            0 if self.apart else -(-self.kind.itemsize * prod(self.shape) // ALIGNMENT) * ALIGNMENT
        )


@dataclass
class GatheredLayers:
    """Statistics of layers by measure."""

    blocks: list[mmap.mmap] = field(default_factory=list)
    begin: int = 0
    """Where the last block is free."""
    labels: dict[tuple[str, str, str], np.ndarray] = field(default_factory=dict)
    """Of the first layer, by measure, part and axis."""
    layers: dict[str, list[tuple[tuple[_Slot, ...], int, int, tuple[Any, ...]]]] = field(
        default_factory=dict
    )
    """By measure: slots, number of the block, where it begins there, and arrays that stay objects.
    Plain numbers, which Python keeps beside the heap that tensors come from.
    """

    def gather(self, measure: str, statistics: Statistics) -> None:
        """Copy the statistics of a layer.

        Args:
            measure: Name of the measure.
            statistics: Its statistics, on the processor.
        """
        slots, arrays = [], []
        for part in STATISTICS:
            given = statistics.arrays[part]
            for name, (axes, values) in given.values.items():
                apart = values.dtype.hasobject
                slots.append(_Slot(part, name, axes, values.dtype, values.shape, apart))
                arrays.append(values)
            for axis, known in given.labels.items():
                shared = self.labels.setdefault((measure, part, axis), known) is known
                apart = shared or known.dtype.hasobject
                slots.append(_Slot(part, axis, None, known.dtype, known.shape, apart))
                arrays.append(known)
        layers = self.layers.setdefault(measure, [])
        # Layers that measure the same share one object
        form = layers[-1][0] if layers and layers[-1][0] == tuple(slots) else tuple(slots)
        size = sum(slot.size for slot in form)
        if not self.blocks or self.begin + size > len(self.blocks[-1]):
            self.blocks.append(mmap.mmap(-1, max(BLOCK, size)))
            self.begin = 0
        block, begin, kept = len(self.blocks) - 1, self.begin, []
        for slot, values in zip(form, arrays, strict=True):
            if slot.apart:
                kept.append(values)
            else:
                self._view(slot, block, self.begin)[...] = values
                self.begin += slot.size
        layers.append((form, block, begin, tuple(kept)))

    def statistics(self, measure: str) -> list[Statistics]:
        """Return the statistics of all layers of a measure.

        Args:
            measure: Name of the measure.

        Returns:
            Statistics in the order in which they were gathered.
        """
        found = []
        for form, block, begin, kept in self.layers.get(measure, ()):
            objects = iter(kept)
            values: dict[str, dict[str, Any]] = {part: {} for part in STATISTICS}
            labels: dict[str, dict[str, np.ndarray]] = {part: {} for part in STATISTICS}
            for slot in form:
                array = next(objects) if slot.apart else self._view(slot, block, begin)
                begin += slot.size
                if slot.axes is None:
                    labels[slot.part][slot.name] = array
                else:
                    values[slot.part][slot.name] = slot.axes, array
            found.append(
                Statistics(**{part: Arrays(values[part], labels[part]) for part in STATISTICS})
            )
        return found

    def _view(self, slot: _Slot, block: int, begin: int) -> np.ndarray:
        return np.ndarray(slot.shape, slot.kind, self.blocks[block], begin)
