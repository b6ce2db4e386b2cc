"""One bar over the steps of long work; where there is no terminal, a plain line on standard error
about every ten seconds.

with steps(console) as step:
    step("observing layers", 3, 60)      step 3 of 60
    step("drawing")                      how many there are is not known
    step("training", 3, 60, "loss 0.1")  what else is known of it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, Thread

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from repo_interp.console import Console
from repo_interp.values import duration

FIRST, EVERY = 1.5, 10.0
"""Seconds until the first plain line, and between the others."""

_showing: ContextVar[bool] = ContextVar("showing", default=False)
Step = Callable[..., None]
"""Called with what is being done, how much of it is done and how much there is in all where that is
known, and a text beside it.
"""


@contextmanager
def steps(console: Console, every: float = EVERY) -> Iterator[Step]:
    """A function that shows what is being done, until the context ends; the bar is gone then.

    Nothing where the console is quiet, and inside another such context, whose work this is a part
    of.
    """
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
        bar = progress.add_task("", total=None, count="")
        current = ""

        def step(
            name: str, done: int | None = None, total: int | None = None, text: str = ""
        ) -> None:
            nonlocal current
            if name != current:  # the time that remains is that of this step
                progress.reset(bar, description=name, total=total, completed=0, count="")
                current = name
            progress.update(bar, completed=done, total=total, count=f"{_count(done, total)} {text}")

        yield step


@contextmanager
def _lines(every: float) -> Iterator[Step]:
    """The lines come from a thread of their own: one operation may take longer than ten seconds."""
    lock, ended = Lock(), Event()
    name, done, total, text = "working", None, None, ""
    begun = since = time.monotonic()

    def step(
        what: str, so_far: int | None = None, in_all: int | None = None, more: str = ""
    ) -> None:
        nonlocal name, done, total, text, since
        with lock:
            since = since if what == name else time.monotonic()
            name, done, total, text = what, so_far, in_all, more

    def tell() -> None:
        pause = min(FIRST, every)
        while not ended.wait(pause):
            pause = every
            now = time.monotonic()
            with lock:
                line = " ".join(filter(None, (name, _count(done, total), text)))
                if done and total:
                    line += (
                        f" ({100 * done // total} %), about "
                        f"{duration((now - since) * (total - done) / done)} left"
                    )
                line += f", {duration(now - begun)} so far"
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield step
    finally:
        ended.set()
        thread.join()


def _count(done: int | None, total: int | None) -> str:
    return "" if done is None or total is None else f"{done:,}/{total:,}"
