"""Rows of a data set's file as it is published, and their fields, with the row and the field named where something is not as it should be.

    .jsonl            one JSON object per line                 .json       a list of objects, one object, or one per line
    .parquet          one row per record (needs pyarrow)       a folder    every such file in it, by name

Knows nothing about what the rows mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError, one_line
from repo_interp.records import parsed, read_text, typed

SUFFIXES = (".json", ".jsonl", ".parquet")
WANTED = "the data set's own file"


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

    def lists(self, field: str) -> list[list[Any]]:
        """A field that is a list of lists. Raises InputError naming row and field."""
        return self._typed(field, list[list])

    def texts(self, field: str) -> list[str]:
        """A field that is a list of texts. Raises InputError naming row and field."""
        return self._typed(field, list[str])

    def object(self, field: str) -> Row:
        """A field that is an object. Raises InputError naming row and field."""
        return Row(self._typed(field, dict), f"{self.place}, field {field!r}")

    def objects(self, field: str) -> list[Row]:
        """A field that is a list of objects. Raises InputError naming row and field."""
        objects = enumerate(self._typed(field, list[dict]), start=1)
        return [Row(value, f"{self.place}, field {field!r}, item {number}") for number, value in objects]

    def _typed(self, field: str, kind: Any) -> Any:
        if field not in self.values:
            known = ", ".join(list(self.values)[:8]) or "none"
            raise InputError(
                f"{self.place}: there is no field {field!r}, only {known}; name a file of this data set's own format"
            )
        return typed(self.values[field], kind, f"{self.place}, field {field!r}")


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
    values: Iterable[tuple[int, Any]]
    text = "" if file.suffix == ".parquet" else read_text(file, WANTED)
    if file.suffix == ".parquet":
        values = enumerate(_parquet(file), start=1)
    elif file.suffix == ".jsonl" or _has_an_object_per_line(text):
        lines = enumerate(text.split("\n"), start=1)
        values = ((number, parsed(line, f"{file}, row {number}")) for number, line in lines if line.strip())
    else:
        whole = parsed(text, str(file))
        values = enumerate(whole if isinstance(whole, list) else [whole], start=1)
    for number, value in values:
        yield Row(typed(value, dict, f"{file}, row {number}"), f"{file}, row {number}")


def _has_an_object_per_line(text: str) -> bool:
    """Whether the first line is an object of its own and more follows, as libraries write what they call .json."""
    first, _, rest = text.lstrip().partition("\n")
    return first.startswith("{") and first.rstrip().endswith("}") and rest.lstrip().startswith("{")


def _parquet(file: Path) -> list[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{file}: reading parquet needs pyarrow; install it, or give the rows as .jsonl") from None
    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are among these
        raise InputError(f"{file}: this is no parquet file that can be read ({one_line(error)})") from None
