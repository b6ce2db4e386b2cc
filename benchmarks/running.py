"""Parts, each in a process of its own, the table that their rows go to, and what a call or a
command costs.

A part is a function that takes the options of the command line and yields rows. Its name has
sections: "layer" selects "layer/512" and "layer/4096". The table is one CSV file, written after
each part; the rows of parts that did not run stay.

CPU time is user and system time of all threads: ratios of it hold on a machine that does other
things too. Memory is the high-water mark of the resident set above where it stood before the call,
where the system tells it (Linux): results are in it, inputs are not.
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
Frame = Any  # a pandas.DataFrame: pandas' own types do not know what its columns give
Cost = dict[str, Any]
"""`cpu_seconds`, `wall_seconds`, `megabytes` (2^20 bytes); NaN for what the system does not tell.
"""
Part = Callable[[Namespace], Iterable[Row]]
LIBRARIES = ("torch", "transformers", "transformer-lens", "xarray", "h5py", "repo-interp")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # An installed package has its bytecode; without it, every process would compile ours anew.
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
    """Run the parts that the command line names, by default all but those of the sections
    `by_name`; return their rows.

    Their rows go to `table`, or where the command line says. A part that fails, or whose process is
    killed, costs the others nothing: the program ends with a line on each such part and exit code
    1.
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
    """A row of a table: what is measured, the row it is compared with, and other columns."""
    return {"what": what} | ({"beside": beside} if beside else {}) | columns


def read_toml(file: str | Path) -> dict[str, Any]:
    """What is stated in a TOML file, given its path with any ending, such as that of the module
    beside it.
    """
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))


def read_parts(
    stated: Mapping[str, dict[str, Any]], functions: Mapping[str, Any]
) -> dict[str, Part]:
    """Parts by name: the function that is named, else that of the section, with its options."""
    return {
        name: partial(functions[options.pop("function", name.partition("/")[0])], **options)
        for name, options in stated.items()
    }


def said_of(error: Exception, longest: int = 140) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:longest]}"


def in_a_process(work: Callable[..., Any], *arguments: Any, start: str = "spawn") -> Any:
    """What `work` returns in a new process.

    Raises what it raises, and BrokenProcessPool where the process was killed.
    """
    with ProcessPoolExecutor(1, get_context(start)) as pool:
        return pool.submit(work, *arguments).result()


def _rows(part: Part, given: Namespace) -> list[Row]:
    return list(part(given))


def read(table: Path, columns: Sequence[str]) -> Frame:
    """The table in the file `table`; empty where there is none."""
    return (
        pandas.read_csv(table)
        if table.is_file()
        else pandas.DataFrame(columns=["part", *columns, "with"])
    )


def keep(
    table: Path, columns: Sequence[str], part: str, rows: Sequence[Row], order: Sequence[str]
) -> None:
    """Put `rows` in the place of the rows of `part`, with what they were made with; parts stand in
    `order`, others go.
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
    """The lines of a page: by section what its function says and its rows of `shown`, then what the
    rows of `table` were made with.
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
    """`frame` as a table of Markdown: numbers with three digits, nothing for what is missing."""
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
    """The least seconds of `repeats` calls after one to warm up (none where `repeats` is 1), and
    the peak memory of the first.
    """

    def seconds() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        return time.process_time() - cpu, time.perf_counter() - wall

    if repeats > 1:
        call()
    gc.collect()
    if _CLEAR.exists():
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        _CLEAR.write_text("5")  # the high-water mark starts from here
    before = resident("VmRSS")
    first = seconds()
    megabytes = resident("VmHWM") - before
    cpu, wall = map(min, zip(first, *(seconds() for _ in range(repeats - 1)), strict=True))
    return {"cpu_seconds": cpu, "wall_seconds": wall, "megabytes": megabytes}


def time_command(
    words: str, until: str = "", environment: Mapping[str, str] | None = None
) -> tuple[float, Cost]:
    """Run Python with `words`; return the seconds by the clock to the first line, and what the
    whole run costs, with all that the process ever held.

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
    """The most megabytes that a process held; returns when it has ended.

    Its own high-water mark: what wait4 tells begins with that of the process that started it.
    """
    peak = math.nan
    while not math.isnan(now := resident("VmHWM", process)):
        peak = now
        time.sleep(0.005)
    return peak
