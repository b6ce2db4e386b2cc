"""How many threads of a processor a command uses.

Operators of a small model end sooner than a second thread has begun: beside other work, threads that
wait for each other at every operator took 3.4 times the CPU time of one, and gain next to nothing
on a quiet machine (`make bench PARTS=threads`). A library leaves torch's number alone; a command
chooses it.
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
        The number that was set; None where torch's own stays.
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
