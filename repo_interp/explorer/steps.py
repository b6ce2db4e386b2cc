"""Long work, one step at a time: a function with progress calls, as an iterator.

    for done, total in (steps := Steps(work)): ...    `work(progress)` runs until it calls
                                                      `progress(done, total)`, and waits there
    steps.result                                      the result of `work`, after the iterator ended
    steps.close()                                     ends `work` while it waits

The work has a separate thread, and runs only while the next step is awaited: between two steps
others may use the model. This module knows nothing about models and pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any


# No Exception, so that `except Exception` in the work does not keep it going
class _Closed(BaseException):
    """Raised in abandoned work to end it."""


class Steps(Iterator[tuple[int, int]]):
    """The steps of `work`, which is called with a function of progress."""

    def __init__(self, work: Callable[[Callable[[int, int], None]], Any]) -> None:
        self.result: Any = None
        self._work, self._closed = work, False
        self._awaited, self._given = (
            threading.Semaphore(0),
            SimpleQueue[tuple[int, int] | BaseException](),
        )
        # A daemon: a page that never sends another request must not keep the process alive
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __next__(self) -> tuple[int, int]:
        """The next step. Raises the errors of `work`."""
        self._awaited.release()
        given = self._given.get()
        if isinstance(given, BaseException):
            raise given
        return given

    def close(self) -> None:
        """End `work` while it waits."""
        self._closed = True
        self._awaited.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._wait()
            self.result = self._work(self._progress)
        except BaseException as error:
            # Raised again in the thread of whoever awaits the step
            self._given.put(error)
        else:
            # Ends the iterator from within `__next__`
            self._given.put(StopIteration())

    def _progress(self, done: int, total: int) -> None:
        self._given.put((done, total))
        self._wait()

    def _wait(self) -> None:
        self._awaited.acquire()
        if self._closed:
            raise _Closed
