"""Run pieces of work in parallel, each in a separate process, and stop them so that they can
continue later.

Since the models are small, one process per piece with one thread each uses several cores better
than one process with many threads. This module knows nothing about terminals; progress can be read
from the files of the work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing.synchronize import Event
from types import FrameType
from typing import TypeVar

import torch

from repo_interp.errors import InputError

Item = TypeVar("Item")


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Record an interrupt or a request to terminate inside a `with` block; yields a function that
    returns whether one came.

    A second interrupt raises KeyboardInterrupt at once. Only the main thread of a process may use
    this.
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside a `with` block; another number may change the last
    bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(
    items: Sequence[Item],
    work: Callable[[Item], object],
    jobs: int,
    watch: Callable[[int], None],
    every: float = 0.5,
) -> None:
    """Call `work`, a function of a module, with every item, `jobs` at a time; `watch` is called
    with the number of finished items every `every` seconds.

    An interrupt requests all to stop (`asked_to_stop`), and raises KeyboardInterrupt once they
    have. After an error no further item begins; the error is raised when the running items end.
    """
    context = multiprocessing.get_context("spawn")
    ending = context.Event()
    with (
        stoppable() as stop,
        ProcessPoolExecutor(jobs, context, _begin_process, (ending, os.getpid())) as pool,
    ):
        waiting: set[Future[object]] = {pool.submit(work, item) for item in items}
        failed, finished = None, 0
        while waiting:
            done, waiting = wait(waiting, timeout=every, return_when=FIRST_COMPLETED)
            watch(finished := finished + len(done))
            failed = failed or next(
                (future for future in done if future.exception() is not None), None
            )
            if stop():
                ending.set()
            if stop() or failed is not None:
                waiting = {future for future in waiting if not future.cancel()}
        if stop():
            raise KeyboardInterrupt
        error = None if failed is None else failed.exception()
        if isinstance(error, BrokenProcessPool):
            why = "a process was ended from outside, as where memory is lacking"
            raise InputError(f"{why}; the same command goes on, with fewer --jobs")
        if error is not None:
            raise error


asked_to_stop: Callable[[], bool] = lambda: False  # noqa: E731
"""Whether this process, one of those side by side, was asked to stop."""


def _begin_process(ending: Event, parent: int) -> None:
    """Ignore interrupts of the terminal, since the parent decides; stop if the parent is gone."""
    global asked_to_stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked_to_stop = lambda: ending.is_set() or os.getppid() != parent  # noqa: E731


@cache
def end_when_asked() -> None:
    """End this process at a request to stop from now on, for work whose results are kept as they
    come.
    """

    def look() -> None:
        while not asked_to_stop():
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
