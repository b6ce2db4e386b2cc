"""Work side by side, each piece in a process of its own, and stopping it so that it can go on
later.

A process per piece with one thread each uses a machine of some cores better than one process with
many threads: the models are small. Knows nothing about terminals; whoever wants to see how far the
work is reads what it leaves.
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
    """While this lasts, an interrupt or a request to terminate is noted; the function given says
    whether one came.

    A second interrupt is a KeyboardInterrupt at once. Only the main thread of a process may use it.
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
    """While this lasts, torch computes with so many threads; another number may change the last
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
    """Call `work`, a function of a module, with every item, `jobs` at a time; `watch` gets how many
    are done, every `every` seconds.

    An interrupt asks all to stop (`asked_to_stop`) and is a KeyboardInterrupt once they have. After
    an error nothing more is begun; it is raised when the rest is done.
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
    """An interrupt of the terminal reaches this process too, but the parent alone decides; without
    it, work stops as well.
    """
    global asked_to_stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked_to_stop = lambda: ending.is_set() or os.getppid() != parent  # noqa: E731


@cache
def end_when_asked() -> None:
    """From now on this process ends as soon as it is asked to stop: for work whose results are kept
    as they come.
    """

    def look() -> None:
        while not asked_to_stop():
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
