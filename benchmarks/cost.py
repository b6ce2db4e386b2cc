"""`python -m benchmarks.cost [PART ...]`: what everything costs, as a table and a page in
figures/bench.

The parts are those of cost.toml. Every part measures in one process what its rows are compared with: a ratio of two rows of a part
holds on other machines too. docs/bench.md says how to read the table. A minute or two: `make bench
PARTS="layer/512 commands/niah"`. With a GPU, and without one what can be counted: `make bench
PARTS=accelerator`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch.utils._python_dispatch import TorchDispatchMode

import repo_interp as ri
from benchmarks.launches import KINDS, Call, of_one_layer
from benchmarks.peers import SILENT, peers  # noqa: F401 - a part, by its name
from benchmarks.process_memory import resident
from benchmarks.running import (
    ENVIRONMENT,
    Cost,
    Frame,
    Row,
    cost,
    read_parts,
    read_toml,
    row,
    run,
    sections,
    time_command,
)
from benchmarks.shapes import SHAPES, bridged, checkpoint_of, model_of, operations, prompt_of
from benchmarks.textbook import textbook_rows
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.preparation import reproducible
from position_papers.training.step import make_optimizer, take_step
from repo_interp.analysis.batches import make_batches
from repo_interp.analysis.defaults import default_measures, default_prompts
from repo_interp.experiments.responses import to_question
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import message
from repo_interp.inputs import AttentionInputs, Spans
from repo_interp.measures.border import precompute
from repo_interp.measures.fitting import Layers
from repo_interp.measures.measure_catalogue import measure_named
from repo_interp.measures.positions import Positions
from repo_interp.measures.statistics import Statistics
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.tasks import Batch

COLUMNS = (
    "what",
    "beside",
    "cpu_seconds",
    "wall_seconds",
    "megabytes",
    "operations",
    *KINDS,
    "note",
)
FORWARD, ALL = "forward pass", "all measures"
CHEAP_NAMES = ("positions", "patterns", "attention_mass")
STOCK, CHEAP, PATTERNS_CACHED = (
    "forward pass of transformers",
    ", ".join(CHEAP_NAMES),
    "run_with_cache of patterns",
)
TEXTBOOK_UP_TO = 4096
"""Tokens up to which the textbook way is measured: its solve takes n^3."""
EVERY = 200
"""Steps between two measurements of `ri.PositionsCallback`, by default."""
NAMES = (
    "positions",
    "patterns",
    "attention_mass",
    "components",
    "three_axis",
    "fake_distance",
    "rotation",
)
"""All measures that a whole prompt is reduced by; others look at some rows, or are taken when
named.
"""
_TRAINED = {"training_length": 4096}
OPTIONS = {
    "components": _TRAINED,
    "rotation": _TRAINED,
    "three_axis": {"extras": ()},
    "fake_distance": {"axes": "none"},
}


def layer(given: Namespace, tokens: int, subject: str = "olmo-2-1b layer") -> Iterator[Row]:
    """One layer of OLMo-2-1B's shape: every measure beside the layer's own forward pass, and the
    textbook way beside the measure.
    """
    config, layout = SHAPES[subject]
    prompt = prompt_of(tokens, config.vocab_size)
    (batch,) = make_batches([prompt], 1)
    stock: Any = model_of(config)
    repeats, measures = 1 if tokens > TEXTBOOK_UP_TO else 2, _measures()
    with torch.inference_mode():
        own_pass = cost(lambda: stock.model(input_ids=batch.tokens, use_cache=False), repeats)
        yield row(FORWARD, **own_pass, operations=operations(config, tokens))
        captured: list[Any] = []
        capture(
            as_decoder(bridged(stock, layout, prompt)[0]),
            batch.tokens,
            batch.valid,
            torch.arange(1),
            captured.append,
        )

        def together() -> object:
            afresh = replace(captured[-1])  # a copy remembers nothing of what was made before
            precompute(measures, afresh, batch.spans)
            return [measure.observe(afresh, batch.spans) for measure in measures]

        for measure in measures:
            spent = cost(
                lambda measure=measure: measure.observe(replace(captured[-1]), batch.spans), repeats
            )
            yield row(measure.name, FORWARD, **spent)
        yield row(ALL, FORWARD, **cost(together, repeats))
        if tokens <= TEXTBOOK_UP_TO:
            yield from textbook_rows(captured[-1], batch.spans)


def model(given: Namespace, subject: str, tokens: int, dtype: str = "float32") -> Iterator[Row]:
    """Whole models, random weights: `analyze` of one prompt beside the model's own forward pass
    without its unembedding.
    """
    config, layout = SHAPES[subject]
    prompt = prompt_of(tokens, config.vocab_size)
    made, own_pass = bridged(model_of(config, dtype), layout, prompt)
    ri.analyze(made, [prompt_of(64, config.vocab_size)])  # what is imported and made once
    yield row(FORWARD, **cost(own_pass), operations=operations(config, tokens))
    yield row(
        f"{FORWARD} and {ALL}", FORWARD, **cost(lambda: ri.analyze(made, [prompt], _measures()))
    )
    if tokens <= 2048 and subject != "olmo-2-1b":  # elsewhere minutes more
        spent = cost(lambda: ri.analyze(made, [prompt]))
        yield row(f"{FORWARD} and measures by default", FORWARD, **spent)
    yield row(
        "the process",
        megabytes=resident("VmHWM"),
        note="all that it held since the row above began",
    )


def prompt(given: Namespace, subject: str) -> Iterator[Row]:
    """`analyze` of one prompt of a small model, where what every analysis does once counts most,
    beside the model's own forward pass; in turns, the least of many calls.
    """
    made: Any = ri.open_model(subject)
    prompts, _ = default_prompts(as_decoder(made), 1)
    ids = torch.tensor([prompts[0].tokens])
    calls = {FORWARD: partial(made, input_ids=ids, use_cache=False)}
    for what, measures in (("positions", ["positions"]), (ALL, _measures())):
        calls[f"analyze, {what}"] = partial(ri.analyze, made, prompts, measures, **SILENT)
    with torch.no_grad():
        for what, spent in zip(calls, _in_turns([*calls.values()], 10), strict=True):
            note = f"{len(prompts[0].tokens)} tokens"
            yield row(what, "" if what == FORWARD else FORWARD, **spent, note=note)


def operators(given: Namespace, tokens: int, subject: str = "olmo-2-1b layer") -> Iterator[Row]:
    """Operators that one analysis of one layer dispatches, with the memory of an accelerator
    allowed; counted on the processor.
    """
    for what, call in _passes(subject, tokens):
        if what in (FORWARD, PATTERNS_CACHED):
            continue
        with torch.no_grad(), ri.working_memory(2**31), Operators() as seen:
            call()
        own_pass = what == STOCK
        yield row(FORWARD if own_pass else what, "" if own_pass else FORWARD, operators=seen.count)


class _Nothing(Positions):
    """A measure that reads nothing of a layer. One of ours by its name: others get copies."""

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Nothing."""
        return Statistics()

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """An empty group."""
        return xr.Dataset()


BARE = "analysis that measures nothing"
DEFAULTS = ("attention_rows", "predictions", "octaves", "position_sources")
"""What an analysis measures unasked, beside those in `NAMES`."""
SOLVED = "three_axis, default extras"


def launches(given: Namespace, tokens: int, subject: str = "olmo-2-1b layer") -> Iterator[Row]:
    """What one more layer asks of an emulated card: its forward pass, an analysis that measures
    nothing (checks, checksums), every measure beyond that, and measures together, forward pass
    included; and what a call asks beside its layers.
    """
    base: Counter[str] = Counter()
    for what, layer, rest in of_one_layer(subject, tokens, _analyses):
        base = layer if what == BARE else base
        alone = what in {*NAMES, *DEFAULTS, SOLVED}
        counts: dict[str, Any] = {
            kind: layer[kind] - (base[kind] if alone else 0) for kind in KINDS
        }
        note = "beyond the row beside" if alone else "one more layer"
        yield row(what, BARE if alone else "", **counts, note=note)
        if not alone:
            of_call: dict[str, Any] = {kind: rest[kind] for kind in KINDS}
            yield row(f"{what}: the call", **of_call)


def _analyses(model: Any, prompt: Any, own_pass: Call) -> dict[str, Call]:
    """The calls that `launches` counts."""
    seven = _measures()
    solved = measure_named("three_axis")
    default = [solved if measure.name == "three_axis" else measure for measure in seven]
    groups = {BARE: [_Nothing()]} | {measure.name: [measure] for measure in seven}
    groups |= {SOLVED: [solved]} | {name: [measure_named(name)] for name in DEFAULTS}
    groups |= {"seven measures": seven, "seven, default extras": default}
    names = default_measures([prompt], Layers(("repo",)))
    groups |= {"measures by default": [measure_named(name) for name in names]}
    calls = {
        name: partial(ri.analyze, model, [prompt], some, experiments=(), **SILENT)
        for name, some in groups.items()
    }
    atlas = ri.experiments.Atlas(sequences=2, twins=0)
    scored = partial(ri.analyze, model, [prompt], (), experiments=[atlas], **SILENT)
    return {FORWARD: own_pass} | calls | {"atlas, 2 sequences, no twin": scored}


def _passes(
    subject: str, tokens: int, dtype: str = "float32", place: str = "cpu"
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Passes of a prompt through one model by row, each to be made before the next is asked for:
    the stock model's, ours, ours with measures, and TransformerLens' with its cache.
    """
    config, layout = SHAPES[subject]
    prompt, stocked = prompt_of(tokens, config.vocab_size), model_of(config, dtype)
    stocked: Any = stocked.to(torch.device(place))  # pyright: ignore[reportArgumentType]
    ids = torch.tensor([prompt.tokens], device=place)
    yield STOCK, partial(stocked.model, input_ids=ids, use_cache=False)
    made, own_pass = bridged(stocked, layout, prompt)
    yield FORWARD, own_pass
    for what, measures in (
        (CHEAP, [measure_named(name) for name in CHEAP_NAMES]),
        (ALL, _measures()),
    ):
        yield f"{FORWARD} and {what}", partial(ri.analyze, made, [prompt], measures, **SILENT)
    cached: Any = made.run_with_cache
    patterns = {"names_filter": lambda name: name.endswith("hook_pattern"), "return_type": None}
    yield PATTERNS_CACHED, partial(cached, ids, **patterns)


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched while it lasts."""

    count = 0

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        arguments: tuple = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Run `operator`."""
        self.count += 1
        return operator(*arguments, **(keywords or {}))


def accelerator(
    given: Namespace, subject: str, tokens: int, dtype: str, device: str | None = None
) -> Iterator[Row]:
    """Whole models, random weights, on an accelerator: seconds by the clock until it is done, the
    least of three after one to warm up, and the most memory of the device beside the weights.

    Our pass beside the stock model's; TransformerLens' cache of all patterns. Without an
    accelerator nothing is measured, and the rows say so. `operators` are counted anywhere: those
    that one analysis of one layer of OLMo-2-1B's shape dispatches, each of which costs an
    accelerator 5 to 10 microseconds whatever its size.
    """
    place = device or next(
        (kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()), None
    )
    whats = (STOCK, FORWARD, f"{FORWARD} and {CHEAP}", f"{FORWARD} and {ALL}", PATTERNS_CACHED)
    beside: dict[str, str] = dict(zip(whats, ("", STOCK, FORWARD, FORWARD, FORWARD), strict=True))
    if place is None:
        why = f"not measured: this needs an accelerator, and none is here ({dtype})"
        yield from (row(what, note=why) for what in whats)
        return
    module = torch.get_device_module(place)
    name = module.get_device_name() if hasattr(module, "get_device_name") else place

    def spent(what: str, call: Callable[[], object]) -> Row:
        try:
            call()
            for reset in ("empty_cache", "reset_peak_memory_stats"):
                getattr(module, reset, lambda: None)()
            held, seconds = getattr(module, "memory_allocated", lambda: math.nan)(), []
            for _ in range(3):
                began = time.perf_counter()
                call()
                module.synchronize()
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            return row(what, beside[what], note=f"out of memory, {name}")
        peak = (getattr(module, "max_memory_allocated", lambda: math.nan)() - held) / 2**20
        note = f"{dtype}, {name}"
        return row(what, beside[what], wall_seconds=min(seconds), megabytes=peak, note=note)

    for what, call in _passes(subject, tokens, dtype, place):
        done = {"operations": operations(SHAPES[subject][0], tokens)} if what == FORWARD else {}
        with torch.inference_mode(what in (STOCK, PATTERNS_CACHED)):  # analyze decides by itself
            done |= spent(what, call)
        yield done


def stock(given: Namespace, subject: str, tokens: int = 512) -> Iterator[Row]:
    """Our forward pass beside the stock model's, with the same random weights; and 32 tokens
    generated with a key-value cache.
    """
    config, _ = SHAPES[subject]
    theirs, ours = model_of(config).eval(), with_layout(model_of(config), None).eval()
    prompt = torch.tensor([prompt_of(tokens, config.vocab_size).tokens])
    options = {
        "max_new_tokens": 32,
        "min_new_tokens": 32,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
    }

    def passed(model: Any) -> object:
        return model(input_ids=prompt, use_cache=False)

    def generated(model: Any) -> object:
        return model.generate(prompt, **options)

    with torch.inference_mode():
        for what, call in ((FORWARD, passed), ("32 tokens", generated)):
            both = _in_turns([partial(call, model) for model in (theirs, ours)], 2)
            yield row(f"{what} of transformers", **both[0])
            yield row(what, f"{what} of transformers", **both[1])


def _in_turns(calls: Sequence[Callable[[], object]], repeats: int = 1) -> list[Cost]:
    """The least that every call costs, of three times in turns: clocks drift."""
    spent = [[cost(call, repeats) for call in calls] for _ in range(3)]
    return [min(costs, key=lambda each: each["cpu_seconds"]) for costs in zip(*spent, strict=True)]


def training(given: Namespace, subject: str, tokens: int = 512) -> Iterator[Row]:
    """A training step, and what `ri.PositionsCallback` adds to it by default: one measurement of
    four prompts in 200 steps, written.
    """
    config, _ = SHAPES[subject]
    trained = model_of(config).train()
    optimiser = torch.optim.AdamW(trained.parameters())
    batch = torch.tensor(
        [prompt_of(tokens - number, config.vocab_size).tokens[: tokens - 4] for number in range(4)]
    )
    prompts = [prompt_of(256 - number, config.vocab_size) for number in range(4)]

    def step() -> None:
        trained(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    yield row("training step", **cost(step, 2), note=f"4 x {tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        spent = cost(lambda: ri.training_scalars(ri.measure_step(trained, 1, prompts, folder)), 2)
    each = {name: spent[name] / EVERY for name in ("cpu_seconds", "wall_seconds")}
    yield row("measuring", "training step", **spent, note="4 prompts of 256 tokens")
    note = f"one of {EVERY} steps"
    yield row("measuring, per step", "training step", **spent | each, note=note)


def step(
    given: Namespace, subject: str, tokens: int = 512, layouts: Sequence[str] = ("rope", "repo@1/3")
) -> Iterator[Row]:
    """A step of `repo-interp train` on two sequences, with a position scheme attached and the loss
    in parts, beside the stock model's step with its own loss: the same weights, AdamW, clipping.
    """
    config, _ = SHAPES[subject]
    configuration = TrainingConfiguration(task="language")
    batch = np.array([prompt_of(tokens, config.vocab_size).tokens] * 2)
    asked = np.arange(tokens) > np.zeros((2, 1))
    question, labels = to_question(Batch(batch, asked)), torch.from_numpy(batch)

    def ours(model: Any, optimiser: Any) -> None:
        rate, clip = configuration.learning_rate, configuration.clip
        take_step(model, optimiser, [question], rate, clip)

    def theirs(model: Any, optimiser: Any) -> None:
        optimiser.zero_grad()
        model(input_ids=labels, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), configuration.clip)
        optimiser.step()

    stepped, calls = "step of transformers", []
    for layout in (None, *layouts):
        made: Any = model_of(deepcopy(config))  # a layout changes the configuration
        made = made if layout is None else with_layout(made, layout)
        call = partial(
            ours if layout else theirs, made.train(), make_optimizer(made, configuration)
        )
        calls.append((f"step, {layout}" if layout else stepped, call))
    with reproducible(configuration):
        for _, call in calls:
            call()  # AdamW makes its state
        costs = _in_turns([call for _, call in calls])
    for (what, _), least in zip(calls, costs, strict=True):
        beside = "" if what == stepped else stepped
        yield row(what, beside, **least, note=f"2 x {tokens} tokens")


def loading(given: Namespace, subject: str, dtype: str = "float32") -> Iterator[Row]:
    """`ri.load`: memory at the peak beside the bytes of the weights."""
    assert ri.load  # imported before memory is measured
    with tempfile.TemporaryDirectory() as folder:
        directory, loaded = checkpoint_of(subject, dtype, folder), []
        spent = cost(lambda: loaded.append(ri.load(directory, dtype=dtype)))
    weights = {
        parameter.data_ptr(): parameter for parameter in loaded[0].original_model.parameters()
    }.values()
    size = sum(parameter.numel() * parameter.element_size() for parameter in weights)
    yield row("weights", megabytes=size / 2**20, note=dtype)
    yield row("load", "weights", **spent)


def commands(
    given: Namespace, subject: str, dtype: str = "float32", tokens: int = 256
) -> Iterator[Row]:
    """Imports and commands as processes of their own, beside a process that imports torch and
    transformers with its model classes.
    """
    libraries = "import torch and transformers"
    code = (
        "import torch, transformers; from transformers import AutoModelForCausalLM, "
        "LlamaForCausalLM"
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, prompts = checkpoint_of(subject, dtype, folder), f"{folder}/prompts.jsonl"
        ri.write_prompts([prompt_of(tokens - number, 100) for number in range(4)], prompts)
        commands = {
            libraries: f'-c "{code}"',
            "import repo_interp": '-c "import repo_interp"',
            "repo-interp --help": "-m repo_interp --help",
            "repo-interp inspect": f"-m repo_interp inspect {checkpoint}",
            "repo-interp analyze": f"-m repo_interp analyze {checkpoint} --prompts {prompts} "
            f"--dtype {dtype} --out {folder}/run",
        }
        about = f"4 prompts of {tokens} tokens, measures by default, figures and page"
        for what, words in commands.items():
            _, spent = time_command(words)
            beside = "" if what == libraries else libraries
            yield row(what, beside, **spent, note=about if "--prompts" in words else None)


def lines(
    given: Namespace, words: str, before: Sequence[str] = (), until: str = ""
) -> Iterator[Row]:
    """A command as a user types it, by the clock: its first line, and all of it; after those that
    it needs, and up to the line with `until` where it serves on.
    """
    as_typed = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    with tempfile.TemporaryDirectory() as folder:
        *_, (first, spent) = (
            time_command(f"-m repo_interp {typed.format(folder=folder)}", until, as_typed)
            for typed in (*before, words)
        )
        whole = "to its address" if until else "to its end"
        yield row("first line", whole, wall_seconds=first)
        yield row(whole, **spent, note=words)


def threads(given: Namespace, words: str) -> Iterator[Row]:
    """A command with the threads that it chooses and with two, on a quiet machine and beside five
    processes that never pause.
    """
    as_typed = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    busy = [sys.executable, "-c", "while True: pass"]
    for place, others in (("quiet", 0), ("beside five busy processes", 5)):
        with ExitStack() as stack:
            for _ in range(others):
                stack.callback(stack.enter_context(subprocess.Popen(busy)).kill)
            for name, flag in (("two threads", "--threads 2"), ("as typed", "")):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                typed = f"-m repo_interp {words.format(folder=folder)} {flag}"
                _, spent = time_command(typed, environment=as_typed)
                beside = f"{place}: two threads" if name == "as typed" else ""
                yield row(f"{place}: {name}", beside, **spent, note=words)


def page(given: Namespace, subject: str) -> Iterator[Row]:
    """`analyze` as a new user types it, as a process of its own; and the sizes of what it
    writes.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, spent = time_command(f"-m repo_interp analyze {subject} --out {folder}/run")
        yield row("repo-interp analyze", **spent)
        for name in ("report.html", "run.nc"):
            size = Path(folder, "run", name).stat().st_size
            yield row(name, megabytes=size / 2**20, note="on disk")


def explorer(
    given: Namespace, subject: str, edited: Sequence[int], tokens: int = 0
) -> Iterator[Row]:
    """The explorer beside a forward pass: the answer to a new edit in a layer; and in Chromium,
    where there is one, the page until its first paint and until all is drawn, and an edit from the
    click until it is drawn.

    `tokens` of a prompt that is made; 0: the model's own first prompt.
    """
    bridge = ri.load(subject)
    prompt = (
        prompt_of(tokens, bridge.cfg.d_vocab)
        if tokens
        else default_prompts(as_decoder(bridge))[0][0]
    )
    explored, values, last = Explored(bridge, [prompt]), count(1), len(prompt.tokens) - 2
    layers = bridge.cfg.n_layers

    def view(**asked: object) -> None:
        json.dumps(
            explored.answer(
                message({"ask": "view", "heads": [[layers - 1, 0]], "token": last, **asked})
            )
        )

    with torch.inference_mode():
        yield row(
            FORWARD,
            **cost(lambda: bridge(torch.tensor([prompt.tokens])), 3),
            note=f"{len(prompt.tokens)} tokens",
        )
    yield row("first view", FORWARD, **cost(view))
    for layer in edited:
        edit = {"kind": "frozen", "layer": layer}
        spent = cost(lambda edit=edit: view(edits=[{**edit, "value": float(next(values))}]), 3)
        yield row(
            f"edit in layer {layer}",
            FORWARD,
            **spent,
            note=f"{layers - layer} of {layers} layers run again",
        )
    yield from _in_browser(explored, edited)


_EDIT = """(async () => {{
  const edits = document.querySelector('section[aria-label=Edits]'), [where, , kind] = edits.querySelectorAll('select');
  const named = (text) => [...document.querySelectorAll('button')].find((one) => one.textContent === text);
  const drawn = (count) => new Promise((done) => {{
    const look = () => (document.querySelectorAll('.edits li').length === count ? done() : requestAnimationFrame(look));
    look();
  }});
  Object.assign(where, {{ value: 'layer:{layer}' }});
  Object.assign(kind, {{ value: 'frozen' }}).dispatchEvent(new Event('change'));
  edits.querySelector('input[type=number]').value = {value};
  const from = performance.now();
  named('Add edit').click();
  await drawn(1);
  const spent = performance.now() - from;
  named('Undo').click();
  await drawn(0);
  return spent / 1000;
}})()"""


def _in_browser(explored: Any, edited: Sequence[int]) -> Iterator[Row]:
    """Rows of the page itself; none without Chromium."""
    from chromium import Browser, executable
    from served import serving

    if (program := executable()) is None:
        return
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # Chromium still writes
    with serving(explored) as served, scratch as folder:
        browser = Browser(Path(folder), program)
        browser.size(1280, 900)
        began = time.perf_counter()
        browser.open(served.address)
        browser.wait("'alive' in document.getElementById('explorer').dataset")
        drawn = time.perf_counter() - began
        painted = (
            browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            / 1000
        )
        yield row("page, first paint", wall_seconds=painted)
        yield row("page, all drawn", FORWARD, wall_seconds=drawn)
        browser.run(
            "document.querySelector('section[aria-label=Continuation] input').click()"
        )  # no continuation after every change
        stops = (
            "[...document.querySelectorAll('button')].filter((one) => one.textContent === 'Stop')"
        )
        browser.run(f"{stops}.forEach((one) => one.click())")
        for layer in edited:
            spent = min(
                browser.run(_EDIT.format(layer=layer, value=3.25 + turn)) for turn in range(4)
            )
            yield row(f"edit in layer {layer}, until it is drawn", FORWARD, wall_seconds=spent)
        browser.close()


def _measures() -> list[Any]:
    return [replace(measure_named(name), **OPTIONS.get(name, {})) for name in NAMES]  # pyright: ignore[reportArgumentType]


PARTS = read_parts(read_toml(__file__)["parts"], globals())
BY_NAME = ("long", "accelerator")
"""Sections that run when they are named: 16,384 tokens take an hour, and not every machine has an
accelerator.
"""


def write_page(file: Path, table: Frame) -> None:
    """Write README.md beside the table; the same table gives the same bytes."""
    lines = [
        "# What it costs",
        "",
        f"Written by `make bench` from [{file.name}]({file.name}). "
        "`time ×` and `memory ×` are over the row named in `beside`, measured in the same process. "
        "[docs/bench.md](../../docs/bench.md) says how to read it.",
    ]
    lines += sections(table, with_ratios(table), PARTS)
    (file.parent / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def with_ratios(table: Frame) -> Frame:
    """The columns of the page: `time ×` and `memory ×` are over the row `beside`, empty where there
    is none.
    """
    other = table[["part", "beside"]].merge(
        table, how="left", left_on=["part", "beside"], right_on=["part", "what"]
    )
    other.index = table.index
    times = (table["cpu_seconds"] / other["cpu_seconds"]).fillna(
        table["wall_seconds"] / other["wall_seconds"]
    )
    ratios = {"time ×": times, "memory ×": table["megabytes"] / other["megabytes"]}
    shown = [
        "part",
        "what",
        "cpu_seconds",
        "wall_seconds",
        "megabytes",
        *(kind for kind in KINDS if kind in table),
    ]
    return table.assign(**ratios)[[*shown, *ratios, "beside", "note"]]


def main() -> None:
    """Measure."""
    parser = ArgumentParser(
        prog="python -m benchmarks.cost", description=(__doc__ or "").splitlines()[0]
    )
    run(parser, PARTS, COLUMNS, Path("figures/bench/bench.csv"), write_page, BY_NAME)


if __name__ == "__main__":
    main()
