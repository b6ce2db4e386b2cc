"""Processes that work on one command together.

The processes come from `accelerate launch`, `torchrun`, or another launcher of `torch.distributed`:

    with together(): ...    connects the launched processes; does nothing for a single process
    spread(items, work)     [work(item) for item in items]; the next free process does an item
    from_first(work)        the result of `work` in the first process, for every process
    meet()                  wait until all processes have called it

Every process runs the same program on the same input, so all processes call these functions in the
same order. Processes take items in order. With the longest items first, all processes end at about
the same time, even if their speeds differ. Results are in the order of the items: if the result of
an item does not depend on the process, one process and a hundred give the same results. Calls of
`spread` inside `work` do not spread again. If `work` fails in one process, the others take no more
items, and all raise the same error. If a process dies (it was killed, or its machine is gone), the
others raise `Deserted`.

Nothing here is loaded before it is needed: `--help` needs no torch. This module knows nothing about
the work.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count as numbers
from typing import Any, TypeVar

from repo_interp.errors import InputError, one_line
from repo_interp.runtime.failures import failure_of
from repo_interp.runtime.launcher import is_first, launched, local_count, number_of_launcher

Item = TypeVar("Item")
Result = TypeVar("Result")
_MEETING, _PATIENCE = timedelta(minutes=1), timedelta(days=30)
"""Timeouts for the other processes to connect, and then for their work: as long as the longest item
takes.
"""
_SILENCE = 10.0
"""Seconds of waiting for other processes before a message."""
# All processes call `spread` in the same order, so equal numbers mean the same call.
_sections = numbers()
"""Numbers of the calls of `spread`, the same in every process."""
_commands = 0
"""Number of meetings so far, the same in every process too."""
# Per thread: work inside a spread must not spread again, independent of other threads.
_solitude = threading.local()
_groups: dict[Any, Any] = {}


# Not an Exception, so that no handler mistakes it for a failed item and continues
class Deserted(KeyboardInterrupt):
    """Another process of the same command ended before its work was done.

    An interruption, after which the same command can continue.
    """


def count() -> int:
    """Return the number of processes that work together.

    Returns:
        The number; 1 if no processes are connected, and inside work that is already spread.
    """
    # Inside shared work each process works alone.
    if launched() == 1 or getattr(_solitude, "depth", 0):
        return 1
    import torch.distributed

    return (
        # Also if the caller's program has connected processes
        torch.distributed.get_world_size()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 1
    )


@contextmanager
def together(
    asked: Sequence[str] = (), waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Make the launched processes one team inside a `with` block.

    Process n of a machine uses accelerator n. A request to terminate, from a launcher or a
    scheduler, becomes an interruption, so that finished work is kept.

    Args:
        asked: The command, equal in all processes.
        waiting: Called with a line now and then while other processes are missing.

    Yields:
        Nothing.

    Raises:
        InputError: The environment is not from a launcher, or the processes have different
            commands.
        Deserted: Processes are missing, or got a request to terminate.
    """
    global _commands
    # Part of the keys of the store, so that a second command does not read the first one's
    _commands += 1
    if launched() == 1:
        yield
        return
    import torch
    from accelerate import PartialState

    # The caller has connected the processes, and also ends the connection.
    if torch.distributed.is_initialized():
        _require_same(asked)
        yield
        return

    def end(number: int, frame: object) -> None:
        raise Deserted("asked to terminate")

    # cpu means gloo. Ten times the patience: our message comes before torch's, and a busy
    # machine has ended this process by then.
    state = _met(lambda: PartialState(cpu=True, timeout=10 * _MEETING), waiting)
    # With more processes than devices, processes take devices in turn.
    if torch.cuda.is_available():
        torch.cuda.set_device(state.local_process_index % torch.cuda.device_count())
    # Python sets handlers only in the main thread. Launchers end the other processes by SIGTERM.
    before = (
        signal.signal(signal.SIGTERM, end)
        if threading.current_thread() is threading.main_thread()
        else None
    )
    try:
        _require_same(asked)
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        # Groups belong to a connection that ends here.
        _groups.clear()
        # Ending the connection fails if other processes have ended already.
        with suppress(Exception):
            state.destroy_process_group()
            PartialState._reset_state()


def speaks() -> bool:
    """Return whether this process reports why the command ended; only the first caller does.

    Returns:
        True in one process of a team.
    """
    if launched() == 1:
        return True
    try:
        # add is atomic, so exactly one process gets 1.
        return _store().add(f"repo_interp/{_commands}/ended", 1) == 1
    except Exception:  # not connected, or no longer
        return is_first()


def share_work(
    items: Sequence[Item],
    work: Callable[[Item], Result],
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Apply a function to items, in every process, with the work divided between processes.

    Args:
        items: Items, equal in all processes.
        work: Function of one item.
        progress: Called with the number of finished items of all processes, and of all items.

    Returns:
        Results in the order of `items`.

    Raises:
        Exception: The first error of `work`, in all processes.
        Deserted: Another process ended.
    """
    if count() == 1:
        results = []
        for item in items:
            results.append(work(item))
            if progress is not None:
                progress(len(results), len(items))
        return results
    section, store = f"repo_interp/{next(_sections)}", _store()
    mine: dict[int, Result] = {}
    failure: tuple[int, Exception] | None = None
    with _lost_ones():
        # A shared counter hands out items: a free process takes the next one.
        while not store.check([f"{section}/failed"]) and (
            place := store.add(f"{section}/taken", 1) - 1
        ) < len(items):
            try:
                # Inside an item nothing is spread again, since the other processes are busy.
                with alone():
                    mine[place] = work(items[place])
            except Exception as error:
                failure = (place, error)
                # The others finish their items and take no more.
                store.set(f"{section}/failed", "")
                break
            done = store.add(f"{section}/done", 1)
            if progress is not None:
                progress(done, len(items))
    # Also after a failure: every process must get here, or the others wait forever.
    found = _gathered((mine, None if failure is None else (failure[0], _portable(failure[1]))))
    # The failure of the first item, so that all processes raise the same one
    failures = sorted(
        (failed for _, failed in found if failed is not None), key=lambda failed: failed[0]
    )
    if failures:
        # The process with the failure raises its error, with the traceback.
        raise failure[1] if failure is not None and failure[0] == failures[0][0] else failures[0][1]
    by_place = {place: result for results, _ in found for place, result in results.items()}
    return [by_place[place] for place in range(len(items))]


def from_first(work: Callable[[], Result]) -> Result:
    """Call a function in the first process and return its result in every process.

    Args:
        work: Function without arguments.

    Returns:
        Its result.

    Raises:
        Exception: The error of `work`, in all processes.
        Deserted: Another process ended.
    """
    if count() == 1:
        return work()
    result, failure = None, None
    if is_first():
        try:
            with alone():
                result = work()
        except Exception as error:
            failure = error
    # An error is sent as a value: if it were raised here, the others would keep waiting.
    told: list[Any] = [(result, None if failure is None else _portable(failure))]
    import torch.distributed

    with _lost_ones():
        torch.distributed.broadcast_object_list(told, src=0, group=_group())
    if is_first() and failure is not None:
        raise failure
    if told[0][1] is not None:
        raise told[0][1]
    # The first process keeps its object, since it does not send it to itself.
    return result if is_first() else told[0][0]  # pyright: ignore[reportReturnType]


@contextmanager
def alone() -> Iterator[None]:
    """Let this process work alone inside a `with` block, without sharing work.

    Yields:
        Nothing.
    """
    _solitude.depth = getattr(_solitude, "depth", 0) + 1
    try:
        yield
    finally:
        _solitude.depth -= 1


def meet() -> None:
    """Wait until all processes have called this, so that none has missed an earlier file."""
    if count() > 1:
        _gathered(None)


def _met(connect: Callable[[], Result], waiting: Callable[[str], None] | None) -> Result:
    """Return the result of `connect` when all processes are connected; calls `waiting` meanwhile.

    Raises as `together`.
    """
    # Called for their errors, since a bad number in the environment would fail inside torch.
    local_count()
    number_of_launcher("LOCAL_RANK", 0, launched() - 1)
    number_of_launcher("MASTER_PORT", 1, 65_535)
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if absent:
        raise InputError(
            f"{launched()} processes were launched, and {absent[0]} is not in the "
            "environment; use accelerate launch or torchrun, which set it"
        )
    others = (
        f"the other processes of this command ({launched()} in all) at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    )
    ended: list[Any] = []

    def meet() -> None:
        try:
            ended.append(connect())
        except Exception as error:
            ended.append(error)

    # While torch waits, it ignores interruptions, exceeds its timeout, and prints lines.
    meeting, seconds = threading.Thread(target=meet, daemon=True), _MEETING.total_seconds()
    meeting.start()
    for waited in _waited(meeting, seconds):
        if waiting is not None:
            waiting(
                f"has waited {waited:.0f} s for {others}, for up to {seconds:.0f} s; launch them "
                "all together, or end this one with Ctrl-C"
            )
    if not ended or isinstance(ended[0], Exception):
        why = one_line(ended[0], 80) if ended else f"in {seconds:.0f} s"
        raise Deserted(f"{others} did not come ({why}); launch them all together")
    return ended[0]


def _waited(meeting: threading.Thread, longest: float) -> Iterator[float]:
    """Join a thread for up to `longest` seconds; yields the seconds so far for each message."""
    begun = time.monotonic()
    while (left := begun + longest - time.monotonic()) > 0:
        # Short meetings need no line.
        meeting.join(min(_SILENCE, left))
        if not meeting.is_alive():
            return
        if (waited := time.monotonic() - begun) < longest:
            yield waited


def _require_same(asked: Sequence[str]) -> None:
    """Raise InputError if the processes have different commands.

    Such processes would wait for each other forever.
    """
    # Compared in every process, so that all refuse.
    everyones = _gathered(list(asked))
    for number, others in enumerate(everyones):
        if others != everyones[0]:
            one, other = (one_line(" ".join(given), 160) for given in (everyones[0], others))
            raise InputError(
                f"process 0 was given {one!r}, process {number} {other!r}; launch the same "
                "command in all of them"
            )


@contextmanager
def _lost_ones() -> Iterator[None]:
    """Convert errors of a broken connection to another process to `Deserted`."""
    try:
        yield
    except RuntimeError as error:  # from gloo or the store
        raise Deserted(
            f"another process of this command has ended ({one_line(error, 80)})"
        ) from None


def _gathered(mine: Any) -> list[Any]:
    import torch.distributed

    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    with _lost_ones():
        torch.distributed.all_gather_object(everyones, mine, group=_group())
    return everyones


def _group() -> Any:
    """Return the processes connected by gloo, which exchanges numbers and names."""
    import torch.distributed

    # gloo has no public function to set the timeout later.
    from torch.distributed.distributed_c10d import _set_pg_timeout

    # Cached by the connection, since a caller may end one and begin another.
    whole = torch.distributed.group.WORLD
    if whole not in _groups:
        # A short timeout for meeting, then a long one for the work of the others
        group = _groups[whole] = torch.distributed.new_group(backend="gloo", timeout=_MEETING)
        torch.distributed.barrier(group)  # pyright: ignore[reportArgumentType]
        _set_pg_timeout(_PATIENCE, group)  # pyright: ignore[reportArgumentType]
    return _groups[whole]


def _portable(error: Exception) -> Exception:
    """Convert an error so that it can be sent; errors of other packages become a line of text."""
    if not isinstance(error, InputError) and (line := failure_of(error)) is not None:
        return InputError(line)
    try:
        # Pickled and unpickled, since some errors can only be pickled.
        return pickle.loads(pickle.dumps(error))
    except Exception:
        # The other processes get its message; its type is lost.
        return RuntimeError(one_line(f"{type(error).__name__}: {error}"))


def _store() -> Any:
    """Return the key-value store of the processes; torch has no public function for it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
