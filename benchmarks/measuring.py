"""CPU and wall seconds and peak memory, of a call in this process or of a command as a process.

CPU time is user and system time of all threads: ratios of it hold on a machine that does other things too. Memory is the high-water mark
of the resident set above where it stood before the call, where the system tells it (Linux): results are in it, inputs are not.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_CLEAR = Path("/proc/self/clear_refs")
Cost = dict[str, float]
"""`cpu_seconds`, `wall_seconds`, `megabytes` (2^20 bytes); NaN for what the system does not tell."""


def cost(call: Callable[[], object], repeats: int = 1) -> Cost:
    """The least seconds of `repeats` calls after one to warm up (none where `repeats` is 1), and the peak memory of the first."""

    def seconds() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        return time.process_time() - cpu, time.perf_counter() - wall

    if repeats > 1:
        call()
    gc.collect()
    if _CLEAR.exists():
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        _CLEAR.write_text("5")  # the high-water mark starts from here
    before = resident("VmRSS")
    first = seconds()
    megabytes = resident("VmHWM") - before
    cpu, wall = map(min, zip(first, *(seconds() for _ in range(repeats - 1)), strict=True))
    return {"cpu_seconds": cpu, "wall_seconds": wall, "megabytes": megabytes}


def resident(field: str, process: int | str = "self") -> float:
    """Megabytes that a process holds (VmRSS) or held at most (VmHWM); NaN where it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), math.nan)
    return math.nan


def process(command: Sequence[str]) -> Cost:
    """What a process costs as a whole, with all that it ever held. Raises OSError where it fails."""
    begun, peak = time.perf_counter(), 0.0
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    child = os.posix_spawn(command[0], list(command), os.environ, file_actions=silent)
    # Its own high-water mark: what wait4 tells begins with that of the process that started it.
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak = max(peak, resident("VmHWM", child))
        time.sleep(0.005)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise OSError(f"{' '.join(command[1:])} ended with {os.waitstatus_to_exitcode(status)}")
    cpu, wall = usage.ru_utime + usage.ru_stime, time.perf_counter() - begun
    return {"cpu_seconds": cpu, "wall_seconds": wall, "megabytes": peak or math.nan}
