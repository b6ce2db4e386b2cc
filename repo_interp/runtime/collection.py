"""Pause the collection of cyclic garbage while libraries are imported and modules are built.

Both make a million objects that stay, and Python's collector looks through them hundreds of times:
a seventh of the time in which a model opens. Objects that were made meanwhile count as old, so that
the next full collection is the first that looks at them.
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
    # Somebody else may have paused it, and then it stays so.
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
