"""Several training runs side by side, each in a process of its own, and stopping them so that they can go on later.

A process per run with few threads uses a machine of some cores better than one run with many: the models are small. Knows nothing about
terminals; whoever wants to see how far a run is reads its log.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.folder import TrainingFolder
from repo_interp import processes


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """While this lasts, an interrupt or a request to terminate is noted; the function given says whether one came.

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


def train_side_by_side(
    runs: Sequence[tuple[TrainingConfiguration, Path]], jobs: int, watch: Callable[[], None], every: float = 0.5
) -> bool:
    """Train every (configuration, directory begun before), `jobs` at a time; `watch` is called every `every` seconds.

    Returns whether all came to their end: an interrupt stops them so that each can go on. An error of a run is raised when the others
    are done. Where several processes were launched together, each trains one run after another, whichever is next.
    """
    if processes.count() > 1:

        def train_next(run: tuple[TrainingConfiguration, Path]) -> None:
            if not train_side_by_side([run], 1, watch, every):
                raise KeyboardInterrupt

        try:
            processes.spread(runs, train_next)
        except KeyboardInterrupt:
            return False
        return True
    context = multiprocessing.get_context("spawn")
    ending = context.Event()
    with stoppable() as stop, ProcessPoolExecutor(jobs, context, _begin_process, (ending, os.getpid())) as pool:
        futures = [pool.submit(_train_one, configuration, directory) for configuration, directory in runs]
        waiting: set[Future[bool]] = set(futures)
        while waiting:
            _, waiting = wait(waiting, timeout=every, return_when=FIRST_COMPLETED)
            watch()
            if stop():
                ending.set()
                waiting = {future for future in waiting if not future.cancel()}
        ended = [not future.cancelled() and future.result() for future in futures]  # raises what a run raised
        return all(ended)


_asked_to_stop: Callable[[], bool] = lambda: False  # noqa: E731


def _begin_process(ending: Event, parent: int) -> None:
    """An interrupt of the terminal reaches this process too, but the parent alone decides; without it, training stops as well."""
    global _asked_to_stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _asked_to_stop = lambda: ending.is_set() or os.getppid() != parent  # noqa: E731


def _train_one(configuration: TrainingConfiguration, directory: Path) -> bool:
    """Train in this process until the end, or until asked to stop. Returns whether it was the end."""
    from position_papers.training.loop import train
    from position_papers.training.preparation import prepare

    folder, prepared = TrainingFolder(directory), prepare(configuration)
    with folder.claimed():
        for _ in train(prepared, folder, stop=_asked_to_stop):
            pass
    return folder.is_finished
