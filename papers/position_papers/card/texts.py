"""What a card says in tables and sentences, for its Markdown page and its HTML page alike.

Knows no model, no figure and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from position_papers.card.content import Card, TaskCard
from position_papers.card.intervals import LOSS, NOT_LEARNED, UNDECIDED, WIN
from position_papers.card.records import Compared, Row
from repo_interp.plots.marks import Table

ORDER = (LOSS, UNDECIDED, WIN)
CAVEATS = (
    "Small models: what ranks here need not rank at scale.",
    "The recipes were piloted with RoPE and RePo. A scheme that has not learned by one may learn by "
    "another, with another learning rate for one; it is never called worse here.",
    "An interval is that of one difference: of twenty at 95 %, one leaves out the truth. Limits are "
    "those of seeds or of prompts, whichever are wider.",
    "The spread of a single seed is taken to be the rival's. Beside a rival whose seeds hardly "
    "spread that may be too little, so that a win or a loss of one seed is a hint. Beside one whose "
    "seeds spread, one seed decides nothing.",
)
"""What no card can say."""
LEGEND = (
    "Dot: difference; line: 95 % interval, none where both have one seed; blue: a win, red: a loss, "
    "grey: neither is decided, or one of both has not learned."
)


def ordered(compared: Iterable[Compared]) -> list[Compared]:
    """Put rivals in groups by verdict, by name within each: no order that is not decided."""
    places = {verdict: place for place, verdict in enumerate(ORDER)}
    return sorted(compared, key=lambda one: (places.get(one.verdict, len(ORDER)), one.row.name))


def versions(made: Card) -> str:
    """Say how many versions of the scheme were tried."""
    warning = ". Who tries several and shows one has chosen it by these test sets"
    return f"{made.tried}{warning if made.tried > 1 else ''}"


def about(own: Row) -> str:
    """Say how a row was trained and what its scores are."""
    one, column = own.runs[0].recorded, own.column
    sequences = one.configuration.batch * one.configuration.accumulation
    return (
        f"{one.configuration.steps:,} steps of {sequences} sequences; {one.metric}, {one.prompts} "
        f"prompts for each test set; training length: {', '.join(column.inside)}; beyond: the mean "
        f"of {', '.join(column.beyond)}{'' if own.higher else '; lower is better'}."
    )


def remarks(each: TaskCard) -> Iterator[str]:
    """Say what a task has no answer for."""
    if each.own is None:
        names = ", ".join(row.name for row in each.rivals)
        yield f"Not trained yet.{f' Records of equal budget: {names}.' if names else ''}"
    elif not each.rivals:
        yield "No record has this budget, so nothing is compared."
    unpaired = [one.row.name for one in ordered(each.compared) if one.unpaired]
    if unpaired:
        yield (
            "Seeds are not paired, because the records are of another device or of other versions: "
            f"{', '.join(unpaired)}."
        )
    if each.missing:
        yield f"No record of this budget: {', '.join(each.missing)}."


def tables(made: Card, each: TaskCard) -> list[Table]:
    """Make the tables of a task: the scheme beside its rivals, and its heads.

    Args:
        made: The card.
        each: A task of it.

    Returns:
        None of a task that is not trained.
    """
    if each.own is None:
        return []
    own, name = each.own, made.layout
    columns = ("encoding", "seeds", "in the training length", "beyond")
    rows = [(*_row(own), "", "")] + [
        (*_row(one.row), _interval(one), one.verdict) for one in ordered(each.compared)
    ]
    columns = (*columns, f"{name} minus it, beyond [95 %]", name)
    found = [Table(f"{own.column.task}_rivals", f"{name} and the records", columns, tuple(rows))]
    if each.heads is not None:
        numbers = each.heads.astype(object).where(each.heads.notna(), None)
        rows = tuple(numbers.itertuples(index=False, name=None))
        seed = own.runs[0].recorded.seed
        title = f"Heads after training, seed {seed}, on prompts of the training length"
        found.append(
            Table(f"{own.column.task}_heads", title, tuple(map(str, numbers.columns)), rows)
        )
    return found


def _row(row: Row) -> tuple[str, int, str, str]:
    return row.name, len(row.runs), _learned(row), _mean(row.scores(row.column.beyond))


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


def _interval(one: Compared) -> str:
    if one.margin is None:
        return ""
    found = one.margin
    limits = f" [{found.low:+.3f}, {found.high:+.3f}]" if np.isfinite(found.low) else ""
    return f"{found.difference:+.3f}{limits}, over {found.over}".replace(
        "over one seed each", "one seed each"
    )
