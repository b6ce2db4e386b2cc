"""Write the files of a card from a `Card`, each whole or not at all. This module knows no model.

card.html          a single offline page: figures, tables, provenance of the trainings
card.md            the tables of each task: the scheme first, then rivals by verdict (worse,
                   undecided, better) and name
card.csv           scores by test set, means, differences and verdicts, one line per encoding and
                   task
differences.png    every difference with its interval
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import position_papers.card.texts as texts
from position_papers.card.content import Card, TaskCard
from position_papers.card.figures import compares, differences
from position_papers.card.html_page import html_of
from position_papers.card.records import Compared, Row
from repo_interp.plots.style import save_figure
from repo_interp.storage.files import replace_whole, write_text

PAGE, TEXT, TABLE, FIGURE = "card.html", "card.md", "card.csv", "differences.png"
COLUMNS = (
    *("task", "encoding", "source", "seeds", "learned", "loss", "training_length", "beyond"),
    "beyond_sd",
    *("difference", "low", "high", "over", "verdict", "unpaired"),
)


def write_card(made: Card, directory: Path) -> None:
    """Write the pages, the table and, if there is a comparison, the figure.

    Args:
        made: The card.
        directory: Directory of the files.
    """
    lines = [line for each in made.tasks for line in table_lines(each)]
    sets = dict.fromkeys(name for line in lines for name in line if name not in COLUMNS)
    table = pd.DataFrame(lines, columns=(*COLUMNS, *sets))
    with replace_whole(directory / TABLE) as unfinished:
        table.to_csv(unfinished, index=False, lineterminator="\n", float_format="%.6g")
    drawn = compares(made)
    if drawn:
        save_figure(differences(made), directory / FIGURE)
    write_text(directory / TEXT, rendered(made, FIGURE if drawn else ""))
    write_text(directory / PAGE, html_of(made))


def rendered(made: Card, figure: str) -> str:
    """The page in Markdown.

    Args:
        made: The card.
        figure: File of the figure; "" for none.

    Returns:
        The page.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined)
    page = environment.get_template("card.md.jinja").render(card=made, texts=texts, figure=figure)
    return page.rstrip() + "\n"


def table_lines(each: TaskCard) -> Iterable[dict[str, Any]]:
    """Return the lines of the table of one task: the scheme, then its rivals."""
    if each.own is not None:
        yield _line(each.own, "trained here")
    beside = {difference.row.name: difference for difference in each.compared}
    for row in each.rivals:
        difference = beside.get(row.name)
        yield _line(row, "record") | ({} if difference is None else _difference(difference))


def _line(row: Row, source: str) -> dict[str, Any]:
    beyond = row.scores(row.column.beyond)
    return {
        "task": row.column.task,
        "encoding": row.name,
        "source": source,
        "seeds": " ".join(str(run.recorded.seed) for run in row.runs),
        "learned": sum(row.learned),
        "loss": float(np.mean(row.losses)),
        "training_length": float(np.mean(row.scores(row.column.inside))),
        "beyond": float(np.mean(beyond)),
        "beyond_sd": float(beyond.std(ddof=1)) if len(beyond) > 1 else np.nan,
        **{f"score[{name}]": score for name, score in row.by_test_set().items()},
    }


def _difference(one: Compared) -> dict[str, Any]:
    verdict = {"verdict": one.verdict, "unpaired": one.unpaired}
    if one.margin is None:
        return verdict
    found = one.margin
    limits = {"difference": found.difference, "low": found.low, "high": found.high}
    return limits | {"over": found.over} | verdict
