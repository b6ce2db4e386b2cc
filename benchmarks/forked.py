"""Commands in processes of their own that can be killed: forked, so that what is heavy is imported once. Linux: moments are from /proc.

    (done,) = team(1, ("analyze", ...), directory)                to its end
    done = team(4, words, directory, kill=(1, 0.8))               four that know of each other, the second gets SIGKILL after 0.8 s

Moments are in CPU time, for that is what a busy machine does not change.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pkgutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

Work = tuple[str, ...] | Callable[[], int]
"""The words of a command, or a function that returns an exit code."""
_SOME = ("--measures", "positions,attention_mass", "--layers", "1", "--heads", "0,1")
_TINY = ("--layers", "1", "--width", "16", "--heads", "2", "--steps", "60", "--log-every", "10", "--score-prompts", "8")
_ROPE = "copying/rope_scattered"
COMMANDS = {
    "score": ("score", "reversal/repo", "--count", "8", "--out", "out"),
    "train": ("train", "reversal", *_TINY, "--checkpoint-every", "20", "--out", "out"),
    "analyze": ("analyze", "niah/repo", "--count", "6", *_SOME, "--out", "out"),
    "figures": ("figures", "hope", "--no-zoo", "--fast", "--checkpoint", f"{_ROPE}={_ROPE}", "--jobs", "1", "--out", "out"),
}
"""What is tried, small enough for seconds."""
AGAIN = {"score": "--overwrite", "train": "--resume", "analyze": "--overwrite", "figures": "--overwrite"}
"""With which each is given again after an interruption."""
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Done:
    """How a process ended: exit code (-9 where it was killed), CPU seconds, and what it wrote to stderr without its progress."""

    code: int
    cpu: float
    errors: str


def preload() -> None:
    """Import all of ours, and keep it to one thread: a fork has no others."""
    import torch

    import position_papers
    import repo_interp

    os.environ["COLUMNS"] = "500"  # no line is wrapped
    torch.set_num_threads(1)
    for package in (repo_interp, position_papers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)


def team(count: int, what: Work, directory: Path, kill: tuple[int, float] | None = None) -> list[Done]:
    """Do `what` in `count` processes, several launched as by torch.distributed; `kill`: which one, after how many CPU seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    where |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    ranks = [where | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if count > 1 else {} for rank in range(count)]
    members = [_Forked(what, directory, variables) for variables in ranks]
    if kill is not None:
        members[kill[0]].kill_at(kill[1])
        for member in members:
            member.join(20.0)  # so long it has to notice that another is gone; then it is ended, as launchers do
            member.terminate()
    return [member.done() for member in members]


class _Forked(_FORK.Process):
    """A process at work in `directory`; `variables` are added to its environment."""

    def __init__(self, what: Work, directory: Path, variables: dict[str, str]) -> None:
        self._errors = os.fdopen(os.memfd_create("errors"), "w+b", buffering=0)  # the disk may be full
        self._cpu = _FORK.Value("d", float("nan"))
        super().__init__(target=self._become, args=(what, directory, variables))
        self.start()

    def kill_at(self, seconds: float) -> None:
        """SIGKILL it when it has used so many seconds of CPU time, if it has not ended before."""
        with suppress(OSError):
            while self.is_alive():
                if int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9 >= seconds:
                    self.kill()
                time.sleep(0.002)

    def done(self) -> Done:
        """How it ended, when it has ended."""
        self.join()
        assert self.exitcode is not None
        with self._errors as errors:
            errors.seek(0)
            lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip() and line[0] != "\x1b"]
        return Done(self.exitcode, self._cpu.value, "\n".join(lines))

    def _become(self, what: Work, directory: Path, variables: dict[str, str]) -> None:
        from repo_interp.cli import main

        os.environ |= variables
        os.chdir(directory)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(self._errors.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        begun = time.process_time()
        code = what() if callable(what) else main(list(what))
        self._cpu.value = time.process_time() - begun
        sys.exit(code)


def files(directory: Path, clocked: tuple[str, ...] = ()) -> dict[str, str]:
    """Digests of all results below `directory` by their path.

    Left out are hidden files, which are kept to go on from, and those with the endings `clocked`: they hold clock times.
    """
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.suffix not in clocked]
    shown = {str(path.relative_to(directory)): path for path in paths if "/." not in f"/{path.relative_to(directory)}"}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in shown.items()}


def resumed() -> int:
    """Analyse here; every batch and every point of the experiment is kept at once."""
    import repo_interp as ri
    from repo_interp import processes
    from repo_interp.analysis.score import task_of
    from repo_interp.experiments.saliency import Saliency

    with processes.together():
        bridge = ri.zoo("niah/repo")
        prompts = task_of(bridge).prompts(8, seed=1, test_set="96")
        measures = ["positions", "patterns", "attention_mass"]
        run = ri.analyze(bridge, prompts, measures, store=".store", store_every=0.0, experiments=[Saliency(steps=1)])
        if processes.is_first():
            Path("out").mkdir(exist_ok=True)
            ri.write_run(run, "out/run.nc")
    return 0
