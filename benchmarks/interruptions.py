"""Commands that are interrupted in forked processes: the files that they leave must be complete.

Forking imports the heavy libraries once.

Linux.

    (done,) = team(1, "analyze ...", directory)                   to its end
    done = team(4, command, directory, kill=(1, 0.8))             four that know of each other, the second gets SIGKILL after 0.8 s

SIGKILL at random moments, and several processes on one command: given again, it ends with the bytes
of one that nobody disturbed; nothing half-written is left. 2 and 4 processes leave the bytes of
one; where one of two is killed, the other ends on its own, and one or two go on with what both have
kept. Moments are drawn by a seed, even over the CPU time of an undisturbed run, which a busy
machine does not change.

A file system of 32 MB that is nearly full: a command that finds no room says so in one line, and
what stood there stands. Exit code 2: nothing was changed. Exit code 1: the numbers are there and
whole, and the line says which pictures are not. Where no tmpfs may be mounted the part fails.
"""

from __future__ import annotations

import os
import pkgutil
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
from forked import Forked, say

from benchmarks.running import Row, row
from repo_interp.storage.files import LEFT_BEHIND, digest_of

Work = str | Callable[[], int]
"""A command, or a function that returns an exit code."""
_ROPE = "copying/rope_scattered"
_TRAIN = (
    "train reversal --layers 1 --width 16 --heads 2 --steps 60 --log-every 10 --score-prompts 8 "
    "--checkpoint-every 20"
)
_SCHEME = f"{Path(__file__).with_name('own_scheme.py')}:build"
COMMANDS = {
    "score": "score reversal/repo --count 8 --out out",
    "train": f"{_TRAIN} --out out",
    "train_scheme": f"{_TRAIN} --scheme {_SCHEME}@1 --layers 2 --out out",
    "analyze": "analyze niah/repo --count 6 --measures positions,attention_mass --layers 1 "
    "--heads 0,1 --out out",
    "figures": f"figures hope --no-zoo --fast --checkpoint {_ROPE}={_ROPE} --jobs 1 "
    "--cache cache --out out",
    "card": f"card {_SCHEME} --tasks reversal --seeds 0,1 --out out",
}
"""Commands to interrupt, small enough to take seconds."""
GOES_ON = {"train": " --resume", "train_scheme": " --resume", "card": ""}
"""Options with which a command is repeated after an interruption, if not `--overwrite`."""
ONE_PLACE = tuple(GOES_ON)
"""Commands whose directory keeps its first result; another result needs another directory."""
RECIPE = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "steps": 30,
    "batch": 2,
    "warm_up": 1,
    "log_every": 10,
    "checkpoint_every": 10,
    "score_prompts": 4,
    "task_options": {"first_longest": 2, "longest": 4, "longest_test": 5},
}
"""Recipe of reversal on a card, instead of the one that takes minutes."""
CLOCKED = (".jsonl", ".pt")
"""Files of a training that contain clock times; the second is deleted at its end."""
LAST = {".png": b"IEND\xaeB`\x82", ".pdf": b"%%EOF", ".svg": b"</svg>", ".html": b"</html>"}
"""Last bytes of complete files."""
SIZE = 2**25
ROOMS = (0, 4096, 32768, 131072)
"""Free bytes on the disk."""


@dataclass(frozen=True)
class Done:
    """Result of a process: exit code (-9 if it was killed), CPU seconds, and its standard error
    without progress lines.
    """

    code: int
    cpu: float
    errors: str


def preload() -> None:
    """Import our modules with one thread, since a fork keeps only one."""
    import torch

    import position_papers
    import repo_interp
    from position_papers.card import columns

    os.environ["COLUMNS"] = "500"  # no line is wrapped
    seconds = columns.Column("reversal", ("4",), ("5",), fields=RECIPE)
    columns.COLUMNS = {**columns.COLUMNS, "reversal": seconds}
    torch.set_num_threads(1)
    for package in (repo_interp, position_papers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)


def team(
    count: int, what: Work, directory: Path, kill: tuple[int, float] | None = None
) -> list[Done]:
    """Run `what` in `count` processes, several of them as torch.distributed launches them; `kill`: the
    process to kill, and after how many CPU seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    where |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    ranks = [
        where | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if count > 1 else {}
        for rank in range(count)
    ]
    members = [Forked(partial(_work, what, variables), directory) for variables in ranks]
    if kill is not None:
        _kill_at(members[kill[0]].pid, kill[1])
    # So long the others have to notice that one is gone; then they are ended, as launchers do.
    return [_done(member, None if kill is None else 20.0) for member in members]


def _work(what: Work, variables: dict[str, str]) -> int:
    """Run it in this process, which prints its CPU seconds last."""
    from repo_interp.cli import main

    os.environ |= variables
    begun = time.process_time()
    try:
        return what() if callable(what) else main(shlex.split(what))
    finally:
        say(time.process_time() - begun)


def _kill_at(process: int, seconds: float) -> None:
    """SIGKILL a process after so many seconds of CPU time, unless it ended before."""
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9 >= seconds:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)


def _done(member: Forked, patience: float | None) -> Done:
    """Wait until a process ends, at most so many seconds, and return its result."""
    ending = threading.Timer(patience or 0.0, os.kill, (member.pid, signal.SIGTERM))
    if patience is not None:
        ending.start()
    code, printed, errors = member.wait()
    ending.cancel()
    cpu = float("nan") if code < 0 else float(printed.splitlines()[-1])
    lines = [line for line in errors.splitlines() if line.strip() and line[0] != "\x1b"]
    return Done(code, cpu, "\n".join(lines))


def kills(given: Namespace, name: str, count: int = 1) -> Iterator[Row]:
    """SIGKILL of one process at random moments. Repeating the command gives the bytes of an
    undisturbed run, without half-written files.
    """
    preload()
    with TemporaryDirectory() as scratch:
        works: dict[str, Work] = {"resumed": resumed, "edits": edits}
        first, again = (works[name],) * 2 if name in works else (COMMANDS[name], _again(name))
        clocked = CLOCKED if name in ONE_PLACE else ()
        calm = team(count, first, place := Path(mkdtemp(dir=scratch)))
        expected = files(place / "out", clocked)
        wrong, most, ended = different(calm, expected, expected), 0, 0
        generator = np.random.default_rng(0)
        moments = np.sort(generator.uniform(0, 1, 0 if wrong else given.kills))
        for moment in moments:
            victim = int(generator.integers(count))
            place = Path(mkdtemp(dir=scratch))
            cut = team(count, first, place, kill=(victim, moment * calm[victim].cpu))
            ended += all(each.code == 0 for each in cut)
            most = max(most, sum(path.is_file() for path in place.rglob("*")))
            complaints = half_written(place / "out")
            done = team(1 + int(generator.integers(count)), again, place)
            complaints += different(done, files(place / "out", clocked), expected)
            complaints += [
                path.name for path in (place / "out").rglob(".*") if path.name.endswith(LEFT_BEHIND)
            ]
            wrong += [f"process {victim} killed at {moment:.0%}: {each}" for each in complaints[:1]]
            shutil.rmtree(place)
        note = (
            f"{calm[0].cpu:.1f} CPU s undisturbed, {len(expected)} files compared; "
            f"killed with up to {most} files there"
        )
        note += f"; {ended} had ended before" if ended else ""
        yield outcome(name, len(moments) or 1, wrong, note)


def processes(given: Namespace, name: str) -> Iterator[Row]:
    """Several processes of one command write the same bytes as one process."""
    preload()
    with TemporaryDirectory() as scratch:
        expected: dict[str, str] = {}
        wrong, cpu = [], []
        for count in (1, 2, 4):
            done = team(count, COMMANDS[name], place := Path(mkdtemp(dir=scratch)))
            found = files(place / "out")
            expected = expected or found
            cpu.append(f"{max(each.cpu for each in done):.1f}")
            wrong += [f"{count} processes: {each}" for each in different(done, found, expected)]
        note = (
            f"2, 4 processes against 1, {len(expected)} files; CPU s of the busiest: "
            f"{', '.join(cpu)}"
        )
        yield outcome(name, 2, wrong, note)


def disk(given: Namespace, name: str) -> Iterator[Row]:
    """On a nearly full disk of 32 MB a command prints one line, and existing files stay as they were."""
    preload()
    with TemporaryDirectory() as scratch:
        (before := Path(scratch) / "before").mkdir()
        (calm,) = team(1, COMMANDS[name], before)
        if calm.code:
            raise RuntimeError(f"fails undisturbed: {calm.errors}")
        # Other results than the earlier ones. Training goes elsewhere, for `--overwrite` removes
        # first.
        other = f"{COMMANDS[name][:-3]}other" if name in ONE_PLACE else _again(name)
        other += " --seed 1" * (name not in ("analyze", "card"))
        wrong, refused = [], 0
        for room in ROOMS:
            with nearly_full(Path(scratch) / "disk", before, room) as place:
                stood = files(place / "out")
                (done,) = team(1, other, place)
                refused += done.code != 0
                wrong += [
                    f"{room:,} bytes left: {said}" for said in _complaints(done, place, stood)
                ]
        yield outcome(name, len(ROOMS), wrong, f"tmpfs of 32 MB; {refused} found no room")


def _complaints(done: Done, place: Path, stood: dict[str, str]) -> list[str]:
    """The first fault after a command that may have met a full disk."""
    there = files(place / "out")
    said = [line for line in done.errors.splitlines() if "so far" not in line]
    if done.code == 2:
        if there != stood:
            return [
                f"what stood there changed: {sorted(set(stood.items()) ^ set(there.items()))[0][0]}"
            ]
        return [] if len(said) == 1 else [f"{len(said)} lines: {' / '.join(said)[-300:]}"]
    if done.code == 1:
        if any("Traceback" in line for line in said):
            return [f"a traceback: {said[-1][-300:]}"]
        return half_written(place / "out")[:1]
    return [] if done.code == 0 else [f"exit code {done.code}: {' / '.join(said)[-300:]}"]


@contextmanager
def nearly_full(at: Path, before: Path, room: int) -> Iterator[Path]:
    """A directory with a copy of `before` and `room` free bytes.

    Raises CalledProcessError if mounting is not allowed.
    """
    at.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(at)],
        check=True,
        capture_output=True,
    )
    try:
        shutil.copytree(before / "out", at / "out")
        with (at / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(at).free - room)
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
        at.rmdir()


def half_written(directory: Path) -> list[str]:
    """Faults of incomplete results."""
    from safetensors import safe_open

    from repo_interp.run import read_run

    complaints = []
    for path in map(directory.joinpath, files(directory)):
        try:
            if path.name == "run.nc":
                read_run(path)
            elif path.suffix == ".safetensors":
                safe_open(path, "np").__enter__()
            elif not path.read_bytes().rstrip().endswith(LAST.get(path.suffix, b"")):
                complaints.append(f"half-written {path.name}")
        except Exception as error:
            complaints.append(f"half-written {path.name}: {error}")
    return complaints


def different(done: list[Done], found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Complaints about processes that failed, and files that are not as `expected`."""
    failed = [f"it ends with {each.code}: {each.errors[-300:]}" for each in done if each.code]
    other = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    return failed or (
        [f"other bytes than undisturbed: {', '.join(other[:5])}"] if other or not found else []
    )


def outcome(what: str, tried: int, wrong: list[str], note: str) -> Row:
    """A row of the table; what went wrong is in its note."""
    held = max(0, tried - len(wrong))
    return row(what, tried=tried, held=held, needed=1.0, note="; ".join([note, *wrong]))


def _again(name: str) -> str:
    """The command, given again after an interruption."""
    return f"{COMMANDS[name]}{GOES_ON.get(name, ' --overwrite')}"


def files(directory: Path, clocked: tuple[str, ...] = ()) -> dict[str, str]:
    """Digests of all results below `directory` by their path.

    Left out are hidden files, which are kept to go on from, and those with the endings `clocked`:
    they hold clock times.
    """
    paths = {
        str(path.relative_to(directory)): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix not in clocked
    }
    return {name: digest_of(path) for name, path in paths.items() if "/." not in f"/{name}"}


def edits() -> int:
    """Try edits here; every batch of every edit is kept at once."""
    import repo_interp as ri
    from repo_interp.analysis.score import task_of
    from repo_interp.checkpoint_files.shipped import zoo_path

    model = ri.open_model("niah/repo")
    found = ri.try_edits(
        model,
        task_of(zoo_path("niah/repo")).prompts(8, seed=1, test_set="96"),
        {f"without {head}": ri.interventions.ablate(model, (1, head)) for head in range(4)},
        batch_size=1,
        store=".store",
        progress=lambda done, total: None,
    )
    Path("out").mkdir(exist_ok=True)
    found.to_netcdf("out/edits.nc")
    return 0


def resumed() -> int:
    """Analyse here; every batch and every point of the experiment is kept at once."""
    import repo_interp as ri
    from repo_interp.analysis.score import task_of
    from repo_interp.checkpoint_files.shipped import zoo_path
    from repo_interp.plugins.causes.saliency import Saliency
    from repo_interp.runtime import processes

    with processes.together():
        bridge = ri.zoo("niah/repo")
        prompts = task_of(zoo_path("niah/repo")).prompts(8, seed=1, test_set="96")
        measures = ["positions", "patterns", "attention_mass"]
        run = ri.analyze(
            bridge,
            prompts,
            measures,
            store=".store",
            store_every=0.0,
            experiments=[Saliency(steps=1)],
        )
        if processes.is_first():
            Path("out").mkdir(exist_ok=True)
            ri.write_run(run, "out/run.nc")
    return 0
