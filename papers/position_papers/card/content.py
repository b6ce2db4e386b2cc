"""Content of a card, and its numbers as labelled arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import xarray as xr

from position_papers.card.columns import Column
from position_papers.card.records import Compared, Row
from repo_interp.measures.labels import with_attrs

PARTS = ("training length", "beyond")


@dataclass(frozen=True)
class TaskCard:
    """Content of a card for one task."""

    column: Column
    own: Row | None
    """None until a run is finished."""
    rivals: tuple[Row, ...]
    compared: tuple[Compared, ...]
    """Comparisons with rivals, once the scheme has a run."""
    missing: tuple[str, ...]
    """Encodings without a record of this budget."""
    heads: pd.DataFrame | None = None
    heads_left_out: tuple[str, ...] = ()
    """Measures of heads that do not fit the scheme, with reasons."""
    unfinished: tuple[str, ...] = ()
    """Runs in progress, with their steps."""


@dataclass(frozen=True)
class Card:
    """A card, with the content of its page."""

    layout: str
    digest: str
    tried: int
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    tasks: tuple[TaskCard, ...]
    number: int = 1
    """Number of this version among all versions, in the order in which they were begun."""
    scored: int = 1
    """Number of versions whose scores were shown."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """`function` and `sha256` of the source of the formula that `verify_scheme` held the scheme
    against; empty: none, and without `sha256` where the source cannot be read.
    """


def as_dataset(made: Card) -> xr.Dataset:
    """Return the numbers of a card.

    Args:
        made: The card.

    Returns:
        The dataset that `card` returns.
    """
    rows: dict[tuple[str, str], Row] = {}
    for each in made.tasks:
        for row in (*((each.own,) if each.own else ()), *each.rivals):
            rows[row.name, each.column.task] = row
    tasks = [each.column.task for each in made.tasks]
    encodings = list(dict.fromkeys([made.layout, *(name for name, _ in rows)]))
    seeds = sorted({run.recorded.seed for row in rows.values() for run in row.runs})
    loss = np.full((len(encodings), len(tasks), len(seeds)), np.nan)
    score = np.full((*loss.shape[:2], len(PARTS), len(seeds)), np.nan)
    for (name, task), row in rows.items():
        place = encodings.index(name), tasks.index(task)
        for run in row.runs:
            at = seeds.index(run.recorded.seed)
            loss[*place, at] = run.recorded.loss
            for part, sets in enumerate((row.column.inside, row.column.beyond)):
                score[*place, part, at] = run.score(sets)
    beside = [name for name in encodings if name != made.layout]
    limits = np.full((3, len(beside), len(tasks)), np.nan)
    verdicts = np.full(limits.shape[1:], "", dtype=object)
    for column, each in enumerate(made.tasks):
        for one in each.compared:
            at = beside.index(one.row.name), column
            verdicts[at] = one.verdict
            if one.margin is not None:
                limits[:, *at] = one.margin.difference, one.margin.low, one.margin.high
    over: Mapping[str, Sequence[str]] = {"rival": beside, "task": tasks}
    numbers = dict(zip(("difference", "low", "high"), limits, strict=True))
    names = {
        "difference": "score on test sets unlike training, above the rival's",
        "low": "lower limit of 95 %",
        "high": "upper limit of 95 %",
    }
    data = {
        name: with_attrs(xr.DataArray(values, over, tuple(over)), names[name], "1")
        for name, values in numbers.items()
    }
    axes = {"encoding": encodings, "task": tasks, "part": list(PARTS), "seed": seeds}
    by_run = {name: axes[name] for name in ("encoding", "task", "seed")}
    data["loss"] = with_attrs(
        xr.DataArray(loss, by_run, tuple(by_run)), "loss of the last steps", "nat"
    )
    data["score"] = with_attrs(xr.DataArray(score, axes, tuple(axes)), "mean score", "1")
    data["verdict"] = xr.DataArray(verdicts.astype(str), over, tuple(over))
    return xr.Dataset(
        data,
        attrs={
            "scheme": made.layout,
            "sha256": made.digest,
            "versions": made.tried,
            "findings": "\n".join(made.findings),
            "reference": made.reference.get("function", ""),
            "reference_sha256": made.reference.get("sha256", ""),
        },
    )
