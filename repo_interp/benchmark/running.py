"""Parts, each in a process of its own, and what they will cost.

    seconds of a part    what it took the last time, where it stands in the table; else operations / speed + what a process needs to begin,
                         the speed from a matrix product timed here and now

A part whose process fails or is killed - for lack of memory, say - costs the others nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from threading import Event

from repo_interp.benchmark.cost import Cost
from repo_interp.benchmark.parts import OLMO2, ROWS, TEXTBOOK_UP_TO, Line, Part, shape_of
from repo_interp.benchmark.store import Circumstances, Measured
from repo_interp.errors import one_line

_EVERY = 0.2
"""Seconds between looks at a part's process."""
_PASSES = {"layer": 4.0, "model": 5.0, "patterns": 10.0, "long": 2.0}
"""Forward passes that measuring a part is worth, in operations."""
_ONCE = 4096
"""Tokens beyond which every call is made once."""
_BEGINNING = {"layer": 8.0, "model": 10.0, "patterns": 12.0, "loading": 15.0, "inspect": 25.0, "analysis": 60.0, "long": 15.0}
"""Seconds that do not grow with prompts, imports among them."""


class Failed(Exception):
    """A part that could not be measured, and why, in one line."""


def measured(part: Part, folder: Path, now: Circumstances, watch: Callable[[], None]) -> Measured:
    """`part` as its process measured it; `watch` is called while it runs. Raises Failed; an interruption ends the process too."""
    threads = str(part.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        result, said = Path(place) / "result.json", Path(place) / "said"
        command = [sys.executable, "-m", f"{__package__}.child", json.dumps(asdict(part)), str(folder), str(result)]
        with said.open("wb") as stream:
            process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
            try:
                while process.poll() is None:
                    watch()
                    time.sleep(_EVERY)
            finally:
                process.kill()
                process.wait()
        if not result.is_file():
            raise Failed(_reason(process.returncode, said.read_text(encoding="utf-8", errors="replace")))
        made = json.loads(result.read_text(encoding="utf-8"))
    lines = tuple(Line(**{**line, "cost": Cost(**line["cost"])}) for line in made["lines"])
    return Measured(part, lines, Cost(**made["whole"]), now)


def all_measured(parts: Sequence[Part], folder: Path, now: Circumstances, jobs: int) -> Iterator[tuple[Part, Measured | Failed]]:
    """Every part with what came of it, as it comes: those of rows that are measured alone one by one, then others `jobs` at a time.

    Where the iteration ends early, by an interruption say, the processes end too.
    """
    ended = Event()

    def watch() -> None:
        if ended.is_set():
            raise Failed("interrupted")

    def one(part: Part) -> Measured | Failed:
        try:
            return measured(part, folder, now, watch)
        except Failed as failure:
            return failure

    alone = [part for part in parts if ROWS[part.row].alone]
    for some, workers in ((alone, 1), ([part for part in parts if part not in alone], jobs)):
        with ThreadPoolExecutor(workers) as pool:
            try:
                futures = {pool.submit(one, part): part for part in some}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                ended.set()
                pool.shutdown(cancel_futures=True)
                raise


def expected_seconds(part: Part, before: Sequence[Measured], speed: float) -> float:
    """Seconds that measuring `part` takes, from `before`, or at `speed` operations a second."""
    last = next((one.whole.wall_seconds for one in before if one.part == part), None)
    if last is not None:
        return last
    shape, seconds = shape_of(part.subject), _BEGINNING.get(part.row, 10.0)
    if part.tokens and part.row in _PASSES:
        layers = 1 if part.row == "layer" else shape.layers
        passes = _PASSES[part.row] / (2 if part.tokens > _ONCE or (part.subject == OLMO2 and part.row == "model") else 1)
        operations = passes * layers * shape.layer_operations(part.tokens)
        if part.row == "layer" and part.tokens <= TEXTBOOK_UP_TO:
            operations += 2 * (2 / 3) * (3 * part.tokens) ** 3  # a dense solve in float64
        seconds += operations / speed / part.threads
    return seconds


def expected_in_all(parts: Sequence[Part], before: Sequence[Measured], speed: float, jobs: int) -> float:
    """Seconds that `all_measured` takes, on a machine that does nothing else."""
    seconds = {part: expected_seconds(part, before, speed) for part in parts}
    others = [taken for part, taken in seconds.items() if not ROWS[part.row].alone]
    return sum(seconds.values()) - sum(others) + max(sum(others) / jobs, max(others, default=0.0))


def operations_per_second() -> float:
    """Floating point operations that one thread of this machine does in a second, in float32, of a large matrix product."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.randn(1024, 1024)
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return 2 * 1024**3 / min(times)


def accelerator() -> str | None:
    """The device that an accelerator is called by; None where there is none."""
    import torch

    return "cuda" if torch.cuda.is_available() else None


def _reason(code: int, said: str) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed; there may not be enough memory"
    lines = said.strip().splitlines()
    return one_line(lines[-1], 200) if lines else f"its process ended with {code}"
