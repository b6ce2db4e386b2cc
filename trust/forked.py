"""Commands of the package in a process of their own that can be killed: forked, so that what is heavy is imported once.

    done = command(["analyze", ...], directory)                   to its end
    done = command(["analyze", ...], directory, kill_at=0.8)      SIGKILL when it has used so many seconds of CPU time
    done = team(4, work, directory, kill=(1, 0.8))                work() in four processes that know of each other, the second killed

Moments are in CPU time, for that is what a busy machine does not change. POSIX, and /proc for moments.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    """Its exit code; -9 where it was killed."""
    cpu: float
    """Seconds."""
    errors: str
    """What it wrote to stderr, without its progress."""


def preload() -> None:
    """Import what the commands import, and keep them to one thread: a fork has no others."""
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "500"})
    import torch

    torch.set_num_threads(1)
    import repo_interp as ri
    from position_papers import catalogue
    from repo_interp.cli import COMMANDS, _module
    from repo_interp.plots import catalogue as views

    assert all(_module(name) for name in COMMANDS)
    assert ri.load and ri.analyze and ri.score and ri.compare and ri.zoo and catalogue and views


def command(
    words: Sequence[str], directory: Path, kill_at: float | None = None, before: Callable[[], None] = lambda: None
) -> Done:
    """Run `repo-interp` with `words` in `directory`. `before` is called in the new process."""
    child, errors = _forked(lambda: _main(words), directory, before)
    if kill_at is not None:
        _kill(child, kill_at)
    return _done(child, errors)


def team(count: int, work: Callable[[], int], directory: Path, kill: tuple[int, float] | None = None) -> list[Done]:
    """`work` in `count` processes, launched as by torch.distributed; `kill`: which one is killed, after how many CPU seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def launched(rank: int) -> None:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})

    children = [_forked(work, directory, lambda rank=rank: launched(rank)) for rank in range(count)]
    if kill is not None:
        _kill(children[kill[0]][0], kill[1])
    done = []
    for child, errors in children:
        # One that does not notice that another is gone, as before they have met, is ended: so do launchers.
        end = Timer(20.0, os.kill, (child, signal.SIGTERM))
        if kill is not None:
            end.start()
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        end.cancel()
        done.append(_done(child, errors))
    return done


def _main(words: Sequence[str]) -> int:
    from repo_interp.cli import main

    return main(list(words))


def _forked(work: Callable[[], int], directory: Path, before: Callable[[], None]) -> tuple[int, int]:
    """A new process, and the file that it writes its errors to."""
    errors = os.memfd_create("stderr")  # the disk may be full
    child = os.fork()
    if child == 0:
        _become(work, directory, errors, before)
    return child, errors


def _kill(child: int, at: float) -> None:
    while (used := _cpu(child)) is not None and used < at:
        time.sleep(0.002)
    if used is not None:
        os.kill(child, signal.SIGKILL)


def _done(child: int, errors: int) -> Done:
    _, status, usage = os.wait4(child, 0)
    with os.fdopen(errors, "rb") as written:
        written.seek(0)
        said = written.read().decode(errors="replace")
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("\x1b")]
    return Done(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, "\n".join(lines))


def files(directory: Path, left_out: Callable[[Path], bool] = lambda path: False) -> dict[str, str]:
    """Digests of all files below `directory` by their path; hidden ones are those of work that goes on."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and not left_out(path.relative_to(directory)))
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _become(work: Callable[[], int], directory: Path, errors: int, before: Callable[[], None]) -> None:
    code = 70
    try:
        os.chdir(directory)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        before()
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _cpu(process: int) -> float | None:
    """CPU seconds of a running process; None when it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9
