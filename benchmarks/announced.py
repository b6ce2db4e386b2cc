"""`python -m benchmarks.announced [CHECKPOINT ...]`: what an analysis is announced to cost beside what it costs.

Every number is from a process of its own.

    time      CPU seconds of one thread, from the announcement to the page; the estimate's clock is that of the process too
    memory    the most that the process ever held, loading included, beside the announced
    inspect   CPU seconds of `repo-interp inspect` over those of importing torch and transformers, with its model classes
    loading   the most that was held while loading, above what was held before, over the bytes of the weights

`1b` is made here: the shape of OLMo-2-1B with RePo from layer 5 on and random weights in bfloat16, 3 GB, in a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

DEFAULTS = ("niah/repo", "language/rope", "smollm2-135m")
ONE_BILLION = "1b"
_LARGE = 50e6
"""Parameters below which what the libraries hold hides the weights while loading."""
_IMPORTS = "import torch, transformers; from transformers import AutoModelForCausalLM, LlamaForCausalLM"


def main() -> None:
    """Measure every checkpoint in processes of its own and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.announced", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "checkpoints", nargs="*", default=DEFAULTS, help=f"names, directories, or {ONE_BILLION} (default: %(default)s)"
    )
    parser.add_argument("--count", type=int, default=4, help="prompts (default: 4)")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a prompt (default: 512)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--child", choices=("analyze", "inspect", "import", "make"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        child = {"analyze": _analyze, "inspect": _inspect, "import": _import, "make": _make}[asked.child]
        sys.stdout.write(json.dumps(child(asked)) + "\n")
        return
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {name: name for name in asked.checkpoints if _is_at_hand(name, console)}
        if ONE_BILLION in checkpoints:
            checkpoints[ONE_BILLION] = folder
            _child("make", folder, asked)
        console.print(_table({name: _measured(place, asked) for name, place in checkpoints.items()}, asked))
    console.print(
        "Announced to be within 25 % in time and 10 % in memory; inspect at most 1.5 imports; loading at most 1.15 weights."
    )


def _is_at_hand(name: str, console: Console) -> bool:
    """Whether a checkpoint can be loaded; a packaged model that was not fetched is said and left out."""
    from repo_interp.errors import InputError
    from repo_interp.models.fetched import fetched_directory

    try:
        fetched_directory(name)
    except InputError as error:
        console.print(f"left out: {error}", highlight=False)
        return False
    return True


def _measured(checkpoint: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Numbers of one checkpoint, from three processes."""
    inspecting, importing = (_child(what, checkpoint, asked)["seconds"] for what in ("inspect", "import"))
    return {**_child("analyze", checkpoint, asked), "inspect": inspecting / importing}


def _table(measured: dict[str, dict[str, Any]], asked: argparse.Namespace) -> Table:
    title = f"up to {asked.length} tokens, {asked.count} prompts, {asked.dtype}, default measures, with figures and page"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ("checkpoint", "M", "s said", "s", "ratio", "GiB said", "GiB", "ratio", "loading", "inspect")
    for name in columns:
        table.add_column(name, justify="left" if name == "checkpoint" else "right", no_wrap=True)
    for name, one in measured.items():
        seconds, memory = (one["announced"], one["seconds"]), (one["announced_bytes"] / 2**30, one["bytes"] / 2**30)
        cells = [f"{seconds[0]:.0f}", f"{seconds[1]:.0f}", f"{seconds[0] / seconds[1]:.2f}"]
        cells += [f"{memory[0]:.2f}", f"{memory[1]:.2f}", f"{memory[0] / memory[1]:.2f}"]
        loading = f"{one['loading']:.2f}" if one["parameters"] > _LARGE else "-"
        table.add_row(name, f"{one['parameters'] / 1e6:.3g}", *cells, loading, f"{one['inspect']:.2f}")
    return table


def _child(what: str, checkpoint: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What a fresh process of ours says about one checkpoint."""
    options = ["--child", what, "--count", str(asked.count), "--length", str(asked.length), "--dtype", asked.dtype]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.announced", checkpoint, *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


# ---- in a process of its own ----------------------------------------------------------------------------------------


def _analyze(asked: argparse.Namespace) -> dict[str, Any]:
    """As `repo-interp analyze` does it: the announcement, the run, figures and page, in CPU seconds; and memory."""
    import torch

    torch.set_num_threads(1)
    time.perf_counter = time.process_time  # the estimate's clock: this machine may do other things too
    from benchmarks.cost import cost, forget, resident
    from repo_interp.analysis.analyze import analyze, default_measures, measures_named
    from repo_interp.analysis.cost import estimate
    from repo_interp.cli.drawing import drawing_seconds
    from repo_interp.models.load import load
    from repo_interp.models.reposition import layout
    from repo_interp.plots.pages.report import write_report

    (checkpoint,) = asked.checkpoints
    loaded: list[Any] = []
    forget()
    loading = cost(lambda: loaded.append(load(checkpoint, dtype=asked.dtype))).megabytes
    (bridge,) = loaded
    prompts = _prompts(bridge, asked)
    measures = measures_named(default_measures(prompts, layout(bridge)))
    announced = estimate(bridge, prompts, measures)
    announced = replace(announced, seconds=announced.seconds + drawing_seconds([measure.name for measure in measures]))
    before = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = analyze(bridge, prompts, measures)
        write_report(run, Path(folder) / "report.html", Path(folder) / "figures")
    weights = list({parameter.data_ptr(): parameter for parameter in bridge.original_model.parameters()}.values())
    return {
        "announced": announced.seconds,
        "seconds": time.process_time() - before,
        "announced_bytes": announced.bytes,
        "bytes": max(resident("VmHWM"), loading) * 2**20,
        "parameters": sum(parameter.numel() for parameter in weights),
        "loading": loading * 2**20 / sum(parameter.numel() * parameter.element_size() for parameter in weights),
    }


def _prompts(bridge: Any, asked: argparse.Namespace) -> list[Any]:
    """Random tokens with a needle and a generated token, as many as the checkpoint was trained on at most."""
    import numpy as np

    from repo_interp.models.provenance import length_trained
    from repo_interp.tasks import Prompt

    length = min(asked.length, length_trained(bridge))
    drawn = np.random.default_rng(0).integers(3, bridge.cfg.d_vocab, (asked.count, length))
    spans = {"needle": tuple(range(length // 3, length // 3 + 3)), "query": (length - 3, length - 2)}
    return [Prompt(tokens=tuple(row.tolist()), spans=spans, generated=(length - 1,)) for row in drawn]


def _inspect(asked: argparse.Namespace) -> dict[str, Any]:
    from contextlib import redirect_stdout
    from io import StringIO

    from repo_interp.cli import main as command

    with redirect_stdout(StringIO()):
        command(["inspect", *asked.checkpoints])
    return {"seconds": time.process_time()}


def _import(asked: argparse.Namespace) -> dict[str, Any]:
    exec(_IMPORTS)
    return {"seconds": time.process_time()}


def _make(asked: argparse.Namespace) -> dict[str, Any]:
    """A checkpoint of random weights in the shape of OLMo-2-1B (allenai/OLMo-2-0425-1B), RePo from layer 5 on."""
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM
    from transformers.initialization import no_init_weights

    from repo_interp.models.checkpoints import save
    from repo_interp.models.reposition import reposition

    config = Olmo2Config(
        vocab_size=100352, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with no_init_weights():
        model = reposition(Olmo2ForCausalLM(config).eval(), "repo@5")
    drawn = 0.02 * torch.randn(
        2**21, generator=torch.Generator().manual_seed(0)
    )  # the same few million again and again: quickly made
    for parameter in model.parameters():
        count = parameter.numel()
        values = (
            drawn.repeat(-(-count // len(drawn)))[:count].view_as(parameter)
            if parameter.dim() > 1
            else torch.ones_like(parameter)
        )
        parameter.data.copy_(values)
    save(model, asked.checkpoints[0])
    return {}


if __name__ == "__main__":
    main()
