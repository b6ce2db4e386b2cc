"""Bytes that a kernel may use in addition to inputs and outputs: a property of the device.

    processor      the size of a cache: `CORE` of one core, `SHARED` of all cores
    accelerator    an eighth of the free memory, at most 4 GiB: a launch costs more than its work
    working_memory(bytes)    this number of bytes, on any device

A kernel always takes at least one head at a time, even if that exceeds the limit. This module knows
nothing about kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from repo_interp.errors import InputError, quoted

if TYPE_CHECKING:
    import torch

CORE, SHARED = 2**20, 16 * 2**20
_SHARE, _MOST = 8, 4 * 2**30
# A context variable, so that a thread's setting does not reach other threads
_given: ContextVar[int | None] = ContextVar("working_memory", default=None)


def memory_for(device: torch.device, cache: int) -> int:
    """Return the bytes that a kernel may use.

    Args:
        device: Device of the inputs.
        cache: Number of bytes on a processor.

    Returns:
        Bytes in addition to inputs and outputs.
    """
    given = _given.get()
    if given is not None:
        return given
    if device.type != "cuda":
        return cache
    # If the device is full, at least the limit of a processor
    return max(cache, min(_MOST, free_memory(device) // _SHARE))


def free_memory(device: torch.device) -> int:
    """Return the free memory of an accelerator.

    Args:
        device: Device of CUDA.

    Returns:
        Bytes that are free for all processes, or reserved by torch's allocator and unused.
    """
    import torch  # the rest of this file needs none

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def machine_memory() -> float:
    """Return the memory of the machine, or of the container of this process.

    Returns:
        Bytes; infinity if unknown.
    """
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            # cgroup v2 writes bytes, or "max" if a container has no limit.
            return min(physical, float(limit.read().replace("max", "inf")))
    except (OSError, ValueError):
        return physical


@contextmanager
def working_memory(bytes: int) -> Iterator[None]:
    """Set the bytes that every kernel of a measure may use, inside a `with` block of this thread.

    Args:
        bytes: Bytes per kernel, in addition to inputs and outputs. The number affects results only
            by rounding. Use a smaller one for a small accelerator.

    Yields:
        Nothing.

    Raises:
        InputError: `bytes` is not a positive whole number.
    """
    if isinstance(bytes, bool) or not isinstance(bytes, int) or bytes < 1:
        raise InputError(f"working memory is a positive whole number of bytes, not {quoted(bytes)}")
    token = _given.set(bytes)
    try:
        yield
    finally:
        _given.reset(token)
