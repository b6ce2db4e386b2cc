"""CPU and wall seconds and peak memory of a call, in this process.

CPU time is user and system time of all threads: ratios of it hold on a machine that does other things too. Memory is the high-water mark of
the resident set above where it stood before the call, where the system tells it (Linux); inputs are not in it, results are. On an
accelerator it is the most that was allocated there, and seconds end when the device is done.
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
    """What a call cost; NaN stands for what nobody told or asked."""

    cpu_seconds: float = math.nan
    wall_seconds: float = math.nan
    megabytes: float = math.nan

    def __rmul__(self, times: float) -> Cost:
        """The cost of `times` such calls one after the other."""
        return Cost(times * self.cpu_seconds, times * self.wall_seconds, self.megabytes)

    def __add__(self, other: Cost) -> Cost:
        """The cost of one after the other."""
        return Cost(
            self.cpu_seconds + other.cpu_seconds,
            self.wall_seconds + other.wall_seconds,
            max(self.megabytes, other.megabytes),
        )


def cost(call: Callable[[], object], repeats: int = 1, device: str = "cpu") -> Cost:
    """The least seconds of `repeats` calls after one to warm up (none where `repeats` is 1), and the peak memory of the first."""
    if repeats > 1:
        call()
    before = _forget(device)
    timed = [_seconds(call, device)]
    peak = _peak(device)
    timed += [_seconds(call, device) for _ in range(repeats - 1)]
    return Cost(*(min(each) for each in zip(*timed, strict=True)), peak - before)


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


def _seconds(call: Callable[[], object], device: str) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    _wait(device)
    return time.process_time() - cpu, time.perf_counter() - wall


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _forget(device: str) -> float:
    """Megabytes held before the call, after what is free was given back."""
    forget()
    if device == "cpu":
        return resident("VmRSS")
    import torch

    _wait(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 2**20


def _peak(device: str) -> float:
    if device == "cpu":
        return resident("VmHWM")
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**20
