"""What the table of a benchmark says: a page of tables and bars, and a figure, all from bench.csv.

README.md                bars, the figure, one table per kind of row, with what was measured with what
bench.png, .svg, .pdf    CPU seconds by tokens, both axes logarithmic: one layer and its measures, whole models
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from repo_interp.benchmark.bars import judged
from repo_interp.benchmark.cost import Cost
from repo_interp.benchmark.parts import (
    ALL,
    FORWARD,
    LIMITS,
    OLMO2,
    ROWS,
    SMOLLM2,
    STOCK,
    WITH_ALL,
    WITH_DEFAULT,
    Line,
    textbook_of,
)
from repo_interp.benchmark.store import TABLE, Measured, read
from repo_interp.files import replaced, write_text
from repo_interp.plots.marks.drawing import plain_decades
from repo_interp.plots.marks.table import Cell, Table
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, rendered, style

NOT_MEASURED = "not measured"
_COMMAND = "repo-interp bench"
_ACCELERATED = ("float32", "bfloat16")


def write_page(directory: Path) -> Path:
    """Write page and figure of the table in `directory` beside it; return the page. The same table gives the same bytes."""
    measured = read(directory)
    for suffix, content in rendered(figure(measured)).items():
        with replaced(directory / f"bench.{suffix}") as unfinished:
            unfinished.write_bytes(content)
    write_text(directory / "README.md", "\n".join(_page(measured)) + "\n")
    return directory / "README.md"


# ---- tables ---------------------------------------------------------------------------------------------------------


def table_of_bars(measured: Sequence[Measured], kinds: Collection[str] = tuple(ROWS)) -> Table:
    """What is to be kept of the `kinds` of rows, and whether it is."""
    rows = [
        (f"{bar.row}: {bar.subject}", bar.what, f"{bar.relation} {bar.limit:,g} {bar.unit}", _cell(value), bar.verdict(value))
        for bar, value in judged(measured)
        if bar.row in kinds
    ]
    return Table("bars", "Bars", ("rows", "bar", "limit", "measured", "verdict"), tuple(rows))


def table_of_part(one: Measured) -> Table:
    """The lines of one part."""
    columns = ("what", "CPU s", "wall s", "MB", "time ×", "memory ×", "beside")
    rows = [(line.what, *_cells(line.cost), *_ratios(line, one.lines), line.beside or None) for line in one.lines]
    return Table(one.part.row, one.part.name, columns, tuple(rows))


def table_of_row(name: str, measured: Sequence[Measured]) -> Table:
    """The lines of all parts of a kind, those on an accelerator in columns beside those on the CPU."""
    accelerated = {
        (one.part.subject, one.part.tokens, line.what, one.part.dtype): line.cost.wall_seconds
        for one in measured
        if one.part.device != "cpu"
        for line in one.lines
    }
    columns = ["subject", "tokens", "what", "CPU s", "wall s", "MB", "time ×", "memory ×", "beside"]
    columns += [f"GPU {dtype} s" for dtype in _ACCELERATED] if ROWS[name].accelerated else []
    rows = []
    for one in measured:
        part = one.part
        if part.device != "cpu":
            continue
        subject = part.subject if part.dtype == "float32" else f"{part.subject}, {part.dtype}"
        for line in one.lines:
            cells: list[Cell] = [subject, part.tokens or None, line.what, *_cells(line.cost), *_ratios(line, one.lines)]
            cells.append(line.beside or None)
            if ROWS[name].accelerated:
                seconds = [accelerated.get((part.subject, part.tokens, line.what, dtype)) for dtype in _ACCELERATED]
                cells += [NOT_MEASURED if value is None else value for value in seconds]
            rows.append(tuple(cells))
    return Table(name, ROWS[name].title, tuple(columns), tuple(rows), ROWS[name].about)


def table_of_limits(measured: Sequence[Measured]) -> Table:
    """What all measures of a layer took beside their physical limit, where it was measured; times on the CPU."""
    columns = ["tokens", "all measures, ms", "of the forward pass, %", "limit, ms", "of the forward pass, %"]
    columns += ["transforms, ms", "Gflop/s", "products, ms", "Gflop/s", "memory, ms", "GB/s", "in between, ms"]
    rows = []
    for one in measured:
        lines = {line.what: line for line in one.lines}
        if one.part.device != "cpu" or not {ALL, FORWARD, *LIMITS} <= lines.keys():
            continue
        whole, forward, *parts = (lines[what].cost.cpu_seconds for what in (ALL, FORWARD, *LIMITS))
        rates = (lines[what].operations / spent / 1e9 for what, spent in zip(LIMITS, parts, strict=True))
        apart = [value for spent, rate in zip(parts, rates, strict=True) for value in (1e3 * spent, rate)]
        shares = [value for spent in (whole, sum(parts)) for value in (1e3 * spent, 100 * spent / forward)]
        rows.append((one.part.tokens, *shares, *apart, 1e3 * (whole - sum(parts))))
    return Table("limits", "All measures and their physical limit", tuple(columns), tuple(rows))


def _cells(cost: Cost) -> tuple[Cell, ...]:
    return tuple(_cell(value) for value in (cost.cpu_seconds, cost.wall_seconds, cost.megabytes))


def _ratios(line: Line, lines: Sequence[Line]) -> tuple[Cell, Cell]:
    """Times and memory of a line over those of the line that it is to be read beside."""
    other = next((each.cost for each in lines if each.what == line.beside), None)
    if other is None:
        return None, None
    pairs = ((line.cost.cpu_seconds, other.cpu_seconds), (line.cost.megabytes, other.megabytes))
    return tuple(_cell(one / another if another else math.nan) for one, another in pairs)  # pyright: ignore[reportReturnType]


def _cell(value: float) -> float | None:
    return None if math.isnan(value) else value


# ---- the page -------------------------------------------------------------------------------------------------------


def _page(measured: Sequence[Measured]) -> Iterator[str]:
    yield from ("# What it costs", "")
    yield (
        f"Made by `{_COMMAND}`; the numbers are in [{TABLE}]({TABLE}), one row per line, with what each was measured with. CPU seconds "
        "are user and system time of all threads, wall seconds those of a clock, MB are 2^20 bytes at the peak. `time ×` and "
        "`memory ×` are over the line named in `beside`, measured in the same process."
    )
    yield from ("", "## Bars", "", *_markdown(table_of_bars(measured)), "", "![CPU seconds by tokens](bench.png)")
    for name, row in ROWS.items():
        of_row = [one for one in measured if one.part.row == name]
        yield from ("", f"## {row.title}", "", row.about, "")
        if of_row:
            yield from _markdown(table_of_row(name, of_row))
            yield from _notes(of_row)
            yield from _distances(of_row)
        else:
            yield f"Not measured yet: `{_COMMAND} --rows {name}`."
    yield from ("", "## Measured with", "")
    for number, circumstances in enumerate(dict.fromkeys(one.circumstances for one in measured), 1):
        rows = sorted({one.part.row for one in measured if one.circumstances == circumstances})
        threads = sorted({one.part.threads for one in measured if one.circumstances == circumstances})
        yield (
            f"{number}. {', '.join(rows)}: {circumstances.machine}; {' or '.join(map(str, threads))} thread(s); "
            f"{circumstances.libraries}; sources {circumstances.sources}; {circumstances.day}"
        )


def _markdown(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(table.columns)} |"
    yield "|" + "".join("---:|" if numeric else "---|" for numeric in table.numeric)
    for row in table.formatted():
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _distances(measured: Sequence[Measured]) -> Iterator[str]:
    table = table_of_limits(measured)
    if table.rows:
        yield from ("", f"### {table.title}", "")
        yield (
            "The limit: transforms, products of matrices and reading the inputs, done alone by the same process, each as fast as this "
            "machine does it. In between: rotating, copies into float64, sums along lines, statistics, fits, sorting, Python."
        )
        yield from ("", *_markdown(table))


def _notes(measured: Sequence[Measured]) -> Iterator[str]:
    notes = dict.fromkeys(f"- {line.what}: {line.note}" for one in measured for line in one.lines if line.note)
    if notes:
        yield from ("", *notes)


# ---- the figure -----------------------------------------------------------------------------------------------------

_COLOURS = {
    FORWARD: "#222222",
    STOCK: "#8A8A8A",
    WITH_ALL: "#D55E00",
    WITH_DEFAULT: "#0072B2",
    ALL: "#D55E00",
    "components": "#0072B2",
    "three_axis": "#009E73",
    "fake_distance": "#CC79A7",
    "rotation": "#E69F00",
    "attention_mass": "#56B4E9",
    "patterns": "#804020",
    "positions": "#8468D8",
}
_OTHER = "#8A8A8A"
_TITLES = {("layer", OLMO2): "one layer of OLMo-2-1B's shape", ("model", SMOLLM2): "SmolLM2-135M's shape, whole"}
_THICK = (FORWARD, ALL, WITH_ALL)
_DASHED = (0, (3, 1.5))


@style()
def figure(measured: Sequence[Measured]) -> PaperFigure:
    """CPU seconds by tokens, both axes logarithmic: one layer with every measure and the textbook way, and a whole model."""
    made = paper_figure(PAGE_WIDTH, 3.6)
    panels = made.subplots(1, len(_TITLES), sharey=True, squeeze=False)[0]
    for ax, ((row, subject), title) in zip(panels, _TITLES.items(), strict=True):
        parts = [one for one in measured if (one.part.row, one.part.subject, one.part.device) == (row, subject, "cpu")]
        _curves(ax, parts)
        ax.set(title=f"{title}{'' if parts else f': {NOT_MEASURED}'}", xlabel="prompt (tokens; 1K: 1,024)")
    panels[0].set_ylabel("CPU time (s)")
    return made


def _curves(ax: Axes, parts: Sequence[Measured]) -> None:
    curves: dict[str, dict[int, float]] = {}
    for one in sorted(parts, key=lambda one: one.part.tokens):
        for line in (line for line in one.lines if line.what not in LIMITS):
            curves.setdefault(line.what, {})[one.part.tokens] = line.cost.cpu_seconds
    for what, seconds in curves.items():
        name = what.removesuffix(textbook_of(""))
        ax.plot(
            list(seconds),
            list(seconds.values()),
            color=_COLOURS.get(name, _OTHER),
            linewidth=1.5 if name in _THICK else 0.9,
            linestyle="-" if name == what else _DASHED,
            marker="o",
            label=what if name == what else None,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({tokens for seconds in curves.values() for tokens in seconds})
    ax.set_xticks(lengths, [str(length) if length % 1024 else f"{length // 1024}K" for length in lengths])
    ax.minorticks_off()
    plain_decades(ax.yaxis)
    ax.grid(axis="y")
    handles = ax.get_legend_handles_labels()[0]
    if any(what.endswith(textbook_of("")) for what in curves):
        handles.append(Line2D([], [], color="#222222", linewidth=0.9, linestyle=_DASHED, label="textbook way"))
    if handles:
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2 if len(handles) > 4 else 1)
