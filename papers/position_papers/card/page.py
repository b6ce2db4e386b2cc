"""The page of a card, its table and its figure.

    card.md            a table for each task, the scheme first, then those it loses to, those that
                       are undecided, those it wins against, by name within each
    card.csv           the same numbers, a line for each encoding and task
    differences.png    every difference with its interval

Written from the `Card` alone, whole or not at all. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from position_papers.card.content import Card, TaskCard
from position_papers.card.intervals import LOSS, NOT_LEARNED, UNDECIDED, WIN
from position_papers.card.records import Compared, Row
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, save_figure, style
from repo_interp.storage.files import replace_whole, write_text

PAGE, TABLE, FIGURE = "card.md", "card.csv", "differences.png"
COLUMNS = (
    *("task", "encoding", "source", "seeds", "learned", "loss", "training_length", "beyond"),
    *("difference", "low", "high", "over", "verdict", "unpaired"),
)
ORDER = (LOSS, UNDECIDED, WIN)
COLOURS = {WIN: "#0072B2", LOSS: "#D55E00"}
GREY = "#777777"


def write_card(made: Card, directory: Path) -> None:
    """Write the page, the table and, where something is compared, the figure.

    Args:
        made: The card.
        directory: Where.
    """
    lines = [line for each in made.tasks for line in table_lines(each)]
    table = pd.DataFrame(lines, columns=COLUMNS)
    with replace_whole(directory / TABLE) as unfinished:
        table.to_csv(unfinished, index=False, lineterminator="\n", float_format="%.6g")
    drawn = any(one.margin is not None for each in made.tasks for one in each.compared)
    if drawn:
        save_figure(differences(made), directory / FIGURE)
    write_text(directory / PAGE, rendered(made, FIGURE if drawn else ""))


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
    environment.filters |= {
        "mean": _mean,
        "learned": _learned,
        "number": _number,
        "interval": _interval,
    }
    tasks = [(each, ordered(each.compared)) for each in made.tasks]
    page = environment.get_template("card.md.jinja").render(card=made, tasks=tasks, figure=figure)
    return page.rstrip() + "\n"


def ordered(compared: Iterable[Compared]) -> list[Compared]:
    """Put rivals in groups by verdict, by name within each: no order that is not decided."""
    places = {verdict: place for place, verdict in enumerate(ORDER)}
    return sorted(compared, key=lambda one: (places.get(one.verdict, len(ORDER)), one.row.name))


def table_lines(each: TaskCard) -> Iterable[dict[str, Any]]:
    """Lines of the table of one task: the scheme's, then its rivals'."""
    if each.own is not None:
        yield _line(each.own, "trained here")
    beside = {one.row.name: one for one in each.compared}
    for row in each.rivals:
        one = beside.get(row.name)
        yield _line(row, "record") | ({} if one is None else _difference(one))


def _line(row: Row, source: str) -> dict[str, Any]:
    return {
        "task": row.column.task,
        "encoding": row.name,
        "source": source,
        "seeds": " ".join(str(run.recorded.seed) for run in row.runs),
        "learned": sum(row.learned),
        "loss": float(np.mean(row.losses)),
        "training_length": float(np.mean(row.scores(row.column.inside))),
        "beyond": float(np.mean(row.scores(row.column.beyond))),
    }


def _difference(one: Compared) -> dict[str, Any]:
    verdict = {"verdict": one.verdict, "unpaired": one.unpaired}
    if one.margin is None:
        return verdict
    found = one.margin
    limits = {"difference": found.difference, "low": found.low, "high": found.high}
    return limits | {"over": found.over} | verdict


def _mean(values: np.ndarray) -> str:
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if not len(known):
        return "–"
    return f"{known.mean():.3f}" + (f" ± {known.std(ddof=1):.3f}" if len(known) > 1 else "")


def _learned(row: Row) -> str:
    loss = f"loss {float(np.mean(row.losses)):.2g}"
    if row.column.learned is None:
        return loss
    done, count = sum(row.learned), len(row.runs)
    if done == count:
        return f"learned, {loss}"
    return f"{NOT_LEARNED}{f' ({done} of {count} seeds did)' if done else ''}, {loss}"


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None or not np.isfinite(value) else f"{value:.4g}"


def _interval(one: Compared) -> str:
    if one.margin is None:
        return ""
    found = one.margin
    limits = f" [{found.low:+.3f}, {found.high:+.3f}]" if np.isfinite(found.low) else ""
    return f"{found.difference:+.3f}{limits}, over {found.over}".replace(
        "over one seed each", "one seed each"
    )


@style()
def differences(made: Card) -> PaperFigure:
    """Draw every difference beyond the training length, a panel for each task.

    Args:
        made: A card with at least one difference.

    Returns:
        The figure.
    """
    tasks = [each for each in made.tasks if any(one.margin for one in each.compared)]
    most = max(len(each.compared) for each in tasks)
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = paper_figure(PAGE_WIDTH, rows * (0.8 + 0.17 * most))
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    for ax, each in zip(axes.flat, tasks, strict=False):
        shown = [one for one in reversed(ordered(each.compared)) if one.margin is not None]
        for place, one in enumerate(shown):
            found, colour = one.margin, COLOURS.get(one.verdict, GREY)
            assert found is not None
            ax.hlines(place, found.low, found.high, color=colour, linewidth=1)
            ax.plot(found.difference, place, "o", color=colour, markersize=3, markeredgewidth=0)
        ax.set_yticks(range(len(shown)), [one.row.name for one in shown])
        ax.set_ylim(-0.6, len(shown) - 0.4)
        ax.axvline(0, color="#333333", linewidth=0.6)
        ax.set_title(each.column.task)
        ax.set_xlabel(f"{made.layout} minus rival, beyond")
    for ax in axes.flat[len(tasks) :]:
        ax.set_visible(False)
    return figure
