"""Bytes that a kernel may use in addition to inputs and outputs: a property of the device.

    processor      the size of a cache: `CORE` of one core, `SHARED` of all cores
    accelerator    an eighth of the free memory, at most 4 GiB: a launch costs more than its work
    working_memory(bytes)    as many as given, on any device

A kernel takes at least one head at a time, however little it may use. This module knows nothing
about kernels.
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
        cache: Bytes on a processor.

    Returns:
        Bytes in addition to inputs and outputs.
    """
    given = _given.get()
    if given is not None:
        return given
    if device.type != "cuda":
        return cache
    # At least as much as on a processor, where the device is full
    return max(cache, min(_MOST, free_memory(device) // _SHARE))


def free_memory(device: torch.device) -> int:
    """Return the free memory of an accelerator.

    Args:
        device: Device of CUDA.

    Returns:
        Bytes that are free for others, or reserved by torch's allocator without a tensor in them.
    """
    import torch  # the rest of this file needs none

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def machine_memory() -> float:
    """Return the memory of the machine, or of the container of this process.

    Returns:
        Bytes; infinity where they are unknown.
    """
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            # cgroup v2 writes bytes, or "max" where a container has no limit
            return min(physical, float(limit.read().replace("max", "inf")))
    except (OSError, ValueError):
        return physical


@contextmanager
def working_memory(bytes: int) -> Iterator[None]:
    """Let every kernel of a measure use as many bytes, inside a `with` block and this thread.

    Args:
        bytes: Bytes per kernel, in addition to inputs and outputs. Results depend on it only by
            rounding. Use less for a small card, or extremes in tests.

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
