"""How long a paper's figures took, remembered beside what was measured, so that the next time can be told before it starts.

    seconds(before) = the time that all its measurements took, whether then or earlier, and drawing

An interrupted making is remembered as that. Knows nothing about any paper.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Duration:
    """Of one earlier time."""

    seconds: float
    finished: bool


class Durations:
    """What took how long, in a file of `directory`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._file = Path(directory) / "durations.json"

    def get(self, what: str) -> Duration | None:
        """How long `what` took last; None where it never was."""
        found = self._read().get(what)
        return None if found is None else Duration(float(found[0]), bool(found[1]))

    def others(self, beginning: str) -> Duration | None:
        """How long the longest finished thing took whose name begins so; None where there is none."""
        found = [float(seconds) for what, (seconds, finished) in self._read().items() if finished and what.startswith(beginning)]
        return Duration(max(found), True) if found else None

    def put(self, what: str, duration: Duration) -> None:
        """Remember it; a finished time goes before an interrupted one."""
        known = self._read()
        if not duration.finished and known.get(what, (0, False))[1]:
            return
        known[what] = (round(duration.seconds, 1), duration.finished)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_suffix(f".{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(unfinished, self._file)

    def _read(self) -> dict[str, tuple[float, bool]]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


def in_words(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
