"""The header of a GGUF file: metadata, and places of tensors.

Loads no torch; `values` reads a tensor.

    "GGUF" version tensors pairs | key type value ... | name axes kind offset ... | padding | values
    of tensors, in order, without gaps

Texts are skipped by their lengths: a list of texts, such as the vocabulary, is kept as a range of
its length. All lengths and offsets are checked against the size of the file before use. Needs the
package `gguf` (the extra `[gguf]`), for the kinds of blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from repo_interp.errors import InputError, as_input_errors, one_line, quoted

FACTORS = "rope_freqs.weight"
"""The tensor that divides the frequency of every rotary pair; it belongs to the rotation, not to
the weights.
"""
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# By number: 0 is an unsigned byte, 6 a float32, 12 a float64; dots stand for no number.
_NUMBERS = "BbHhIif?..Qqd"
"""`struct`'s letters for types of values, by its number; 8 is a text, 9 a list."""
_TEXT, _LIST = 8, 9
_MOST_AXES = 4
# Larger lists, such as scores of all tokens, are skipped; `Header.items` reads them when needed.
_LONGEST = 1 << 16
"""Most items of a list of numbers that are kept."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is stored."""

    shape: tuple[int, ...]
    kind: int
    """Kind of the blocks (`gguf.GGMLQuantizationType`)."""
    offset: int
    """Offset in the file."""
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class Header:
    """The part of a GGUF file before the values."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    lists: Mapping[str, int]
    """Offsets of the lists of the metadata, by key."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def items(self, key: str) -> list[Any]:
        """Read a list of the metadata whole, however long it is.

        Args:
            key: Key of the list.

        Returns:
            Its items.
        """
        reader = _Reader(self.file)
        reader.place = self.lists[key]
        return reader.items()

    def values(self, name: str) -> np.ndarray:
        """Dequantize a tensor.

        Args:
            name: Name of the tensor.

        Returns:
            Values in float32, in the shape of the tensor.
        """
        from gguf import GGMLQuantizationType, dequantize
        from gguf.quants import quant_shape_to_byte_shape

        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        stored = np.memmap(self.file, np.uint8, "r", tensor.offset, (tensor.size,))
        # Copied out of the mapped file, which would otherwise stay open as long as the weights live
        return np.array(
            dequantize(stored.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind),
            np.float32,
        )


def header_of(file: Path) -> Header:
    """Read the header of a GGUF file.

    Args:
        file: The GGUF file.

    Returns:
        Metadata and tensors; long lists and lists of texts are ranges of their length.

    Raises:
        InputError: The package gguf is missing, or the file is not GGUF, ends too early or has
            overlapping tensors.
    """
    if find_spec("gguf") is None:
        raise InputError(
            f"{file} is a GGUF file; to read it install the package gguf: pip install "
            "'repo-interp[gguf]'"
        )
    _require_magic(file)
    with as_input_errors(f"{file} cannot be read as GGUF", 200):
        return _read(file)


def _require_magic(file: Path) -> None:
    """Raise InputError if a file does not begin with the magic bytes of GGUF."""
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise InputError(
                f"{file} does not begin as a GGUF file does; wanted one that llama.cpp or a "
                "model hub gives"
            )


class _Reader:
    """Reads values one after the other, up to the end of the file."""

    def __init__(self, file: Path) -> None:
        # Mapped, so that only the header is read, a few MB, and not the gigabytes after it.
        self._file, self.data, self.place = file, np.memmap(file, np.uint8, "r"), len(_MAGIC)

    def require(self, end: int) -> None:
        """Raise InputError if the file has fewer than `end` bytes."""
        if end > len(self.data):
            raise InputError(
                f"{self._file} cannot be read as GGUF: it ends before all that its header announces"
            )

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes."""
        # Lengths come from the file, and a false one may be huge, so they are checked first.
        self.require(self.place + size)
        self.place += size
        return memoryview(self.data)[self.place - size : self.place]  # pyright: ignore[reportArgumentType]

    def number(self, letter: str) -> Any:
        # GGUF is little-endian on any machine.
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode()

    def items(self) -> list[Any]:
        """Read a list that `value` has skipped, so it is known to be complete."""
        of, count = self.number("I"), self.number("Q")
        if of == _TEXT:
            return [self.text() for _ in range(count)]
        letter = _NUMBERS[of]
        stored = self.take(count * struct.calcsize(f"<{letter}"))
        return list(struct.unpack(f"<{count}{letter}", stored))

    def value(self, kind: int) -> Any:
        """Read a value; long lists and lists of texts become ranges of their length."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_NUMBERS[kind])
        of, count = self.number("I"), self.number("Q")
        # GGUF allows nested lists, but no known file has one; deep nesting would exhaust the stack.
        if of == _LIST:
            raise ValueError("a list of lists")
        if of == _TEXT:
            # A false count fails at the end of the file, since a text takes at least 8 bytes.
            for _ in range(count):
                self.take(self.number("Q"))
            return range(count)
        letter = _NUMBERS[of]
        # Taken as a whole before unpacking, so that a false count fails here.
        stored = self.take(count * struct.calcsize(f"<{letter}"))
        return (
            list(struct.unpack(f"<{count}{letter}", stored)) if count <= _LONGEST else range(count)
        )


def _read(file: Path) -> Header:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    reader = _Reader(file)
    version = reader.number("I")
    if version not in _VERSIONS:
        raise ValueError(
            f"version {version}; wanted {' or '.join(map(str, _VERSIONS))}, little-endian"
        )
    tensors, pairs = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    lists: dict[str, int] = {}
    for _ in range(pairs):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"the key {one_line(key, 100)} occurs twice")
        if (value_kind := reader.number("I")) == _LIST:
            lists[key] = reader.place
        metadata[key] = reader.value(value_kind)
    infos = []
    for _ in range(tensors):
        name, axes = reader.text(), reader.number("I")
        if axes > _MOST_AXES:
            raise ValueError(f"{one_line(name, 100)} has {axes} axes")
        shape = tuple(reader.number("Q") for _ in range(axes))
        # GGML names the fastest axis first, numpy the slowest.
        infos.append((name, shape[::-1], reader.number("I"), reader.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {quoted(alignment, 40)}; wanted a power of two")
    # Values begin at the next multiple of the alignment.
    begin = first = -(-reader.place // alignment) * alignment
    found: dict[str, Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in found:
            raise ValueError(f"the tensor {one_line(name, 100)} occurs twice")
        # Offsets must be contiguous, as in llama.cpp; otherwise tensors could overlap.
        if first + offset != begin:
            raise InputError(
                f"{file}: {one_line(name, 100)} begins at byte {first + offset:,}; the "
                f"tensor before it ends at {begin:,}"
            )
        # Quantized numbers come in blocks with common scales, such as 32 or 256 of them.
        in_block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or shape[-1] % in_block:
            raise ValueError(
                f"{one_line(name, 100)} has shape {list(shape)}, and blocks of {in_block}"
            )
        size = math.prod(shape) // in_block * bytes_of_block
        reader.require(begin + size)
        found[name] = Tensor(shape, kind, begin, size)
        begin += -(-size // alignment) * alignment
    return Header(file, metadata, found, lists)
