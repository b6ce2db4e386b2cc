"""Progress bars for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def analysis_bars(console: Console) -> Iterator[tuple[Callable[[int, int], None], Callable[[str, int, int], None]]]:
    """Two functions that advance bars: one over the observed layers of all prompts, and one per experiment, by name, over its points.

    The bars are gone when the context ends.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars = {"": progress.add_task("observing layers", total=None)}

        def advance(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done, total=total)

        yield lambda done, total: advance("", done, total), advance
