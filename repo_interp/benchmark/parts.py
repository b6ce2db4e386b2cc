"""What can be measured, and what comes of it.

    Part    a kind of row, what it is about, tokens, device and precision: measured in a process of its own, kept as a whole
    Line    one thing that was measured of it: seconds, memory, and the line beside which it is to be read

Parts of a kind are measured by one function `lines(part, folder)`, in a module that is imported in the part's process alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from repo_interp.benchmark.cost import Cost

SMOLLM2, OLMO2, NIAH = "smollm2-135m", "olmo-2-1b", "niah/repo"
FORWARD, ALL = "forward pass", "all measures"
STOCK = "forward pass of the stock model"
WITH_ALL, WITH_DEFAULT = f"{FORWARD} and {ALL}", f"{FORWARD} and measures by default"
WEIGHTS, LOAD = "weights", "load"
IMPORT, INSPECT = "import torch, transformers and model classes", "repo-interp inspect"
ANALYSIS, ANNOUNCED = "analysis, figures and page", "announced"
PROCESS = "the process"
LIMITS = TRANSFORMS, PRODUCTS, MEMORY = "limit: transforms", "limit: products of matrices", "limit: memory"
"""What lines are called that others are read beside, or that have a bar."""


@dataclass(frozen=True)
class Shape:
    """The size of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    layout: str
    """Which layers assign positions how: RoPE as released, RePo from a third of the layers on as in its paper."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of the linear maps of a layer."""
        d_head = self.width // self.heads
        return 2 * self.width * d_head * (self.heads + self.kv_heads) + 3 * self.width * self.intermediate

    @property
    def parameters(self) -> int:
        """Parameters of the whole, about; embeddings are counted once where the model of this size ties them."""
        return self.layers * self.layer_parameters + (1 if self.vocabulary < 2**16 else 2) * self.vocabulary * self.width

    def layer_operations(self, tokens: int) -> float:
        """Floating point operations of a layer's forward pass, with causal attention: 2 P n + 2 d n^2."""
        return 2.0 * self.layer_parameters * tokens + 2.0 * self.width * tokens**2


SHAPES = {
    SMOLLM2: Shape(30, 576, 9, 3, 1536, 49_152, "rope"),
    OLMO2: Shape(16, 2048, 16, 16, 8192, 100_352, "repo@5"),
}
TINY = Shape(2, 32, 2, 2, 64, 128, "repo@1")
"""For tests: seconds, not minutes."""


@dataclass(frozen=True)
class Part:
    """What is measured together, in a process of its own."""

    row: str
    subject: str
    tokens: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1

    @property
    def name(self) -> str:
        """What it is called in the table, and told by from others."""
        tokens = f"{self.tokens:,} tokens, " if self.tokens else ""
        return f"{self.row}: {self.subject}, {tokens}{self.device} {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Line:
    """One thing that was measured of a part."""

    what: str
    cost: Cost
    beside: str = ""
    """The line of the same part that it is to be compared with; empty: none."""
    operations: float = math.nan
    """Floating point operations, where they are known."""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A kind of part."""

    title: str
    about: str
    """What its lines say, for the page."""
    lines: str
    """The function that measures a part, as module:name within `repo_interp.benchmark`."""
    subjects: tuple[str, ...]
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Tokens by subject; none where prompts play no part."""
    accelerated: bool = False
    """Whether it is measured on an accelerator too."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Precision on the CPU by subject, where it is not float32."""
    alone: bool = False
    """Whether nothing else is measured beside it: it is about tenths of a second."""


TEXTBOOK_UP_TO = 4096
"""Tokens up to which the textbook way is measured: its solve takes n^3."""
ROWS: dict[str, Row] = {
    "layer": Row(
        "One layer",
        "Every measure on one layer of this shape (random weights, learned positions), beside the layer's own forward pass and, up to "
        f"{TEXTBOOK_UP_TO:,} tokens, the textbook way, which makes every n x n map; a part of it is made and its time multiplied, as the "
        "note says. Memory is beyond the inputs.",
        "layer:lines",
        (OLMO2,),
        {OLMO2: (512, 1024, 2048, 4096, 8192, 16384)},
        accelerated=True,
        alone=True,
    ),
    "model": Row(
        "Whole models",
        "`analyze` of one prompt - forward pass, measures, labels, run - beside the model's own forward pass without its unembedding. "
        "Random weights in these shapes. Memory is beyond the model.",
        "models:lines",
        (SMOLLM2, OLMO2),
        {SMOLLM2: (512, 1024, 2048, 4096), OLMO2: (2048, 4096)},
        accelerated=True,
    ),
    "patterns": Row(
        "Beside TransformerLens",
        "TransformerLens' `run_with_cache` of all attention patterns, and `analyze` with the measures that patterns are looked at for: "
        "where tokens look, and how much of it falls on spans. The same random weights in both.",
        "models:pattern_lines",
        (SMOLLM2,),
        {SMOLLM2: (512, 2048)},
    ),
    "loading": Row(
        "Loading",
        "`ri.load` of a checkpoint: memory at the peak beside the bytes of its weights.",
        "commands:loading_lines",
        (SMOLLM2, OLMO2),
        dtypes={OLMO2: "bfloat16"},
    ),
    "inspect": Row(
        "`repo-interp inspect`",
        "The command as a process, beside a process that imports torch and transformers with its model classes.",
        "commands:inspect_lines",
        (NIAH, SMOLLM2),
    ),
    "analysis": Row(
        "`repo-interp analyze`",
        "An analysis of four prompts with the measures that it takes by itself, figures and page, beside what it was announced to cost; "
        "and of the first quarter of the layers (`--layers`). Memory is all that the process ever held, loading included.",
        "commands:analysis_lines",
        (NIAH, SMOLLM2, OLMO2),
        {NIAH: (256,), SMOLLM2: (512,), OLMO2: (256,)},
        dtypes={OLMO2: "bfloat16"},
    ),
    "long": Row(
        "Long prompts",
        "`analyze` of one prompt of 16,384 tokens with all measures; memory is all that the process ever held, the model included.",
        "models:long_lines",
        (SMOLLM2, OLMO2),
        {SMOLLM2: (16384,), OLMO2: (4096, 16384)},
        dtypes={OLMO2: "bfloat16"},
    ),
}


def parts(rows: Sequence[str], lengths: Sequence[int] = (), accelerator: str | None = None, threads: int = 1) -> Iterator[Part]:
    """The parts of `rows`, and those on an accelerator where there is one.

    `lengths`: tokens in place of each row's own, where prompts play a part.
    """
    for name in rows:
        row = ROWS[name]
        for subject in row.subjects:
            for tokens in (lengths or row.lengths[subject]) if row.lengths else (0,):
                part = Part(name, subject, tokens, "cpu", row.dtypes.get(subject, "float32"), threads)
                yield part
                if row.accelerated and accelerator is not None:
                    for dtype in ("float32", "bfloat16"):
                        yield replace(part, device=accelerator, dtype=dtype)


def measure(part: Part, folder: Path) -> list[Line]:
    """The lines of `part`, measured in this process; `folder` is for checkpoints that several parts need."""
    module, _, name = ROWS[part.row].lines.partition(":")
    function: Callable[[Part, Path], list[Line]] = getattr(import_module(f"repo_interp.benchmark.{module}"), name)
    return function(part, folder)


def textbook_of(measure: str) -> str:
    """What the line of the textbook way of `measure` is called."""
    return f"{measure}, textbook"


def shape_of(subject: str) -> Shape:
    """The shape called `subject`."""
    return SHAPES.get(subject, TINY)
