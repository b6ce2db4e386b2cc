"""Insert a part of a paper (some experiments, figures or tables) into an existing page.

    evidence    new rows replace the old rows of their claims and checkpoints; others stay
    figures     new figures replace old ones; others stay, in their order
    page.json   `parts`: command and provenance of parts that another command than the page's made,
                with their figures and rows

This module knows nothing about single papers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from position_papers.kit.experiment import Paper

Key = tuple[str, str]
"""The label of a claim and a checkpoint, which identify a row of verdicts."""


def keys_of(evidence: pd.DataFrame) -> list[Key]:
    """Return the unique pairs of claim and checkpoint in a table of evidence or verdicts."""
    pairs = evidence[["claim", "checkpoint"]].itertuples(index=False, name=None)
    return list(dict.fromkeys(pairs))


def joined_evidence(before: pd.DataFrame, made: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    """Replace the evidence of some claims and checkpoints by new evidence.

    Args:
        before: All evidence of a page, from `read_evidence`.
        made: New evidence of some claims, in the same form.
        paper: The whole paper, which determines the order of rows.

    Returns:
        The table, with new row numbers.
    """
    old, new = _blocks(before), _blocks(made)
    judged = {key[0] for key, rows in new.items() if not _is_unmeasured(rows)}
    measured = {key[0] for key, rows in old.items() if not _is_unmeasured(rows)}
    # A row "not measured" stays only if the claim has no measurement, new or old.
    kept = {key: rows for key, rows in old.items() if key[0] in measured or key[0] not in judged}
    kept |= {
        key: rows
        for key, rows in new.items()
        if not _is_unmeasured(rows)
        or key[0] not in {claim for claim, _ in old}
        or (key in old and _is_unmeasured(old[key]))
    }
    place = {
        claim.label: number
        for number, experiment in enumerate(paper.experiments)
        for claim in experiment.claims
    }
    # A stable sort: within an experiment rows keep their order, and new rows follow.
    ordered = sorted(kept.items(), key=lambda item: place.get(item[0][0], len(place)))
    rows = [row for _, own in ordered for row in own]
    numbered = [row.assign(row=str(number)) for number, row in enumerate(rows)]
    return pd.concat([before.iloc[:0], *numbered], ignore_index=True)


def _is_unmeasured(rows: Sequence[pd.DataFrame]) -> bool:
    return all((row["part"] == "why").any() for row in rows)


def _blocks(table: pd.DataFrame) -> dict[Key, list[pd.DataFrame]]:
    """Group rows of verdicts by claim and checkpoint."""
    found: dict[Key, list[pd.DataFrame]] = {}
    for _, row in table.groupby("row", sort=False):
        found.setdefault(keys_of(row)[0], []).append(row)
    return found


def joined_numbers(
    before: pd.DataFrame, made: pd.DataFrame, figures: Sequence[str]
) -> pd.DataFrame:
    """Replace the numbers behind some figures.

    Args:
        before: Numbers of a page, as text.
        made: Numbers of the new figures, as text.
        figures: All figures of the page, in their order.

    Returns:
        The table.
    """
    drawn = list(made["figure"].unique())
    kept = before.loc[~before["figure"].isin(drawn)]
    both: pd.DataFrame = pd.concat([kept, made]).fillna("")
    return pd.concat([both.loc[both["figure"] == name] for name in figures])


def joined_parts(
    page: Mapping[str, Any], own: Mapping[str, str], command: str, made: tuple[list[str], list[Key]]
) -> list[dict[str, Any]]:
    """Record the figures and rows of a page that another command than the page's made.

    Args:
        page: Previous content of page.json.
        own: Provenance of the new part, with its command.
        command: The command that makes the whole paper in the same way.
        made: New figures and rows.

    Returns:
        Records for page.json; the new part has none if the page's command makes the same.
    """
    figures, rows = made
    parts = []
    for part in page.get("parts", []):
        left = {
            **part,
            "figures": [name for name in part["figures"] if name not in figures],
            "rows": [row for row in part["rows"] if tuple(row) not in rows],
        }
        if left["figures"] or left["rows"]:
            parts.append(left)
    known = page["provenance"]
    is_same = known["command"] == command and all(
        known.get(name) == value for name, value in own.items() if name != "command"
    )
    return (
        parts if is_same else [*parts, {"provenance": dict(own), "figures": figures, "rows": rows}]
    )


def commands_of(page: Mapping[str, Any], keys: Iterable[Key]) -> Iterator[str]:
    """Yield the command that made each row of a page."""
    by_row = {
        tuple(row): part["provenance"]["command"]
        for part in page.get("parts", [])
        for row in part["rows"]
    }
    return (by_row.get(key, page["provenance"]["command"]) for key in keys)
