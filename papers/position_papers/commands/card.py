"""`repo-interp card FILE.py:FUNCTION`: verify a position scheme, train it with the recipes of the
zoo, and compare it with the schemes whose scores are recorded.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from position_papers.card.columns import BUDGETS, COLUMNS, columns_of
from position_papers.card.directory import require_card_of
from repo_interp.cli.arguments import name_list, number_list, require_device_kind
from repo_interp.cli.scheme_files import layout_of_files, reference_of_file
from repo_interp.errors import InputError
from repo_interp.storage.files import require_writable

SUMMARY = (
    "Verify a position scheme of a file, train it by the recipes of the zoo, and compare it with "
    "all schemes whose records have the same budget."
)
EVERY = 60.0
"""Seconds between progress lines when the output is not a terminal."""
_SHOWN = "FILE.py:FUNCTION"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "scheme",
        metavar=_SHOWN,
        help="a function of a Python file, which is run, that defines the scheme; a start may follow, "
        "as in t5.py:build@1/3",
    )
    parser.add_argument(
        "--reference",
        type=_formula,
        metavar=_SHOWN,
        help="slow formula of the scheme in a Python file, which is run: of queries, keys and "
        "positions in float64, as ri.verify_scheme takes it; with a difference nothing is trained",
    )
    budgets = "; ".join(
        f"{name}: {', '.join(budget.tasks)}, seed{'s' * (len(budget.seeds) > 1)} "
        f"{', '.join(map(str, budget.seeds))}"
        for name, budget in BUDGETS.items()
    )
    parser.add_argument(
        "--budget",
        choices=tuple(BUDGETS),
        default="quick",
        help=f"tasks and seeds ({budgets}); steps are always those of the recipes (default: quick)",
    )
    parser.add_argument(
        "--tasks",
        type=name_list,
        default=(),
        metavar="A,B",
        help=f"tasks instead of those of the budget, of {', '.join(COLUMNS)}",
    )
    parser.add_argument(
        "--seeds",
        type=number_list,
        default=(),
        metavar="0-2",
        help="seeds instead of those of the budget",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="device of the training: cpu, cuda, or auto: cuda if available (default: cpu)",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="directory of the card; the same command continues there",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the card, and print its path."""
    out = Path(arguments.out)
    columns_of(arguments.tasks)
    require_card_of(out, _layout_named(arguments.scheme))
    require_writable(out)
    require_device_kind(arguments.device)
    reference = reference_of_file(arguments.reference) if arguments.reference else None
    layout, _ = layout_of_files(arguments.scheme)

    from position_papers.card.intervals import BETTER, UNDECIDED, WORSE
    from position_papers.card.page import PAGE
    from position_papers.card.report import Watch, card
    from position_papers.training.processes import stoppable
    from repo_interp.models.checkpoints import device_named
    from repo_interp.runtime.console import Console, bold
    from repo_interp.runtime.progress import steps

    console = Console()
    device = "cpu" if arguments.device == "cpu" else str(device_named(arguments.device))
    with stoppable() as stop, steps(console, EVERY) as step:
        made = card(
            layout,
            out,
            budget=arguments.budget,
            tasks=arguments.tasks,
            seeds=arguments.seeds,
            device=device,
            reference=reference,
            command=shlex.join(["repo-interp", *sys.argv[1:]]),
            watch=Watch(
                lambda line: console.print(line, highlight=False, soft_wrap=True), step, stop
            ),
        )
    for task in made["task"].values.tolist():
        verdicts = made["verdict"].sel(task=task).values.tolist()
        counts = {
            words: verdicts.count(verdict)
            for words, verdict in (
                (f"{BETTER} than", BETTER),
                (f"{WORSE} than", WORSE),
                (UNDECIDED, UNDECIDED),
            )
        }
        counts["not compared"] = len(list(filter(None, verdicts))) - sum(counts.values())
        summary = ", ".join(f"{words} {count}" for words, count in counts.items())
        console.print(
            f"{task}: {summary if any(verdicts) else 'no rival has records'}", highlight=False
        )
    console.print(
        bold(
            out / PAGE, "  the card; card.md has its tables, card.csv its numbers without the heads"
        ),
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _formula(text: str) -> str:
    """Return the text unchanged.

    Raises argparse.ArgumentTypeError unless it has the form FILE.py:FUNCTION.
    """
    if re.fullmatch(r".+\.py:\w+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80}: wanted {_SHOWN}, such as t5.py:logits")
    return text


def _layout_named(text: str) -> str:
    """The name of the layout that FILE.py:FUNCTION will have. The file must exist; its code is not
    run.

    Raises InputError for a text of another form, and when the file does not exist.
    """
    found = re.fullmatch(r"(.+\.py):(\w+)(@[\w/]+)?", text)
    if found is None or "," in text:
        raise InputError(f"{text!r:.80}: wanted {_SHOWN}, such as t5.py:build")
    file, function, start = Path(found[1]), found[2], found[3] or ""
    if not file.exists():
        raise InputError(f"there is no file {file}; wanted {_SHOWN}")
    return (file.stem if function == "build" else function) + start
