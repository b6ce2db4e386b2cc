"""`repo-interp bench`: what measures, models and commands cost on this machine, as a table, a page and a figure."""

from __future__ import annotations

import argparse
from pathlib import Path

from repo_interp.cli.options import count, name_list, tokens

SUMMARY = "Measure what it costs: every measure beside the textbook way and the model's own forward pass, whole models, loading, commands."
_ROWS = ("layer", "model", "patterns", "loading", "inspect", "analysis", "long")
_LONG = ("long",)
"""Rows that are measured only when they are asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    usual = [name for name in _ROWS if name not in _LONG]
    parser.add_argument(
        "--rows",
        type=name_list,
        default=tuple(usual),
        metavar="A,B",
        help=f"kinds of rows: {', '.join(_ROWS)} (default: all but {', '.join(_LONG)}, which takes an hour)",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=(),
        metavar="512,1024",
        help="tokens of the prompts, in place of those that each kind of row has by itself",
    )
    parser.add_argument("--subjects", type=name_list, default=(), metavar="A,B", help="only these models, such as smollm2-135m")
    parser.add_argument(
        "--threads", type=count, default=1, metavar="N", help="of every process; 1 (the default) wastes no CPU time on waiting"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure anew what stands in the table from the same code and machine"
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=2,
        metavar="N",
        help="parts at a time, but for those of layer, which are measured alone (default: 2); 1 where seconds by the clock matter",
    )
    parser.add_argument(
        "--out", default="figures/bench", metavar="DIR", help="where table, page and figure go (default: figures/bench)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Say what it will cost; measure part after part, each kept when it is done; print bars and paths."""
    import tempfile

    from repo_interp.benchmark.page import table_of_bars, table_of_part, write_page
    from repo_interp.benchmark.running import Failed, accelerator, all_measured, expected_in_all, operations_per_second
    from repo_interp.benchmark.store import here_and_now, read, standing, with_part, write
    from repo_interp.cli.console import Console, bold
    from repo_interp.cli.progress import steps
    from repo_interp.cli.tables import print_table
    from repo_interp.files import require_directory

    console, out = Console(), Path(arguments.out)
    require_directory(out)
    chosen, now, before = _parts(arguments, accelerator()), here_and_now(), read(out)
    waiting = [part for part in chosen if arguments.again or standing(before, part, now) is None]
    expected = expected_in_all(waiting, before, operations_per_second(), arguments.jobs)
    _announce(console, len(waiting), len(chosen) - len(waiting), expected)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder, steps(console) as step:
        step("measuring", 0, len(waiting))
        made = all_measured(waiting, Path(folder), now, arguments.jobs)
        try:
            for number, (part, one) in enumerate(made, 1):
                step("measuring", number, len(waiting))
                if isinstance(one, Failed):
                    failures.append(f"{part.name}: {one}")
                    continue
                before = with_part(before, one, chosen)
                write(out, before)
                print_table(console, table_of_part(one))
        except KeyboardInterrupt:
            made.close()
            if before:
                write_page(out)
            raise KeyboardInterrupt(f"what was measured is kept in {out}; the same command goes on") from None
    print_table(console, table_of_bars(before, arguments.rows))
    for failure in failures:
        console.print(f"not measured: {failure}", style="yellow", highlight=False)
    if before:
        console.print(bold(write_page(out), "  tables and figure; the numbers are beside it"), highlight=False)
    return 1 if failures else 0


def _announce(console, waiting: int, standing: int, seconds: float) -> None:
    """Say how many parts are measured, how many stand already, and what it costs."""
    from repo_interp.values import duration

    parts = [f"{waiting} part{'s' * (waiting > 1)}" if waiting else "nothing to measure"]
    parts += [f"{standing} more stand{'s' * (standing == 1)} already, from the same code and machine"] if standing else []
    cost = f"; {duration(seconds)} where nothing else runs" if waiting else ""
    console.print(f"{', '.join(parts)}{cost}", highlight=False, soft_wrap=True)


def _parts(arguments: argparse.Namespace, device: str | None):
    """The parts that were asked for. Raises InputError for rows and models that are none."""
    from repo_interp.benchmark.parts import ROWS, parts
    from repo_interp.errors import InputError

    for name in arguments.rows:
        if name not in ROWS:
            raise InputError(f"there are no rows {name!r}; there are {', '.join(ROWS)}")
    found = list(parts(arguments.rows, arguments.lengths, device, arguments.threads))
    known = dict.fromkeys(part.subject for part in found)
    for name in arguments.subjects:
        if name not in known:
            raise InputError(f"there is no model {name!r} in these rows; there are {', '.join(known)}")
    return [part for part in found if not arguments.subjects or part.subject in arguments.subjects]


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(tokens(each) for each in name_list(text))
