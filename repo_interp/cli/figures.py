"""`repo-interp figures PAPER --checkpoint NAME=CHECKPOINT ...`: a paper's figures made again, and what became of its claims."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from repo_interp.cli.options import positive_or_zero
from repo_interp.papers.catalogue import PAPERS

SUMMARY = "Make a paper's figures again on checkpoints of yours, with data, captions and a verdict on each claim."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("paper", metavar="PAPER", help=f"which paper: {', '.join(PAPERS)}")
    parser.add_argument(
        "--checkpoint",
        type=_named,
        action="append",
        required=True,
        dest="checkpoints",
        metavar="NAME=CHECKPOINT",
        help="a checkpoint and what to call it: a directory, a hub id, or a name of the zoo; may be repeated",
    )
    parser.add_argument("--out", metavar="DIR", help="where figures go (default: figures/PAPER)")
    parser.add_argument("--overwrite", action="store_true", help="replace the figures that stand in --out")
    parser.add_argument(
        "--set",
        type=_named,
        action="append",
        default=[],
        dest="options",
        metavar="NAME=VALUE",
        help="how much is measured, such as sequences=5000, step_sequences=64, controls=2, batch_size=8; may be repeated",
    )
    parser.add_argument("--seed", type=positive_or_zero, default=0, help="seed of what is random (default: 0)")
    parser.add_argument("--device", default="cpu", help="where the models run: cpu, cuda, cuda:1, mps (default: cpu)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, draw, write, and print the verdicts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from repo_interp.cli.checkpoint import find
    from repo_interp.errors import InputError
    from repo_interp.models.checkpoints import identify
    from repo_interp.models.provenance import checkpoint_digest
    from repo_interp.papers.catalogue import paper
    from repo_interp.papers.claims import verdict_rows
    from repo_interp.papers.figure_directory import prepare, write_figures
    from repo_interp.run import versions

    console = Console()
    module = paper(arguments.paper)
    checkpoints = {name: find(path) for name, path in arguments.checkpoints}
    if len(checkpoints) < len(arguments.checkpoints):
        raise InputError("two checkpoints have the same name; give each its own: --checkpoint rope=... --checkpoint rope_2=...")
    options = _options(module.Options, [*arguments.options, ("seed", str(arguments.seed)), ("device", arguments.device)])
    directory = prepare(arguments.out or Path("figures") / arguments.paper, arguments.overwrite)
    digests = {name: checkpoint_digest(identify(path).directory) for name, path in checkpoints.items()}
    with console.status("measuring") as status:
        results = module.figures(checkpoints, options, status.update)
    missing = module.unmeasured(results)
    provenance = {f"checkpoint {name}": f"sha256 {digest}" for name, digest in digests.items()} | versions()
    files = write_figures(directory, module.TITLE, results, missing, _command(), {**provenance, "options": str(options)})
    table = Table(
        "claim", "checkpoint", "verdict", "measured", "ours", "spread", "control", title=module.TITLE, title_justify="left"
    )
    for row in verdict_rows([*(verdict for result in results for verdict in result.verdicts), *missing]):
        table.add_row(*(Text(row[key]) for key in ("claim", "checkpoint", "verdict", "measured", "ours", "spread", "control")))
    console.print(table)
    console.print(f"[bold]{directory / 'README.md'}[/bold]  verdicts and figures; {len(files)} files", highlight=False)
    return 0


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE, not {text!r}")
    return name, value


def _options(kind, given: list[tuple[str, str]]):
    """The paper's options with some values given as text."""
    import dataclasses

    from repo_interp.errors import InputError

    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for name, text in given:
        if name not in fields:
            raise InputError(f"there is no option {name!r}; there are {', '.join(fields)}")
        try:
            values[name] = type(fields[name].default)(text)
        except ValueError:
            raise InputError(f"{name}={text}: wanted {type(fields[name].default).__name__}") from None
    return kind(**values)


def _command() -> str:
    return shlex.join(["repo-interp", *sys.argv[1:]])
