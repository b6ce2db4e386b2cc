"""`repo-interp compare RUN RUN...`: checkpoints, or steps of a training, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = (
    "Compare runs of several checkpoints, or of steps of one training: tables, figures and a page of every measure they share."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run.nc, or the directory that `analyze` or `score` wrote; NAME=RUN names it (default: its checkpoint's name). "
        "An analysis and the scores of one checkpoint are one run",
    )
    parser.add_argument("--out", metavar="DIR", help="where results go (default: runs/compare-NAMES, numbered when there is one)")
    parser.add_argument("--overwrite", action="store_true", help="replace the comparison that stands in --out")


def run(arguments: argparse.Namespace) -> int:
    """Compare, write, print."""
    from rich.console import Console

    from repo_interp.cli.tables import print_table
    from repo_interp.comparison.align import compare_named, notes
    from repo_interp.comparison.directory import prepare_comparison, publish_comparison
    from repo_interp.comparison.variable_tables import comparison_tables

    console = Console()
    if arguments.out is not None:
        prepare_comparison(arguments.out, arguments.overwrite)
    compared = compare_named([_named(text) for text in arguments.runs])
    directory = prepare_comparison(arguments.out or _free_directory(compared["/"].coords["run"].values), arguments.overwrite)
    for line in notes(compared):
        console.print(line, style="yellow", highlight=False, markup=False)
    with console.status("drawing"):
        files = publish_comparison(compared, directory)
    for table in comparison_tables(compared):
        print_table(console, table)
    figures = sum(file.parent.name == "figures" for file in files)
    console.print(f"[bold]{directory / 'report.html'}[/bold]  the page to look at", highlight=False)
    console.print(f"{directory / 'compare.nc'}  the numbers; {directory / 'figures'}  {figures} figures", highlight=False)
    return 0


def _named(text: str) -> tuple[str | None, str]:
    """NAME=RUN; a path that has an equals sign itself is a path where it is there."""
    from repo_interp.errors import InputError

    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        return None, text
    if not name or not path:
        raise InputError(f"wanted RUN or NAME=RUN, not {text!r}")
    return name, path


def _free_directory(names) -> Path:
    said = "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in str(name)) for name in names)
    stem = Path("runs") / f"compare-{said if len(said) <= 60 else f'{len(names)}-runs'}"
    number, directory = 1, stem
    while directory.exists():
        number += 1
        directory = stem.with_name(f"{stem.name}-{number}")
    return directory
