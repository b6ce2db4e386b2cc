"""CPU seconds and peak memory of a call, in this process.

CPU time, not wall time: ratios of it hold on a machine that does other things too. Memory is the high-water mark of the resident set
above where it stood before the call, where the system tells it (Linux); inputs are not in it, results are.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Cost:
    """What a call cost; `megabytes` is NaN where the system does not tell."""

    seconds: float
    megabytes: float


def cost(call: Callable[[], object], repeats: int = 1) -> Cost:
    """The least CPU seconds of `repeats` calls after one to warm up (none where `repeats` is 1), and the peak of the first."""
    if repeats > 1:
        call()
    forget()
    before = resident("VmRSS")
    seconds = [_seconds(call)]
    peak = resident("VmHWM")
    seconds += [_seconds(call) for _ in range(repeats - 1)]
    return Cost(min(seconds), peak - before)


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def forget() -> None:
    """Give freed memory back, and let the high-water mark start from here."""
    gc.collect()
    if _CLEAR.exists():
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")


def resident(field: str) -> float:
    """Megabytes that this process holds (VmRSS), or held at most since `forget` (VmHWM); NaN where the system does not tell."""
    if not _STATUS.exists():
        return math.nan
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
