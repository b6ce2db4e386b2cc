"""Pause the collection of cyclic garbage while libraries are imported and modules are built.

Both create a million permanent objects, and Python's collector would scan them hundreds of times,
a seventh of the time to open a model. Objects that are created during the pause count as old, so
only the next full collection scans them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 20_000
"""New objects above which it pays to keep them out of the next collections."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector if it runs, and resume it afterwards.

    Yields:
        Nothing.
    """
    # If other code has paused it, it stays paused.
    running = gc.isenabled()
    gc.disable()
    before = gc.get_count()[0]
    try:
        yield
    finally:
        if running:
            many = gc.get_count()[0] - before > MANY
            # Unfreezing would also unfreeze objects that the user froze.
            if many and not gc.get_freeze_count():
                # Through the permanent generation into the oldest: objects
                # made meanwhile count as old.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
