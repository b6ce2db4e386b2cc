"""Every batch of an analysis observed, by one process or by several, with those that are finished kept on disk.

    one process       batches are observed in their order, the longest first, and merged as they come
    several           each takes the next batch when it is free (`processes.spread`) and writes it to the store; the first process
                      merges them in their order, so that nothing depends on who observed which

A batch that is written is never observed again, whoever goes on. Whether writing pays is decided by the time that has passed: a short
analysis writes none, and one that is interrupted writes those that it still holds. Knows nothing about what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch import nn

from repo_interp import processes
from repo_interp.analysis.batches import Batch, BatchStore
from repo_interp.analysis.finite import Faults
from repo_interp.analysis.observing import observe_batch
from repo_interp.measures.statistics import Measure, Statistics

_WRITING_SHARE = 0.1
"""Of the time of an analysis, at most, that goes into writing finished batches."""
_MOST_WAITING = 256
"""Finished batches that one of several processes holds at most before it writes them, however long that takes."""
Progress = Callable[[int, int], None]
"""Called with layers observed so far and in all."""


@dataclass
class Part:
    """What came of one batch."""

    observed: dict[str, Statistics] | None
    """None: it stands in the store."""
    faults: Faults = field(default_factory=Faults)


Keep = Callable[[int, Part], None]


class ObservedBatches:
    """The statistics of every batch; several processes observe them when this is made, one when it is asked for them."""

    def __init__(
        self,
        bridge: nn.Module,
        batches: Sequence[Batch],
        measures: Sequence[Measure],
        layers: Sequence[int],
        heads: Sequence[int] | None,
        store: BatchStore,
        keep: Keep,
        progress: Progress | None,
    ) -> None:
        """`store` has what is finished, `keep` writes to it (`kept`)."""
        self._bridge, self._batches, self._measures, self._layers, self._heads = bridge, batches, measures, layers, heads
        self._store, self._keep, self._progress = store, keep, progress
        self._parts = self._spread() if processes.count() > 1 else None

    def statistics(self, faults: Faults, needed: Sequence[str]) -> Iterator[dict[str, Statistics]]:
        """By measure, batch after batch. What is not finite is told to `faults`; NotFinite is raised where all of `needed` stopped."""
        if self._parts is not None:
            for number, part in enumerate(self._parts):
                faults.add(part.faults)
                faults.require_some(needed)
                observed = part.observed if part.observed is not None else self._store.read(number)
                yield self._observe(number, faults) if observed is None else observed
            return
        for number in range(len(self._batches)):
            observed = self._store.read(number)
            if observed is None:
                observed = self._observe(number, faults, self._advance(number))
                faults.require_some(needed)
                if len(observed) == len(self._measures):  # one that something stopped in is observed again, to say why
                    self._keep(number, Part(observed))
            yield observed
            self._tell(number + 1)

    def _spread(self) -> list[Part]:
        """What came of every batch, from all processes; those that stand in the store already are left out."""
        numbers = range(len(self._batches))
        waiting = processes.from_first(lambda: [number for number in numbers if not self._store.has(number)])
        before = len(numbers) - len(waiting)

        def work(number: int) -> Part:
            part = Part(None)
            part.observed = self._observe(number, part.faults)
            if not part.faults.stopped:
                self._keep(number, part)
            return part

        parts = dict(zip(waiting, processes.spread(waiting, work, lambda done, _: self._tell(before + done)), strict=True))
        return [parts.get(number, Part(None)) for number in numbers]

    def _observe(self, number: int, faults: Faults, advance: Callable[[int], None] | None = None) -> dict[str, Statistics]:
        return observe_batch(self._bridge, self._batches[number], self._measures, self._layers, self._heads, advance, faults)

    def _advance(self, batch: int) -> Callable[[int], None] | None:
        progress, layers = self._progress, len(self._layers)
        return None if progress is None else lambda observed: progress(batch * layers + observed, len(self._batches) * layers)

    def _tell(self, batches: int) -> None:
        if self._progress is not None:
            self._progress(batches * len(self._layers), len(self._batches) * len(self._layers))


@contextmanager
def kept(store: BatchStore, every: float) -> Iterator[tuple[Keep, Callable[[], None]]]:
    """A function that takes a finished batch, and one that writes all that wait.

    A batch is written with those that wait, once `every` seconds have passed since the last were. Where writing takes long beside
    measuring, as of small batches of a small model, only as many are written as fit into `_WRITING_SHARE` of the time (`every` 0: all).
    What waits when the context ends with an error or an interruption is written then; when it ends well, nobody needs it. A part that is
    written holds its statistics no longer.
    """
    most_waiting = _MOST_WAITING if processes.count() > 1 else None
    waiting: dict[int, Part] = {}
    begun = last = time.monotonic()
    writing = 0.0

    def write_one() -> None:
        nonlocal writing
        start, number = time.monotonic(), next(iter(waiting))
        part = waiting.pop(number)
        assert part.observed is not None
        if store.write(number, part.observed):
            part.observed = None
        writing += time.monotonic() - start

    def keep(number: int, part: Part) -> None:
        nonlocal last
        waiting[number] = part
        while most_waiting is not None and len(waiting) > most_waiting:
            write_one()
        if time.monotonic() - last < every:
            return
        while waiting and (every == 0 or writing < _WRITING_SHARE * (time.monotonic() - begun)):
            write_one()
        last = time.monotonic()

    def keep_all() -> None:
        while waiting:
            write_one()

    try:
        yield keep, keep_all
    except BaseException:
        with suppress(OSError):  # the disk may be full: then that is what is raised
            keep_all()
        raise
