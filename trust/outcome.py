"""What came of a part, and where it is kept: one JSON file per part in trust/results/, without dates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_VERSIONED = ("torch", "transformers", "transformer-lens", "xarray", "h5py")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    tried: int
    held: int
    """Of those tried, how many came out as they must."""
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """Rows of one part, what it means to hold, and details that are listed below the table."""

    rows: tuple[Row, ...]
    details: tuple[str, ...] = ()
    needed: float = 1.0
    """The share of those tried that must hold."""
    versions: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in _VERSIONED})

    @property
    def holds(self) -> bool:
        """Whether enough of what was tried held, in every row that was tried."""
        return any(row.tried for row in self.rows) and all(row.held >= self.needed * row.tried for row in self.rows)


def keep(part: str, outcome: Outcome, only: Sequence[str] = ()) -> None:
    """Write what came of `part`; where it ran `only` for some rows, the others stay as they were."""
    RESULTS.mkdir(exist_ok=True)
    before = kept(part)
    if only and before is not None:
        rows = {row.what: row for row in (*before.rows, *outcome.rows)}
        details = [line for line in before.details if not line.startswith(tuple(only))]
        outcome = replace(outcome, rows=tuple(rows.values()), details=(*details, *outcome.details))
    text = json.dumps(asdict(outcome), indent=1, ensure_ascii=False)
    (RESULTS / f"{part}.json").write_text(text + "\n", encoding="utf-8")


def kept(part: str) -> Outcome | None:
    """What came of `part` when it last ran; None where it never did."""
    file = RESULTS / f"{part}.json"
    if not file.exists():
        return None
    raw = json.loads(file.read_text(encoding="utf-8"))
    return Outcome(tuple(Row(**row) for row in raw["rows"]), tuple(raw["details"]), raw["needed"], raw["versions"])
