"""What one of two launched processes does in tests/test_processes.py: commands, an API call that one of them does not survive."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import repo_interp as ri
from repo_interp import processes
from repo_interp.cli import main


def prompts(bridge):
    """Prompts of several lengths, more than there are processes."""
    from repo_interp.analysis.score import task_of

    task = task_of(bridge)
    return [prompt for name in ("96", "128") for prompt in task.prompts(4, seed=2, test_set=name)]


def run(arguments: list[str]) -> None:
    """The commands of `arguments`, then an analysis during which the second process is killed."""
    directory, commands = Path(arguments[0]), json.loads(arguments[1])
    with processes.together():
        codes = [main([word.replace("RANK", os.environ["RANK"]) for word in command]) for command in commands]
        (directory / f"codes-{os.environ['RANK']}.json").write_text(json.dumps(codes))
        first = processes.from_first(lambda: os.environ["RANK"])
        shared = processes.spread(list("abc"), lambda letter: letter * 2 + str(processes.count()))
        (directory / f"shared-{os.environ['RANK']}.json").write_text(json.dumps([first, shared]))
        bridge = ri.zoo("niah/rope")

        def die(done: int, total: int) -> None:
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            ri.analyze(bridge, prompts(bridge), ["positions", "components"], store=directory / "store", progress=die)
        except processes.Deserted as deserted:
            (directory / "deserted").write_text(str(deserted))


if __name__ == "__main__":
    run(sys.argv[1:])
