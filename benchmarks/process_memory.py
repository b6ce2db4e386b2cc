"""The memory of a process, read by a module that adds nothing to it."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path


def resident(field: str, process: int | str = "self") -> float:
    """Megabytes that a process holds (VmRSS) or held at most (VmHWM); NaN if it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(
            (int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), math.nan
        )
    return math.nan
