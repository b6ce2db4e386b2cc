"""Rows of a data set's file as it is published, and their fields, with the row and the field named where something is not as it should be.

    .jsonl            one JSON object per line                 .json       a list of objects, or one object
    .parquet          one row per record (needs pyarrow)       a folder    every such file in it, by name

Knows nothing about what the rows mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError

SUFFIXES = (".json", ".jsonl", ".parquet")
_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Row:
    """An object of a file, and where it stands: "dev.json, row 3", with what leads to it."""

    values: Mapping[str, Any]
    place: str

    def has(self, field: str) -> bool:
        """Whether the field is there and is not null."""
        return self.values.get(field) is not None

    def text(self, field: str) -> str:
        """A field that is text, not empty. Raises InputError naming row and field."""
        value = self._typed(field, str)
        if not value.strip():
            raise InputError(f"{self.place}, field {field!r}: the text is empty; fill it or drop the row")
        return value

    def any_text(self, field: str) -> str:
        """A field that is text and may be empty. Raises InputError naming row and field."""
        return self._typed(field, str)

    def number(self, field: str) -> int:
        """A field that is a whole number. Raises InputError naming row and field."""
        return self._typed(field, int)

    def items(self, field: str) -> Sequence[Any]:
        """A field that is a list. Raises InputError naming row and field."""
        return self._typed(field, list)

    def texts(self, field: str) -> list[str]:
        """A field that is a list of texts. Raises InputError naming row and field."""
        items = self.items(field)
        for number, item in enumerate(items, start=1):
            if not isinstance(item, str):
                raise InputError(f"{self.place}, field {field!r}, item {number}: wanted text, got {_shown(item)}; mend the row")
        return list(items)

    def object(self, field: str) -> Row:
        """A field that is an object. Raises InputError naming row and field."""
        return Row(self._typed(field, dict), f"{self.place}, field {field!r}")

    def objects(self, field: str) -> list[Row]:
        """A field that is a list of objects. Raises InputError naming row and field."""
        rows = [Row(item, f"{self.place}, field {field!r}, item {number}") for number, item in enumerate(self.items(field), 1)]
        for row in rows:
            if not isinstance(row.values, Mapping):
                raise InputError(f"{row.place}: wanted an object, got {_shown(row.values)}; mend the row")
        return rows

    def _typed(self, field: str, kind: type) -> Any:
        if field not in self.values:
            known = ", ".join(list(self.values)[:8]) or "none"
            raise InputError(
                f"{self.place}: there is no field {field!r}, only {known}; name a file of this data set's own format"
            )
        value = self.values[field]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(f"{self.place}, field {field!r}: wanted {_KINDS[kind]}, got {_shown(value)}; mend the row")
        return value


def files_of(path: str | Path) -> list[Path]:
    """The files that `path` names: itself, or all data files in a folder, by name. Raises InputError where there is none."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise InputError(f"{path}: wanted data files ({', '.join(SUFFIXES)}) in the folder, but there are none; name another")
        return files
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; name the data set's own file")
    return [path]


def read_rows(file: Path) -> Iterator[Row]:
    """Every row of one file, in order, numbered from 1. Raises InputError where it cannot be read."""
    if file.suffix == ".parquet":
        values: Iterator[tuple[int, Any]] = enumerate(_parquet(file), start=1)
    elif file.suffix == ".jsonl":
        values = _lines(file)
    else:
        whole = read_json(file)
        values = enumerate(whole if isinstance(whole, list) else [whole], start=1)
    for number, value in values:
        if not isinstance(value, Mapping):
            raise InputError(f"{file}, row {number}: wanted an object with fields, got {_shown(value)}; mend the file")
        yield Row(value, f"{file}, row {number}")


def read_json(file: Path) -> Any:
    """The JSON of a file. Raises InputError where it cannot be read."""
    try:
        return json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: wanted JSON, but {error}; name the data set's own file") from None


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{file}, row {number}: wanted a JSON object per line, but {error}; mend the line") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{file}: wanted a text file, but {reason}; name the data set's own file") from None


def _parquet(file: Path) -> list[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{file}: reading parquet needs pyarrow; install it, or give the rows as .jsonl") from None
    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise InputError(f"{file}: this is no parquet file that can be read ({str(error).splitlines()[0]})") from None


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=True, default=str)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
