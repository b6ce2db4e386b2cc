"""`python -m repo_interp.benchmark.child PART FOLDER RESULT`: one part, in a process of its own; its lines as JSON in the file RESULT.

The file is there when all is well, and only then. The process ends with the one that began it, however that one ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from threading import Thread

from repo_interp.benchmark.cost import Cost
from repo_interp.benchmark.parts import Part, measure
from repo_interp.files import write_text


def main(part: str, folder: str, result: str) -> None:
    """Measure and write."""
    begun = time.perf_counter()
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    chosen = Part(**json.loads(part))
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(chosen.threads)
    lines = measure(chosen, Path(folder))
    whole = Cost(_cpu_seconds(), time.perf_counter() - begun, _largest())
    write_text(result, json.dumps({"lines": [asdict(line) for line in lines], "whole": asdict(whole)}))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _cpu_seconds() -> float:
    """User and system seconds of this process and those that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _largest() -> float:
    """Megabytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main(*sys.argv[1:])
