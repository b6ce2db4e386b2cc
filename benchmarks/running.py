"""Parts, each in a separate process, the table of their rows, and the cost of a call or a command.

A part is a function that takes the options of the command line and yields rows. Its name has
sections: "layer" selects "layer/512" and "layer/4096". The table is one CSV file, written after
each part; the rows of parts that did not run stay.

CPU time is user and system time of all threads: its ratios are stable even while other processes
run. Memory is the high-water mark of the resident set minus its size before the call, on systems
that report it (Linux): it includes results, and excludes inputs.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import shlex
import sys
import time
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pandas

from benchmarks.process_memory import resident

Row = dict[str, Any]
Frame = Any  # a pandas.DataFrame: pandas' types do not know the types of its columns
Cost = dict[str, Any]
"""`cpu_seconds`, `wall_seconds`, `megabytes` (2^20 bytes); NaN if the system does not report it."""
Part = Callable[[Namespace], Iterable[Row]]
LIBRARIES = ("torch", "transformers", "transformer-lens", "xarray", "h5py", "repo-interp")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # An installed package has bytecode; without it, every process would compile our modules again.
    "PYTHONDONTWRITEBYTECODE": "",
}
_CLEAR = Path("/proc/self/clear_refs")


def run(
    parser: ArgumentParser,
    parts: Mapping[str, Part],
    columns: Sequence[str],
    table: Path,
    write_page: Callable[[Path, Frame], None],
    by_name: Sequence[str] = (),
) -> list[Row]:
    """Run the parts that the command line names, by default all except the sections `by_name`;
    return their rows.

    The rows are written to `table`, or to the file that the command line names. A part that fails,
    or whose process is killed, does not affect the others: the program ends with one line per such
    part and exit code 1.
    """
    every = list(dict.fromkeys(name.partition("/")[0] for name in parts))
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(every)}, or a whole name such as {next(iter(parts))}",
    )
    parser.add_argument(
        "--table",
        type=Path,
        default=table,
        metavar="FILE",
        help=f"where rows go (default: {table})",
    )
    parser.add_argument(
        "--page", action="store_true", help="run nothing, write the page from the table"
    )
    given = parser.parse_args()
    names = given.parts or [name for name in every if name not in by_name]
    selected = {
        name: [part for part in parts if f"{part}/".startswith(f"{name}/")] for name in names
    }
    if missing := [name for name, some in selected.items() if not some]:
        parser.error(f"there is no part {missing[0]!r}; there are {', '.join(parts)}")
    os.environ |= ENVIRONMENT
    new: list[Row] = []
    failures = []
    for name in [] if given.page else [part for some in selected.values() for part in some]:
        sys.stdout.write(f"{name} ...\n")
        sys.stdout.flush()
        try:
            rows = in_a_process(_rows, parts[name], given)
        except Exception as error:
            failures.append(f"{name}: {said_of(error, 300)}")
            continue
        new += rows
        keep(given.table, columns, name, rows, list(parts))
        sys.stdout.write(f"{markdown(pandas.DataFrame(rows))}\n\n")
    write_page(given.table, read(given.table, columns))
    if failures:
        raise SystemExit("\n".join(failures))
    return new


def row(what: str, beside: str = "", **columns: Any) -> Row:
    """A row of a table: the measured item, the row for comparison, and other columns."""
    return {"what": what} | ({"beside": beside} if beside else {}) | columns


def read_toml(file: str | Path) -> dict[str, Any]:
    """The content of a TOML file, given its path with any ending, such as the path of a module with
    the same name.
    """
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))


def read_parts(
    stated: Mapping[str, dict[str, Any]], functions: Mapping[str, Any]
) -> dict[str, Part]:
    """Parts by name: the named function, else that of the section, with its options."""
    return {
        name: partial(functions[options.pop("function", name.partition("/")[0])], **options)
        for name, options in stated.items()
    }


def said_of(error: Exception, longest: int = 140) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:longest]}"


def in_a_process(work: Callable[..., Any], *arguments: Any, start: str = "spawn") -> Any:
    """The result of `work` in a new process.

    Raises the errors of `work`, and BrokenProcessPool if the process was killed.
    """
    with ProcessPoolExecutor(1, get_context(start)) as pool:
        return pool.submit(work, *arguments).result()


def _rows(part: Part, given: Namespace) -> list[Row]:
    return list(part(given))


def read(table: Path, columns: Sequence[str]) -> Frame:
    """The table in the file `table`; empty if there is none."""
    return (
        pandas.read_csv(table)
        if table.is_file()
        else pandas.DataFrame(columns=["part", *columns, "with"])
    )


def keep(
    table: Path, columns: Sequence[str], part: str, rows: Sequence[Row], order: Sequence[str]
) -> None:
    """Replace the rows of `part` by `rows`, with machine and libraries; parts are sorted by
    `order`, and other parts are removed.
    """
    before = read(table, columns)
    new = pandas.DataFrame(
        [{"part": part, **row, "with": circumstances()} for row in rows],
        columns=["part", *columns, "with"],
    )
    whole: Frame = pandas.concat(
        [before[before["part"].isin(order) & (before["part"] != part)], new.astype(object)]
    )
    table.parent.mkdir(parents=True, exist_ok=True)
    unfinished = table.with_suffix(".unfinished")
    whole.sort_values("part", key=lambda names: names.map(order.index), kind="stable").to_csv(
        unfinished, index=False, float_format="%.6g", lineterminator="\n"
    )
    unfinished.replace(table)


def sections(table: Frame, shown: Frame, parts: Mapping[str, Part]) -> list[str]:
    """The lines of a page: by section the docstring of its function and its rows of `shown`, then
    machine and libraries of the rows of `table`.
    """
    lines = []
    of_row = table["part"].str.partition("/")[0]
    for section, names in groupby(parts, lambda name: name.partition("/")[0]):
        names = list(names)
        about = " ".join(str(getattr(parts[names[0]], "func", parts[names[0]]).__doc__).split())
        rows = shown[of_row == section].dropna(axis="columns", how="all")
        missing = [name for name in names if name not in set(table["part"])]
        lines += ["", f"## {section}", "", about] + ([] if rows.empty else ["", markdown(rows)])
        lines += ["", f"Not run: {', '.join(missing)}."] if missing else []
    lines += ["", "## Run with", ""]
    return lines + [
        f"- {', '.join(rows['part'].unique())}: {name}"
        for name, rows in table.groupby("with", sort=False)
    ]


def circumstances() -> str:
    """Processor, system and libraries of this process."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    machine = f"{(models or [platform.machine()])[0]}, {os.cpu_count()} cores, {platform.system()}"
    return "; ".join(
        [
            machine,
            f"python {platform.python_version()}",
            *(f"{name} {version(name)}" for name in LIBRARIES),
        ]
    )


def markdown(frame: Frame) -> str:
    """`frame` as a table of Markdown: numbers with three digits, empty cells for missing ones."""
    numeric = [pandas.api.types.is_numeric_dtype(frame[name]) for name in frame]
    lines = [
        "| " + " | ".join(map(str, frame.columns)) + " |",
        "|" + "".join("---:|" if one else "---|" for one in numeric),
    ]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.split()).replace("|", "\\|")
    return (
        ""
        if pandas.isna(value)
        else f"{value:,.0f}"
        if value == int(value) or value >= 1000
        else f"{value:.3g}"
    )


def cost(call: Callable[[], object], repeats: int = 1) -> Cost:
    """The least seconds of `repeats` calls after a warm-up (none if `repeats` is 1), and the peak
    memory of the first call.
    """

    def seconds() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        return time.process_time() - cpu, time.perf_counter() - wall

    if repeats > 1:
        call()
    gc.collect()
    if _CLEAR.exists():
        ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system
        _CLEAR.write_text("5")  # the high-water mark starts from here
    before = resident("VmRSS")
    first = seconds()
    megabytes = resident("VmHWM") - before
    cpu, wall = map(min, zip(first, *(seconds() for _ in range(repeats - 1)), strict=True))
    return {"cpu_seconds": cpu, "wall_seconds": wall, "megabytes": megabytes}


def time_command(
    words: str, until: str = "", environment: Mapping[str, str] | None = None
) -> tuple[float, Cost]:
    """Run Python with `words`; return the wall-clock seconds to the first line, and the cost of the
    whole run, with the peak memory of the process.

    With `until`, the run ends after the first line that contains it. Raises OSError if it fails.
    """
    begun, first, ended = time.perf_counter(), math.nan, False
    command = [sys.executable, *shlex.split(words)]
    with (
        ThreadPoolExecutor(1) as beside,
        Popen(command, stdout=PIPE, stderr=STDOUT, text=True, env=environment) as child,
    ):
        assert child.stdout is not None
        peak = beside.submit(_peak, child.pid)
        for line in child.stdout:
            if math.isnan(first):
                first = time.perf_counter() - begun
            if ended := bool(until) and until in line:
                child.terminate()
                break
        _, status, usage = os.wait4(child.pid, 0)
        cpu, wall = usage.ru_utime + usage.ru_stime, time.perf_counter() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode and not ended:
        raise OSError(f"{words} ended with {child.returncode}")
    return first, {"cpu_seconds": cpu, "wall_seconds": wall, "megabytes": peak.result()}


def _peak(process: int) -> float:
    """The peak memory of a process in megabytes; returns when the process has ended.

    Reads the high-water mark of the process, since that of wait4 includes the parent's.
    """
    peak = math.nan
    while not math.isnan(now := resident("VmHWM", process)):
        peak = now
        time.sleep(0.005)
    return peak
