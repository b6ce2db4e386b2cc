"""What commands cost, each in a process of its own, on checkpoints on a disk: loading, inspecting, analysing with figures and a page.

    loading    the most that was held while loading, above what was held before, beside the bytes of the weights
    inspect    CPU seconds of `repo-interp inspect` beside those of importing torch and transformers, with its model classes
    analysis   from the announcement to the page, beside the announced; the estimate's clock is CPU time too

A checkpoint that was fetched (`repo-interp fetch`) is taken as it is; else its shape is written with random weights, once per benchmark.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from repo_interp.benchmark.cost import Cost, cost, forget, resident
from repo_interp.benchmark.parts import ANALYSIS, ANNOUNCED, IMPORT, INSPECT, LOAD, SHAPES, WEIGHTS, Line, Part
from repo_interp.errors import InputError
from repo_interp.models.fetched import PACKAGED, fetched_directory
from repo_interp.shipped import means_zoo, zoo_path

_IMPORTS = "import torch, transformers; from transformers import AutoModelForCausalLM, LlamaForCausalLM"
_PROMPTS = 4


def checkpoint_of(part: Part, folder: Path) -> tuple[Path, str]:
    """The directory of the checkpoint of `part`, written into `folder` where it is not at hand, and where it is from."""
    if means_zoo(part.subject):
        return Path(zoo_path(part.subject)), "comes with the package"
    if part.subject in PACKAGED and part.dtype == "float32":
        try:
            fetched = fetched_directory(part.subject)
            assert fetched is not None
            return fetched, "released weights"
        except InputError:
            pass
    directory = folder / f"{part.subject}-{part.dtype}"
    if not (directory / "config.json").is_file():
        _in_a_process_of_its_own("_write_checkpoint", part.subject, part.dtype, str(directory))
    return directory, "random weights"


def loading_lines(part: Part, folder: Path) -> list[Line]:
    """What loading holds and takes, beside the weights."""
    directory, whence = checkpoint_of(part, folder)
    import torch

    import repo_interp.models.load
    from repo_interp.models.load import load

    assert repo_interp.models.load
    torch.set_num_threads(part.threads)
    loaded: list[Any] = []
    forget()
    spent = cost(lambda: loaded.append(load(directory, dtype=part.dtype)))
    weights = {parameter.data_ptr(): parameter for parameter in loaded[0].original_model.parameters()}.values()
    size = sum(parameter.numel() * parameter.element_size() for parameter in weights)
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return [
        Line(WEIGHTS, Cost(megabytes=size / 2**20), note=f"{stored / 2**20:,.0f} MB on the disk; {whence}"),
        Line(LOAD, spent, WEIGHTS, note="memory at the peak, above what was held before"),
    ]


def inspect_lines(part: Part, folder: Path) -> list[Line]:
    """What the command takes as a process, beside one that imports what it needs."""
    directory, whence = checkpoint_of(part, folder)
    importing = min((_process([sys.executable, "-c", _IMPORTS]) for _ in range(2)), key=lambda spent: spent.cpu_seconds)
    inspecting = _process([sys.executable, "-m", "repo_interp", "inspect", str(directory)])
    return [Line(IMPORT, importing), Line(INSPECT, inspecting, IMPORT, note=whence)]


def analysis_lines(part: Part, folder: Path) -> list[Line]:
    """As `repo-interp analyze` does it: the announcement, the run, figures and page, in CPU seconds; and memory."""
    directory, whence = checkpoint_of(part, folder)
    from repo_interp.analysis.analyze import analyze, default_measures, measures_named
    from repo_interp.analysis.cost import estimate
    from repo_interp.models.load import load
    from repo_interp.models.reposition import layout
    from repo_interp.plots.pages.duration import drawing_seconds
    from repo_interp.plots.pages.report import write_report

    bridge = load(directory, dtype=part.dtype)
    prompts = _prompts(bridge, part.tokens)
    names = default_measures(prompts, layout(bridge))
    measures = measures_named(names)
    clock, time.perf_counter = time.perf_counter, time.process_time  # for the estimate: this machine may do other things too
    announced = estimate(bridge, prompts, measures)
    announced = replace(announced, seconds=announced.seconds + drawing_seconds(names))
    time.perf_counter = clock
    runs: list[Any] = []
    reached = resident("VmHWM")
    measuring = cost(lambda: runs.append(analyze(bridge, prompts, measures)))
    reached = max(reached, resident("VmHWM"))
    with tempfile.TemporaryDirectory() as place:
        drawing = cost(lambda: write_report(runs[0], Path(place) / "report.html", Path(place) / "figures"))
    reached = max(reached, resident("VmHWM"))
    some = range(max(1, len(layout(bridge)) // 4))
    fewer = cost(lambda: analyze(bridge, prompts, [each for each in measures if not each.needs.predictions], layers=some))
    whole = replace(measuring + drawing, megabytes=reached)
    said = Cost(announced.seconds, announced.seconds, announced.bytes / 2**20)
    return [
        Line(ANALYSIS, whole, note=f"{_PROMPTS} prompts, {', '.join(names)}; {whence}"),
        Line(ANNOUNCED, said, ANALYSIS),
        Line("analysis alone", replace(measuring, megabytes=float("nan"))),
        Line("figures and page alone", replace(drawing, megabytes=float("nan"))),
        Line(f"analysis of layers 0-{some[-1]} alone", replace(fewer, megabytes=float("nan")), "analysis alone"),
    ]


def _prompts(bridge: Any, tokens: int) -> list[Any]:
    """Random tokens with a needle and a generated token, as many as the checkpoint was trained on at most."""
    import numpy as np

    from repo_interp.models.provenance import length_trained
    from repo_interp.tasks.prompt import Prompt

    length = min(tokens, length_trained(bridge))
    drawn = np.random.default_rng(0).integers(3, bridge.cfg.d_vocab, (_PROMPTS, length))
    spans = {"needle": tuple(range(length // 3, length // 3 + 3)), "query": (length - 3, length - 2)}
    return [Prompt(tokens=tuple(row.tolist()), spans=spans, generated=(length - 1,)) for row in drawn]


def _process(command: list[str]) -> Cost:
    """What a process costs as a whole, by what the system says of it when it has ended. Raises OSError where it fails."""
    begun = time.perf_counter()
    null = os.open(os.devnull, os.O_WRONLY)
    process = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
    os.close(null)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise OSError(f"{' '.join(command[1:4])} ended with {os.waitstatus_to_exitcode(status)}")
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - begun, usage.ru_maxrss / unit)


def _in_a_process_of_its_own(function: str, *arguments: str) -> None:
    """Call a function of this module there: what it holds is not held here."""
    _process([sys.executable, "-c", f"import sys; from {__name__} import {function} as f; f(*sys.argv[1:])", *arguments])


def _write_checkpoint(subject: str, dtype: str, directory: str) -> None:
    from repo_interp.benchmark.models import model_of_shape
    from repo_interp.models.checkpoints import save
    from repo_interp.models.reposition import reposition

    shape = SHAPES[subject]
    save(reposition(model_of_shape(shape, subject, dtype), shape.layout), directory)
