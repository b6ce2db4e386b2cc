"""Work in a process of its own, forked from the tests' one, so that torch is not imported again: it
may be killed, or meet a full disk.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple


class Done(NamedTuple):
    """How a process ended: its exit code, -9 where it was killed, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Forked:
    """A process that does `work` in `folder`, alone with one thread: a fork has no other.

    Its exit code is what `work` returns, else 0.
    """

    def __init__(
        self,
        work: Callable[[], int | None],
        folder: Path | None = None,
        stdout: IO[str] | None = None,
    ) -> None:
        """`stdout`: a file that it prints to instead of the pipe, from which `line` and `wait`
        read.
        """
        outputs = [os.pipe() for _ in range(2)]
        # Python warns of every fork of a process with threads
        with warnings.catch_warnings(action="ignore"):
            self.pid = os.fork()
        if self.pid == 0:
            _become(
                work,
                folder,
                stdout.fileno() if stdout is not None else outputs[0][1],
                outputs[1][1],
            )
        for _, writing in outputs:
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading, encoding="utf-8") for reading, _ in outputs)

    def line(self) -> str:
        """The next line that it prints."""
        return self.stdout.readline().strip()

    def kill(self) -> None:
        """End it by the signal that cannot be caught."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Done:
        """How it ended, once it has."""
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as readers:
            said = [
                each.result()
                for each in [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            ]
        return Done(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), *said)


def forked(
    work: Callable[[], int | None], folder: Path | None = None, stdout: IO[str] | None = None
) -> Done:
    """`work` done in a process of its own, to its end."""
    return Forked(work, folder, stdout).wait()


def say(text: object) -> None:
    """Print a line, from within a process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _become(work: Callable[[], int | None], folder: Path | None, stdout: int, stderr: int) -> None:
    import torch

    code: object = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        os.chdir(folder or ".")
        code = work()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code if isinstance(code, int) else 0)
