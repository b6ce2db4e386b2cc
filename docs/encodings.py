"""Write encodings.md and encodings.csv from the records: `python docs/encodings.py`.

`--fill N` trains N empty cells before, in the order of what is wanted most, and writes the page
again after each; `make encodings` fills all. `--check` compares, and writes nothing; CI does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

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
from position_papers.card.intervals import LOSS, WIN
from position_papers.card.records import Compared, Row, known_encodings
from repo_interp.storage.files import write_text

PAGE = Path(__file__).with_suffix(".md")
TABLE = PAGE.with_suffix(".csv")
RUNS = Path("runs") / "encodings"


def page_of(found: Sequence[Cell], rows: Mapping[str, Mapping[str, Row]]) -> str:
    """Return the page.

    Args:
        found: Cells of the table.
        rows: Their encodings, by task and name.

    Returns:
        Markdown.
    """
    asked = [cell for cell in found if cell.seed in [cell.column.seed(each) for each in SEEDS]]
    filled = sum(cell.run is not None for cell in asked)
    head = f"| encoding | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}\n"
    lines = [
        f"| {name} | {' | '.join(_cell(rows[task].get(name)) for task in COLUMNS)} |"
        for name in known_encodings()
    ]
    sets = "\n".join(
        f"| {task} | {', '.join(column.inside)} | {', '.join(column.beyond)} |"
        for task, column in COLUMNS.items()
    )
    sentences = "\n".join(f"{place}. {text}" for place, text in enumerate(_sentences(rows), 1))
    return TEXT.format(
        filled=filled,
        all=len(asked),
        empty=len(asked) - filled,
        encodings=len(known_encodings()),
        table=head + "\n".join(lines),
        sets=sets,
        sentences=sentences,
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
                for words, verdict in (("better than RoPE", WIN), ("not as good as RoPE", LOSS))
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


TEXT = """# Encodings by tasks

{filled} of {all} cells are filled: {encodings} encodings by seven tasks by three seeds, each trained by the [recipe](zoo.md) of its task, the same for all. The other {empty} are empty: nothing is
known of them, and nothing is guessed. [encodings.csv](encodings.csv) has a line for each cell: loss, scores, command, day (of records since this table exists), versions, and the SHA-256 of its line in
`runs.jsonl`.

## What it teaches

Against RoPE, which alone has records on every task. Differences that are decided at 5 % after Holm's correction over the encodings of a task, and where both have learned; with 95 % intervals. Paired by seed; the
intervals are the wider ones of seeds and of prompts ([how](card.md#how-a-difference-is-decided)).

{sentences}

## The table

The mean score beyond the training length, and how many seeds are behind it. Higher is better, but for language (nats). †: not every seed learned the task in the training length (95 %), so that
the number says nothing about extrapolation. –: trained, but no prompt of these lengths can be answered.

{table}

| task | training length | beyond: the mean of |
|---|---|---|
{sets}

What ranks in models of four layers of width 64 need not rank at scale. `rope`, `nope`, ... are explained in [schemes.md](schemes.md); RePo and its kin begin at a third of the layers, but on reversal.

## Filling it

```
make encodings
```

trains what is missing, most wanted first, in `runs/encodings`: about 74 core-hours in all. Interrupted, it goes on. Each cell becomes a line of `papers/zoo/encodings/TASK/runs.jsonl` as soon as it
ends, and these pages are written again. Weights do not ship. `python docs/encodings.py --fill 3` trains the next three.
"""


def faults(check: bool) -> Iterator[str]:
    """Write the page and the table, or compare them.

    Args:
        check: Whether nothing is written.

    Yields:
        What differs, in words.
    """
    found, rows = cells(), rows_of()
    table = as_table(found).to_csv(index=False, lineterminator="\n", float_format="%.6g")
    for file, text in ((PAGE, page_of(found, rows)), (TABLE, table)):
        if not check:
            write_text(file, text)
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            yield f"{file.name} is stale: python docs/{Path(__file__).name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill cells where that is asked, then write the pages or compare them; 1 where they differ.

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
    if given.fill:
        empty = in_order(cells())
        chosen = empty if given.fill < 0 else empty[: given.fill]
        if not fill(chosen, RUNS, given.jobs, on_record=lambda cell: list(faults(False))):
            return 130
    found = list(faults(given.check))
    sys.stderr.write("".join(f"{fault}\n" for fault in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
