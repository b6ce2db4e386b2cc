"""A part of a paper - some of its experiments, figures or tables - put into a page that stands.

    evidence    rows of the claims and checkpoints that were measured now replace theirs; others stay
    figures     those that were drawn now replace theirs; others stay, in their order
    page.json   `parts`: command and provenance of what another command than the page's made, with
                its figures and its rows

Knows nothing about any paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from position_papers.kit.experiment import Paper

Key = tuple[str, str]
"""A claim's label and a checkpoint: what a row of verdicts is about."""


def keys_of(evidence: pd.DataFrame) -> list[Key]:
    """The claims and checkpoints of a table of evidence or verdicts, each once."""
    pairs = evidence[["claim", "checkpoint"]].itertuples(index=False, name=None)
    return list(dict.fromkeys(pairs))


def joined_evidence(before: pd.DataFrame, made: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    """Put evidence that was made now in the place of its own claims and checkpoints.

    Args:
        before: All evidence of a page, as `read_evidence` gives it.
        made: Evidence of some claims, likewise.
        paper: The whole paper, whose order the rows have.

    Returns:
        The table, with rows numbered anew.
    """
    old, new = _blocks(before), _blocks(made)
    judged = {key[0] for key, rows in new.items() if not _is_unmeasured(rows)}
    measured = {key[0] for key, rows in old.items() if not _is_unmeasured(rows)}
    # That nothing could be measured is said where nothing was, now or before.
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
    # A stable sort: within an experiment rows stay as they stood, and new ones follow.
    ordered = sorted(kept.items(), key=lambda item: place.get(item[0][0], len(place)))
    rows = [row for _, own in ordered for row in own]
    numbered = [row.assign(row=str(number)) for number, row in enumerate(rows)]
    return pd.concat([before.iloc[:0], *numbered], ignore_index=True)


def _is_unmeasured(rows: Sequence[pd.DataFrame]) -> bool:
    return all((row["part"] == "why").any() for row in rows)


def _blocks(table: pd.DataFrame) -> dict[Key, list[pd.DataFrame]]:
    """Rows of verdicts by what they are about."""
    found: dict[Key, list[pd.DataFrame]] = {}
    for _, row in table.groupby("row", sort=False):
        found.setdefault(keys_of(row)[0], []).append(row)
    return found


def joined_numbers(
    before: pd.DataFrame, made: pd.DataFrame, figures: Sequence[str]
) -> pd.DataFrame:
    """Put the numbers behind figures in the place of theirs.

    Args:
        before: Numbers of a page, as text.
        made: Numbers of the figures that were drawn now, as text.
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
    """Say which figures and rows of a page another command than the page's made.

    Args:
        page: What page.json holds before.
        own: Provenance of what is made now, with its command.
        command: The command that makes the whole paper as `own` does.
        made: Figures and rows that are made now.

    Returns:
        Records for page.json; what is made now has none where the page's command makes the same.
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
    """The command that made each of the rows of a page."""
    by_row = {
        tuple(row): part["provenance"]["command"]
        for part in page.get("parts", [])
        for row in part["rows"]
    }
    return (by_row.get(key, page["provenance"]["command"]) for key in keys)
