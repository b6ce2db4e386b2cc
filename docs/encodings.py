"""Write encodings.md and encodings.csv from the records: `python docs/encodings.py`.

`--fill N` first trains N empty cells, the most useful ones first, and writes the page
again after each; `make encodings` fills all. `--check` compares and writes nothing; CI runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jinja2 import Template

from position_papers.card import encodings
from position_papers.card.columns import COLUMNS
from position_papers.card.encodings import (
    SEEDS,
    Cell,
    as_table,
    cells,
    in_order,
    rows_of,
    taught,
)
from position_papers.card.filling import fill
from position_papers.card.intervals import BETTER, WORSE
from position_papers.card.records import NINE, Compared, Row, known_encodings
from position_papers.commands.train import EVERY
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.files import write_text

PAGE = Path(__file__).with_suffix(".md")
TABLE = PAGE.with_suffix(".csv")
TEMPLATE = Path(encodings.__file__).with_suffix(".md.jinja")
RUNS = Path("runs") / "encodings"
SCHEMES = PAGE.with_name("nine_schemes.py")


def page_of(found: Sequence[Cell], rows: Mapping[str, Mapping[str, Row]]) -> str:
    """Return the page.

    Args:
        found: Cells of the table.
        rows: Their encodings, by task and name.

    Returns:
        Markdown.
    """
    asked = [cell for cell in found if cell.seed in [cell.column.seed(each) for each in SEEDS]]
    template = Template(TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True)
    return (
        template.render(
            filled=sum(cell.run is not None for cell in asked),
            all=len(asked),
            encodings=known_encodings(),
            columns=COLUMNS,
            cells={
                (name, task): _cell(rows[task].get(name))
                for name in known_encodings()
                for task in COLUMNS
            },
            sentences=list(_sentences(rows)),
        ).rstrip()
        + "\n"
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    scores = row.scores(row.column.beyond)
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return f"– ({len(row.runs)})"
    mark = "" if all(row.learned) else "†"
    return f"{scores.mean():.3f}{mark} ({len(scores)})"


def _sentences(rows: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    undecided, none = [], []
    for each in taught(rows):
        if not each.tested:
            none.append(each.task)
        elif not each.decided:
            undecided.append(f"{each.task} ({len(each.tested)} compared)")
        else:
            told = [
                f"{words}: {', '.join(named)}"
                for words, verdict in (("better than RoPE", BETTER), ("not as good as RoPE", WORSE))
                if (
                    named := [
                        _named(*one) for one in each.decided.items() if one[1].verdict == verdict
                    ]
                )
            ]
            yield f"On {each.task}, of {len(each.tested)} compared, {'; '.join(told)}."
    if undecided:
        yield f"Nothing is decided on {', '.join(undecided)}."
    if none:
        yield (
            f"Nothing can be compared with RoPE on {', '.join(none)}: there is one seed of each, or "
            "RoPE has not learned the task at its recipe."
        )


def _named(name: str, one: Compared) -> str:
    assert one.margin is not None
    low, high = one.limits
    return f"{name} ({one.margin.difference:+.2f} [{low:+.2f}, {high:+.2f}])"


def faults(check: bool) -> Iterator[str]:
    """Write the page and the table, or compare them.

    Args:
        check: Whether to write nothing.

    Yields:
        A description of each difference.
    """
    found, rows = cells(), rows_of()
    table = as_table(found).to_csv(index=False, lineterminator="\n", float_format="%.6g")
    for file, text in ((PAGE, page_of(found, rows)), (TABLE, table)):
        if not check:
            write_text(file, text)
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            yield f"{file.name} is stale: python docs/{Path(__file__).name}"


def _filled(count: int, jobs: int) -> bool:
    """Fill `count` cells, or all if it is negative; False after an interrupt."""
    empty, console = in_order(cells()), Console(stderr=True)
    chosen = empty if count < 0 else empty[:count]
    with steps(console, EVERY) as step:

        def keep(cell: Cell) -> None:
            list(faults(False))
            console.print(f"filled: {cell.encoding} on {cell.column.task}, seed {cell.seed}")

        return fill(
            *(chosen, RUNS, jobs),
            on_record=keep,
            scheme_files=[f"{SCHEMES}:{name}" for name in NINE],
            on_step=lambda cell, done, total: step(f"training {cell}", done, total),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill cells if requested, then write the pages or compare them; return 1 if they differ.

    Args:
        arguments: Words of the command line; None: those of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument(
        "--fill", type=int, default=0, metavar="N", help="train N empty cells; -1: all"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time")
    given = parser.parse_args(arguments)
    if given.fill and not _filled(given.fill, given.jobs):
        return 130
    found = list(faults(given.check))
    sys.stderr.write("".join(f"{fault}\n" for fault in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
