"""The figures of a card: all differences with verdicts, and for each task the scores on every test
set and the losses during training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.ticker import NullFormatter

from position_papers.card.content import Card, TaskCard
from position_papers.card.intervals import BETTER, WORSE
from position_papers.card.records import Row
from position_papers.card.texts import UNLIKE, ordered
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

COLOURS = {BETTER: "#0072B2", WORSE: "#D55E00"}
GREY = "#777777"
OWN = "#9A2CA0"
BASE = "rope"
"""The rival with a separate style."""


def compares(made: Card) -> bool:
    """Return whether a card has a difference to draw."""
    return any(one.margin is not None for each in made.tasks for one in each.compared)


@style()
def differences(made: Card) -> PaperFigure:
    """Draw all differences on test sets unlike training, one panel per task.

    Args:
        made: A card with at least one difference.

    Returns:
        The figure.
    """
    tasks = [each for each in made.tasks if any(one.margin for one in each.compared)]
    most = max(len(each.compared) for each in tasks)
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = paper_figure(PAGE_WIDTH, 0.2 + rows * (0.7 + 0.17 * most))
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
        lower = each.own is not None and not each.own.higher
        ax.set_title(f"{each.column.task}{' (nats: lower is better)' if lower else ''}")
    for ax in axes.flat[len(tasks) :]:
        ax.set_visible(False)
    figure.supxlabel(f"{made.layout} minus the rival, on {UNLIKE}", fontsize="medium")
    return figure


@style()
def scores_and_losses(made: Card, each: TaskCard) -> PaperFigure:
    """Draw the score on every test set, and the loss during training, of the scheme and its rivals.

    Args:
        made: The card.
        each: A trained task.

    Returns:
        The figure.
    """
    assert each.own is not None
    figure = paper_figure(PAGE_WIDTH, 2.2)
    axes: Any = figure.subplots(1, 2)
    behind = [row for row in each.rivals if row.name != BASE]
    base = [row for row in each.rivals if row.name == BASE]
    colours = colormaps["tab20"]
    looks: dict[str, Any] = {
        row.name: {"color": colours(place % colours.N), "linewidth": 0.8}
        for place, row in enumerate(behind)
    }
    looks |= {
        BASE: {"color": "#333333", "linewidth": 1.0, "linestyle": (0, (4, 1.5))},
        made.layout: {"color": OWN, "linewidth": 1.4},
    }
    rows = [*behind, *base, replace(each.own, name=made.layout)]
    _draw_scores(axes[0], each.own, rows, looks)
    _draw_losses(axes[1], rows, looks)
    lines = axes[0].get_lines()[: len(rows)][::-1]
    figure.legend(
        *(lines, [str(line.get_label()) for line in lines]),
        loc="outside right center",
        ncols=1 + len(lines) // 14,
    )
    return figure


def _draw_scores(ax: Any, own: Row, rows: Sequence[Row], looks: Mapping[str, Any]) -> None:
    """Draw mean scores over seeds by test set, and a line at the training length."""
    recorded = own.runs[0].recorded
    names = list(recorded.means)
    numeric = all(name.isdigit() for name in names)
    places = dict(zip(names, map(int, names) if numeric else range(len(names)), strict=True))
    for row in rows:
        scores = row.by_test_set()
        known = [name for name in names if np.isfinite(scores.get(name, np.nan))]
        ax.plot(
            [places[name] for name in known],
            [scores[name] for name in known],
            marker="o" if len(names) < 10 else "",
            markersize=2.5,
            label=row.name,
            **looks[row.name],
        )
    for name in own.column.inside:
        ax.axvline(places[name], color="#333333", linewidth=0.6, linestyle=":")
    if not numeric:
        ax.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    ax.set_xlabel("test set (dotted: like training)")
    ax.set_ylabel(recorded.metric)


def _draw_losses(ax: Any, rows: Sequence[Row], looks: Mapping[str, Any]) -> None:
    """Draw losses by step of the seeds with recorded losses."""
    for row in rows:
        for run in (run for run in row.runs if run.recorded.log):
            steps, losses = zip(*run.recorded.log, strict=True)
            ax.plot(steps, losses, **looks[row.name])
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda loss, place: f"{loss:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("step")
    ax.set_ylabel("training loss [nat]")
