"""`repo-interp compare RUN RUN...`: checkpoints, or steps of a training, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from repo_interp.cli.arguments import add_formats
from repo_interp.errors import InputError

SUMMARY = (
    "Compare runs of several checkpoints, or of steps of one training: tables, "
    "figures and a page of every measure they share."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp compare`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run.nc, or the directory that `analyze` or `score` wrote; NAME=RUN names it "
        "(default: its checkpoint's name). "
        "An analysis and the scores of one checkpoint are one run",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the results (default: runs/compare-NAMES, with a number if it exists)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the comparison in --out")
    add_formats(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare, write and print.

    Args:
        arguments: Parsed options.

    Returns:
        0; 1 if a figure or the page failed.
    """
    from repo_interp.analysis.publication import COMPARISON, claim_results, require_claimable
    from repo_interp.comparison.align import compare_named
    from repo_interp.runtime.console import Console

    # Before the imports below, which take seconds
    named = [_name_and_path(text) for text in arguments.runs]
    require_claimable(arguments.out, arguments.overwrite, COMPARISON)
    compared = compare_named(named)
    from repo_interp.cli.console_tables import print_all_findings, print_table
    from repo_interp.cli.results import print_results
    from repo_interp.comparison.comparison_notes import notes
    from repo_interp.plots.findings import findings
    from repo_interp.plots.pages.report import write_report
    from repo_interp.plots.view_catalogue import tables
    from repo_interp.runtime.progress import steps

    console = Console()
    with claim_results(
        # Named after the runs; their names are known only after opening them
        arguments.out,
        _stem(compared["/"].coords["run"].values.tolist()),
        arguments.overwrite,
        COMPARISON,
    ) as results:
        for line in notes(compared):
            console.print(line, style="yellow")
        with steps(console) as step:
            step("drawing")
            published = results.publish(compared, partial(write_report, formats=arguments.formats))
    # Findings of differences need a null, which not every group has.
    if findings(compared):
        print_all_findings(console, compared)
    for table in tables(compared):
        print_table(console, table)
    return print_results(console, results, published)


def _name_and_path(text: str) -> tuple[str | None, str]:
    """Return name and path of NAME=RUN or RUN; an existing path may contain an equals sign."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        return None, text
    if not name or not path:
        raise InputError(f"wanted RUN or NAME=RUN, not {text!r}")
    return name, path


def _stem(names: Sequence[str]) -> str:
    """The name of a directory for the comparison of the runs `names`."""
    # Names may hold slashes and spaces, which a folder's name must not.
    joined = "-".join(
        "".join(c if c.isalnum() or c in "._" else "-" for c in str(name)) for name in names
    )
    # A folder's name must stay short where many runs are compared.
    return f"compare-{joined if len(joined) <= 60 else f'{len(names)}-runs'}"
