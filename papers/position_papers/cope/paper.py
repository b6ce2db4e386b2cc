"""Contextual Position Encoding (Golovneva et al. 2024): its experiments on small trained
checkpoints, claims C1 to C6.

The task in the training.toml of a checkpoint determines its experiment. Other checkpoints are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from position_papers.cope.error_tasks import COUNTING, FLIP_FLOP, SELECTIVE_COPY, CountingOptions
from position_papers.cope.gates import GATES, GateOptions
from position_papers.cope.other_windows import OTHER_WINDOWS
from position_papers.cope.perplexity import PERPLEXITY
from position_papers.kit import Paper, read_items
from position_papers.kit.learning_curves import LEARNING_CURVES


@dataclass(frozen=True)
class Options(GateOptions, CountingOptions):
    """The amount of measurement: prompts to score, and texts whose gates are measured."""


PAPER = Paper(
    "cope",
    "Contextual Position Encoding (CoPE), made again",
    (FLIP_FLOP, SELECTIVE_COPY, COUNTING, PERPLEXITY, OTHER_WINDOWS, GATES, LEARNING_CURVES),
    Options,
    {"count": 50, "counting_count": 100, "language_count": 12, "gate_texts": 8, "draws": 20},
    items=read_items(Path(__file__).with_name("items.csv")),
)
