"""A progress bar over the steps of long work; without a terminal, a line now and then.

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
"""Seconds before the first plain line. Later lines wait at least as long, and at least a tenth of
the time so far.
"""
STILL = 6
"""Number of lines that are skipped if nothing has changed since the last line."""

_showing: ContextVar[bool] = ContextVar("showing", default=False)
Step = Callable[..., None]
"""Called with the name of the step, the finished count, the total if known, and a text."""


@contextmanager
def steps(console: Console, every: float = EVERY) -> Iterator[Step]:
    """Show the progress of long work until the context ends.

    Shows nothing inside another `steps` context, or on a quiet console.

    Args:
        console: Console for the bar.
        every: Initial seconds between lines without a terminal.

    Yields:
        Function of the name of the step, the finished count, the total, and further text.
    """
    # Nested work shows no second bar.
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
        # Without a total the bar moves back and forth.
        bar = progress.add_task("", total=None, count="")
        current = ""

        def step(
            name: str, done: int | None = None, total: int | None = None, text: str = ""
        ) -> None:
            nonlocal bar, current
            if name != current:  # the remaining time is estimated by step
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
            # Remaining time is estimated within a step, since steps differ in speed, and from items
            # of this call, since resumed work begins with finished items.
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
                    # Measured at the last finished item, so that the estimate does not grow during
                    # an item.
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
        # Otherwise a last line could appear in the next output.
        thread.join()


def _count(done: int | None, total: int | None) -> str:
    return "" if done is None or not total else f"{done:,}/{total:,}"
