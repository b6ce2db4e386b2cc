"""Untrusted HDF5: refuse files that do more at reading than give numbers and texts of one file.

The HDF5 library opens other files (external storage, external links, virtual datasets), loads
plug-ins (filters), follows circles of links, and expands a few bytes to gigabytes. A netCDF file
needs none of that:

    every group and array has one name      arrays hold numbers or texts, and name their axes
    filters: shuffle, zlib, a checksum      all together fit into memory

Only the structure is read here, before any value. This module knows nothing about the meaning of
the arrays.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from math import prod
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t, h5z  # pyright: ignore[reportAttributeAccessIssue]

from repo_interp.errors import InputError, one_line
from repo_interp.runtime.memory import machine_memory

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MOST_PACKED = 1 << 14
"""Bytes in memory per byte of a file: zlib packs 1,032 into one, and a number becomes eight bytes.
"""
_MOST_GROUPS, _MOST_PARTS = 1_000, 100_000
"""How many groups, each of which takes xarray milliseconds, and groups, arrays and attributes."""
_DEEPEST = 16
"""Groups within groups."""
_PLAIN = (h5t.INTEGER, h5t.FLOAT, h5t.STRING)
_OF_AXES = {b"DIMENSION_LIST": h5t.VLEN, b"REFERENCE_LIST": h5t.COMPOUND}
"""Attributes by which netCDF ties arrays to their axes, and their types."""
_AXES_NAMED = {b"DIMENSION_LIST", b"CLASS", b"_Netcdf4Coordinates"}
"""Attributes of which an array that names its axes, or is one, has some."""
_FILTERS = (
    (),
    (h5z.FILTER_SHUFFLE,),
    (h5z.FILTER_DEFLATE,),
    (h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE),
)
_CHECKSUM = 4
_ADDRESS = 16
"""Bytes of the address of a text: its length (4), and its place in the file's heap."""
_MOST_TEXT = 1 << 30
"""Most bytes of texts in addition to the size of the file, since entries may share one text."""
# Looks ahead, so that no collection hides behind the beginning of another
_HEAP = re.compile(rb"(?=GCOL\x01\0\0\0(.{8}))", re.DOTALL)


class FileContent(BytesIO):
    """Bytes of a file for HDF5. Reads beyond the end give zeros, as for a file."""

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer of HDF5, which does not ask how much was read."""
        count = super().readinto(buffer)
        buffer[count:] = bytes(len(buffer) - count)
        return count


class ReadOnly(h5py.File):
    """HDF5 that is read. Each object is opened once, and h5netcdf asks for it at every access."""

    def __init__(self, content: bytes) -> None:
        super().__init__(FileContent(content))
        self._opened = cache(super().__getitem__)

    def __getitem__(self, name: Any) -> Any:
        """Get an object by its path or a reference."""
        return self._opened(name)


def require_plain(content: bytes) -> None:
    """Require that HDF5 reads nothing but this content, and no more than fits into memory.

    Args:
        content: Bytes of a file.

    Raises:
        InputError: The content has a feature that a netCDF file of numbers and texts does not need.
        Exception: HDF5 cannot read the content; with damaged bytes it may raise any error.
    """
    with ReadOnly(content) as file:
        if not content.startswith(_SIGNATURE):
            raise InputError("other bytes precede its HDF5")
        _Plain(content).require(file.id)


class _Plain:
    """The check of one file: the objects seen so far, and the bytes needed to read them."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._groups = self._parts = self._bytes = self._texts = 0
        self._seen: set[int] = set()
        lengths = (int.from_bytes(found[1], "little") for found in _HEAP.finditer(content))
        self._longest_text = min(max(lengths, default=0), len(content))

    def require(self, root: Any) -> None:
        """Go through all groups, arrays and attributes; raises as `require_plain`."""
        waiting = [(h5g.open(root, b"/"), "", 0)]
        self._seen.add(h5o.get_info(waiting[0][0]).addr)
        while waiting:
            group, path, depth = waiting.pop()
            self._require_attributes(group, path or "/")
            if depth == _DEEPEST:
                raise InputError(f"groups are nested more than {_DEEPEST} deep")
            for name, kind in self._members(group, path):
                place = f"{path}/{_shown(name)}"
                if kind == h5o.TYPE_GROUP:
                    waiting.append((h5g.open(group, name), place, depth + 1))
                elif kind == h5o.TYPE_DATASET:
                    self._require_array(h5d.open(group, name), place)
                else:
                    raise InputError(f"{place} is neither a group nor an array")

    def _members(self, group: Any, path: str) -> Iterator[tuple[bytes, int]]:
        """Names and kinds of the members of a group; refuses links to other places."""
        names: list[bytes] = []
        group.links.iterate(names.append)
        for name in names:
            # The type of the link itself, which is not followed
            if group.links.get_info(name).type != h5l.TYPE_HARD:
                raise InputError(f"{path}/{_shown(name)} is a link; wanted the array itself")
            info = h5o.get_info(group, name)
            if info.addr in self._seen:
                raise InputError(
                    f"{path}/{_shown(name)} is a second name of something in the file, which can "
                    "lead in a circle; wanted one name each"
                )
            self._seen.add(info.addr)
            self._count(1, info.type == h5o.TYPE_GROUP)
            yield name, info.type

    def _require_array(self, array: Any, place: str) -> None:
        plan = array.get_create_plist()
        layout = plan.get_layout()
        # Before other properties of the array: even its shape may open other files
        if plan.get_external_count() or layout == h5d.VIRTUAL:
            raise InputError(
                f"{place} takes its numbers from other files, and a run file does not choose "
                "what is read"
            )
        filters = [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]
        packed = tuple(one for one in filters if one != h5z.FILTER_FLETCHER32)
        kind = array.get_type()
        is_text = _is_text(kind)
        if packed not in _FILTERS or (is_text and filters):
            raise InputError(f"{place} is packed by other means than zlib; pack it by that")
        if kind.get_class() not in _PLAIN:
            raise InputError(f"{place} holds neither numbers nor texts")
        names = self._require_attributes(array, place)
        if array.get_space().get_simple_extent_type() == h5s.NULL:
            raise InputError(f"{place} has no shape, so this is HDF5 and no netCDF")
        if array.shape and not _AXES_NAMED & names:
            raise InputError(f"{place} names no axes, so this is HDF5 and no netCDF")
        cells = prod(array.shape)
        chunks = prod(plan.get_chunk()) if layout == h5d.CHUNKED else 0
        size = _ADDRESS if is_text else kind.get_size()
        # A chunk is read whole. Numbers may become larger ones: of 8 bytes, as times do.
        self._take(max(cells * max(8, size), chunks * size))
        if is_text and plan.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
            self._take_texts(cells * self._longest_text)
        stored = []
        if layout == h5d.CHUNKED and cells:
            array.chunk_iter(stored.append)
        if is_text:
            places = [(chunk.byte_offset, chunk.size) for chunk in stored]
            if layout == h5d.CONTIGUOUS and array.get_offset() is not None:
                places = [(array.get_offset(), array.get_storage_size())]
            elif layout == h5d.COMPACT:
                raise InputError(f"{place} keeps texts in its header; wanted them outside")
            for offset, length in places:
                self._take_texts(self._lengths(offset, length, chunks or cells, place))
        elif h5z.FILTER_DEFLATE in packed:
            skipped = 1 << filters.index(h5z.FILTER_DEFLATE)
            for chunk in stored:
                if not chunk.filter_mask & skipped:
                    self._require_unpacked(chunk, chunks * size, place)

    def _require_attributes(self, owner: Any, place: str) -> set[bytes]:
        """Names of the attributes of a group or an array, each of which is checked."""
        names: list[bytes] = []
        h5a.iterate(owner, names.append)
        self._count(len(names))
        for name in names:
            attribute = h5a.open(owner, name)
            kind = attribute.get_type()
            if kind.get_class() not in _PLAIN and kind.get_class() != _OF_AXES.get(name):
                raise InputError(
                    f"the attribute {_shown(name)} of {place} holds neither numbers nor texts"
                )
            if _is_text(kind) or kind.get_class() == h5t.VLEN:
                # Any number of them may be one text of the heap, so each counts as the longest.
                cells = attribute.get_space().get_simple_extent_npoints()
                self._take_texts(cells * self._longest_text)
        return set(names)

    def _lengths(self, offset: int, length: int, cells: int, place: str) -> int:
        """Number of bytes of the texts with addresses in a part of the file."""
        if length != cells * _ADDRESS or offset + length > len(self._content):
            raise InputError(f"{place} is damaged: its texts are not at the stated place")
        lengths = np.frombuffer(self._content, "<u4", length // 4, offset)[:: _ADDRESS // 4]
        return int(lengths.sum(dtype=np.uint64))

    def _require_unpacked(self, chunk: Any, size: int, place: str) -> None:
        """Require that a packed chunk has its stated size, since HDF5 unpacks all of its data."""
        packed = self._content[chunk.byte_offset : chunk.byte_offset + chunk.size]
        unpacked = len(zlib.decompressobj().decompress(packed, size + _CHECKSUM + 1))
        if unpacked not in (size, size + _CHECKSUM):
            raise InputError(f"{place} is damaged: a chunk does not unpack to its size")

    def _count(self, parts: int, groups: int = 0) -> None:
        self._parts, self._groups = self._parts + parts, self._groups + groups
        if self._parts > _MOST_PARTS or self._groups > _MOST_GROUPS:
            raise InputError(
                f"it has more than {_MOST_GROUPS:,} groups, or {_MOST_PARTS:,} arrays and attributes"
            )

    def _take(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _MOST_PACKED * len(self._content):
            raise InputError("it states more numbers than such a file can hold")
        if self._bytes > (most := machine_memory() / 2):
            raise InputError(
                f"its numbers take more than {most / 2**30:,.1f} GiB, half of this machine's memory"
            )

    def _take_texts(self, size: int) -> None:
        self._texts += size
        if self._texts > len(self._content) + _MOST_TEXT:
            raise InputError("it states more texts than such a file can hold")


def _is_text(kind: Any) -> bool:
    """Whether the type is that of texts of any length."""
    return kind.get_class() == h5t.STRING and kind.is_variable_str()


def _shown(name: bytes) -> str:
    return one_line(name.decode("utf-8", "backslashreplace"), 80)
