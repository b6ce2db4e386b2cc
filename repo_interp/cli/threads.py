"""How many threads of a processor a command uses.

Operators of a small model finish before a second thread has started. On a busy machine, threads
that wait for each other at every operator took 3.4 times the CPU time of one thread; on a quiet
machine they gain almost nothing (`make bench PARTS=threads`). The library does not change torch's
number of threads; commands set it. Those of numpy's BLAS are in the environment that it is imported
with, which `main` sets.
"""

from __future__ import annotations

import os

from torch import nn, set_num_threads

SMALL = 30_000_000
"""Parameters below which one thread is as fast as several."""


def use_threads(model: nn.Module, given: int | None) -> int | None:
    """Set torch's number of threads for a model.

    Args:
        model: The model that will run.
        given: The user's number; None: one for a small model on a processor, else torch's own,
            which reads OMP_NUM_THREADS.

    Returns:
        The number that was set; None if torch's own stays.
    """
    first = next(model.parameters(), None)
    if given is None and (
        "OMP_NUM_THREADS" in os.environ
        or (first is not None and first.device.type != "cpu")
        or sum(parameter.numel() for parameter in model.parameters()) >= SMALL
    ):
        return None
    count = given or 1
    set_num_threads(count)
    return count
