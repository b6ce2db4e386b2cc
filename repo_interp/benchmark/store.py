"""The table of a benchmark: bench.csv, one row per line of a part, rewritten whole when a part is done.

A row says what it was measured with: digest of our sources, libraries, machine, day. A part that stands there from the same sources,
libraries and machine is not measured again, so an interrupted benchmark goes on; rows of parts that nobody asked for stay, with what they
were measured with.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from repo_interp import __version__
from repo_interp.benchmark.cost import Cost
from repo_interp.benchmark.parts import Line, Part
from repo_interp.errors import InputError
from repo_interp.files import write_text
from repo_interp.run import versions

TABLE = "bench.csv"


@dataclass(frozen=True)
class Circumstances:
    """What a part was measured with."""

    sources: str
    libraries: str
    machine: str
    day: str

    def equals(self, other: Circumstances) -> bool:
        """Whether numbers can stand for each other: all but the day."""
        return (self.sources, self.libraries, self.machine) == (other.sources, other.libraries, other.machine)


@dataclass(frozen=True)
class Measured:
    """A part with its lines."""

    part: Part
    lines: tuple[Line, ...]
    whole: Cost
    """What measuring the part cost, its process as a whole."""
    circumstances: Circumstances


WHOLE = "the part's whole process"
COLUMNS = (
    *(each.name for each in fields(Part)),
    *("what", "beside", "cpu_seconds", "wall_seconds", "megabytes", "operations", "note"),
    *(each.name for each in fields(Circumstances)),
)


def here_and_now() -> Circumstances:
    """The circumstances of this process."""
    libraries = " ".join(f"{name} {number}" for name, number in versions().items())
    machine = f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    return Circumstances(__version__, libraries, machine, datetime.date.today().isoformat())


def read(directory: Path) -> list[Measured]:
    """What the table in `directory` holds; nothing where there is none. Raises InputError for a file that is no such table."""
    file = directory / TABLE
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise InputError(f"{file} is another table than a benchmark's; give another --out")
        rows = list(reader)
    parts: dict[tuple[Part, Circumstances], list[dict[str, str]]] = {}
    try:
        for row in rows:
            stated: dict[str, Any] = {each.name: _typed(row[each.name], each.default) for each in fields(Part)}
            part = Part(**stated)
            of_row = Circumstances(**{each.name: row[each.name] for each in fields(Circumstances)})
            parts.setdefault((part, of_row), []).append(row)
        return [_measured(part, of_row, lines) for (part, of_row), lines in parts.items()]
    except (ValueError, StopIteration) as error:
        raise InputError(f"{file} is damaged ({error}); remove it, or give another --out") from None


def write(directory: Path, measured: Iterable[Measured]) -> None:
    """Write the table, whole or not at all."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for one in measured:
        for line in (*one.lines, Line(WHOLE, one.whole)):
            values = {**asdict(one.part), **asdict(one.circumstances), **asdict(line), **asdict(line.cost)}
            writer.writerow({name: _written(values[name]) for name in COLUMNS})
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / TABLE, stream.getvalue())


def with_part(measured: Sequence[Measured], new: Measured, order: Sequence[Part]) -> list[Measured]:
    """`measured` with `new` in place of the same part of before; rows and subjects as in `order`, then others; shorter prompts first."""
    places = {(part.row, part.subject): place for place, part in reversed(list(enumerate(order)))}
    others = [one for one in measured if one.part != new.part]

    def place(one: Measured) -> tuple[int, str, str, int]:
        part = one.part
        return places.get((part.row, part.subject), len(places)), part.row, part.subject, part.tokens

    return sorted([*others, new], key=place)


def standing(measured: Iterable[Measured], part: Part, now: Circumstances) -> Measured | None:
    """What stands of `part` from the same circumstances; None where it is to be measured."""
    return next((one for one in measured if one.part == part and one.circumstances.equals(now)), None)


def _measured(part: Part, circumstances: Circumstances, rows: list[dict[str, str]]) -> Measured:
    lines = [_line(row) for row in rows]
    whole = next(line for line in lines if line.what == WHOLE)
    return Measured(part, tuple(line for line in lines if line.what != WHOLE), whole.cost, circumstances)


def _line(row: dict[str, str]) -> Line:
    cost = Cost(*(_number(row[each.name]) for each in fields(Cost)))
    return Line(row["what"], cost, row["beside"], _number(row["operations"]), row["note"])


def _number(text: str) -> float:
    return float(text) if text else math.nan


def _typed(text: str, default: object) -> str | int:
    return int(text) if isinstance(default, int) else text


def _written(value: object) -> object:
    """Six digits say all that is known of a time."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def _processor() -> str:
    return next(iter(_model_names()), platform.processor() or platform.machine())


def _model_names() -> Iterator[str]:
    """What the system calls the processor, where it says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
