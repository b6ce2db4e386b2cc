"""One bar over the steps of long work; without a terminal, a line now and then.

A line comes about every ten seconds at first, then whenever a tenth of the time so far has passed.

with steps(console) as step:
    step("observing layers", 3, 60)      step 3 of 60
    step("drawing")                      without a known number of steps
    step("training", 3, 60, "loss 0.1")  with a text
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, Thread

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from repo_interp.runtime.console import Console
from repo_interp.values import duration

FIRST, EVERY = 1.5, 10.0
"""Seconds until the first plain line, and at least between the others: a tenth of the time so far
is, too.
"""
STILL = 6
"""Lines that are left out where nothing has changed since the last one."""

_showing: ContextVar[bool] = ContextVar("showing", default=False)
Step = Callable[..., None]
"""Called with the name of the step, the count that is done, the total where known, and a text."""


@contextmanager
def steps(console: Console, every: float = EVERY) -> Iterator[Step]:
    """Show the progress of long work until the context ends.

    Inside another such context, and on a quiet console, nothing is shown.

    Args:
        console: Where the bar is drawn.
        every: Seconds between lines where there is no terminal, at the beginning.

    Yields:
        Function that takes the name of the step, the count that is done, the total, and further
        text.
    """
    # Work inside of other work: one bar at a time.
    if console.quiet or _showing.get():
        yield lambda *done: None
        return
    with _bar(console) if console.is_terminal else _lines(every) as step:
        token = _showing.set(True)
        try:
            yield step
        finally:
            _showing.reset(token)


@contextmanager
def _bar(console: Console) -> Iterator[Step]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
    )
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        # Without a total the bar moves to and fro.
        bar = progress.add_task("", total=None, count="")
        current = ""

        def step(
            name: str, done: int | None = None, total: int | None = None, text: str = ""
        ) -> None:
            nonlocal bar, current
            if name != current:  # the time that remains is that of this step
                progress.remove_task(bar)
                bar, current = progress.add_task(name, total=total or None, count=""), name
            count = f"{_count(done, total)} {text}"
            progress.update(bar, completed=done, total=total or None, count=count)

        yield step


@contextmanager
def _lines(every: float) -> Iterator[Step]:
    """Write lines from a thread: one operation may take longer than ten seconds."""
    lock, ended = Lock(), Event()
    name, done, total, text, first = "working", None, None, "", 0
    begun = since = at = time.monotonic()

    def step(
        current: str, so_far: int | None = None, in_all: int | None = None, more: str = ""
    ) -> None:
        nonlocal name, done, total, text, since, first, at
        with lock:
            # Time left is estimated within a step, as steps differ in speed, and by items done
            # now: resumed work begins with others done already.
            if current != name:
                since, first = time.monotonic(), so_far or 0
            at = time.monotonic()
            name, done, total, text = current, so_far, in_all, more

    def write_lines() -> None:
        pause, said, silent = min(FIRST, every), "", 0
        # wait returns at once when the work ends, so no line is late.
        while not ended.wait(pause):
            now = time.monotonic()
            pause = max(every, (now - begun) / 10)
            with lock:
                line = " ".join(filter(None, (name, _count(done, total), text)))
                if line == said and silent < STILL:
                    silent += 1
                    continue
                said, silent = line, 0
                if done and total:
                    line += f" ({100 * done // total} %)"
                    # By the time of the last item: while one is worked on, less is left, not more
                    left = (at - since) * (total - done) / max(1, done - first) - (now - at)
                    if first < done < total and left > 0:
                        line += f", about {duration(left)} left"
                line += f", {duration(now - begun)} so far"
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    thread = Thread(target=write_lines, daemon=True)
    thread.start()
    try:
        yield step
    finally:
        ended.set()
        # Else a last line could be written into the next output.
        thread.join()


def _count(done: int | None, total: int | None) -> str:
    return "" if done is None or not total else f"{done:,}/{total:,}"
