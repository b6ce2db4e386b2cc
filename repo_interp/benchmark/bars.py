"""What is to be kept, as rules over the table: a quantity of one line, or of two lines of one part, beside its limit.

A bar whose lines were not measured says so; nothing is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from repo_interp.benchmark.cost import Cost
from repo_interp.benchmark.parts import (
    ALL,
    ANALYSIS,
    ANNOUNCED,
    FORWARD,
    IMPORT,
    INSPECT,
    LOAD,
    NIAH,
    OLMO2,
    PROCESS,
    SMOLLM2,
    WEIGHTS,
    WITH_ALL,
    textbook_of,
)
from repo_interp.benchmark.store import Measured

Costs = Callable[[str, str, int, str], Cost]
"""The cost of a line by row, subject, tokens and what was measured, on the CPU; of NaN where it was not."""
SOLVED = ("components", "three_axis")
"""Measures whose sums and solves the textbook way makes dense."""


@dataclass(frozen=True)
class Bar:
    """A quantity and its limit."""

    what: str
    limit: float
    quantity: Callable[[Costs], float]
    unit: str = "×"
    at_least: bool = False

    def verdict(self, value: float) -> str:
        """Whether it is kept by `value`; NaN: that it was not measured."""
        if math.isnan(value):
            return "not measured"
        return "met" if (value >= self.limit if self.at_least else value <= self.limit) else "not met"


def judged(measured: Sequence[Measured]) -> list[tuple[Bar, float]]:
    """Every bar with its value; NaN where it was not measured."""
    known: Mapping[tuple[str, str, int, str], Cost] = {
        (one.part.row, one.part.subject, one.part.tokens, line.what): line.cost
        for one in measured
        if one.part.device == "cpu"
        for line in one.lines
    }

    def costs(row: str, subject: str, tokens: int, what: str) -> Cost:
        return known.get((row, subject, tokens, what), Cost())

    return [(bar, bar.quantity(costs)) for bar in BARS]


def _times(row: str, subject: str, tokens: int, what: str, beside: str) -> Callable[[Costs], float]:
    """CPU seconds of one line over those of another."""
    return lambda costs: costs(row, subject, tokens, what).cpu_seconds / costs(row, subject, tokens, beside).cpu_seconds


def _growth(row: str, subject: str, lengths: tuple[int, int], what: str, without: str = "") -> Callable[[Costs], float]:
    """CPU seconds at the longer length over those at the shorter, of a line less those of another."""

    def growth(costs: Costs) -> float:
        short, long = (
            costs(row, subject, tokens, what).cpu_seconds - (costs(row, subject, tokens, without).cpu_seconds if without else 0.0)
            for tokens in lengths
        )
        return long / short

    return growth


def _megabytes(row: str, subject: str, tokens: int, what: str, beside: str = "") -> Callable[[Costs], float]:
    """Megabytes of a line, over those of another where one is named."""

    def megabytes(costs: Costs) -> float:
        return costs(row, subject, tokens, what).megabytes / (costs(row, subject, tokens, beside).megabytes if beside else 1.0)

    return megabytes


def _far(row: str, subject: str, tokens: int, field: str) -> Callable[[Costs], float]:
    """How far what was announced is from what was measured: the larger over the smaller."""

    def far(costs: Costs) -> float:
        said, was = (getattr(costs(row, subject, tokens, what), field) for what in (ANNOUNCED, ANALYSIS))
        return max(said / was, was / said)

    return far


def _textbook(costs: Costs) -> float:
    book, ours = (
        sum(costs("layer", OLMO2, 4096, made(name)).cpu_seconds for name in SOLVED) for made in (textbook_of, lambda name: name)
    )
    return book / ours


BARS = (
    Bar("one layer, 4,096 tokens: all measures beside its forward pass", 0.08, _times("layer", OLMO2, 4096, ALL, FORWARD)),
    Bar("one layer, 4,096 tokens: memory of all measures", 80, _megabytes("layer", OLMO2, 4096, ALL), "MB"),
    Bar("one layer: all measures, 4,096 tokens over 2,048", 2.5, _growth("layer", OLMO2, (2048, 4096), ALL)),
    Bar("one layer: all measures, 16,384 tokens over 8,192", 2.5, _growth("layer", OLMO2, (8192, 16384), ALL)),
    Bar("one layer, 4,096 tokens: textbook over ours, components and fit", 1000, _textbook, at_least=True),
    Bar(
        "SmolLM2-135M's shape, 2,048 tokens: forward pass and all measures beside its forward pass",
        2.25,
        _times("model", SMOLLM2, 2048, WITH_ALL, FORWARD),
    ),
    Bar(
        "SmolLM2-135M's shape: all measures, 4,096 tokens over 2,048",
        2.5,
        _growth("model", SMOLLM2, (2048, 4096), WITH_ALL, FORWARD),
    ),
    Bar(
        "OLMo-2-1B's shape, 2,048 tokens: forward pass and all measures beside its forward pass",
        1.10,
        _times("model", OLMO2, 2048, WITH_ALL, FORWARD),
    ),
    Bar("OLMo-2-1B's shape, 2,048 tokens: memory beyond the model", 300, _megabytes("model", OLMO2, 2048, WITH_ALL), "MB"),
    *(
        Bar(f"loading {subject}: memory at the peak beside the weights", 1.15, _megabytes("loading", subject, 0, LOAD, WEIGHTS))
        for subject in (SMOLLM2, OLMO2)
    ),
    *(
        Bar(f"inspect {subject}: beside importing its libraries", 1.5, _times("inspect", subject, 0, INSPECT, IMPORT))
        for subject in (NIAH, SMOLLM2)
    ),
    *(
        Bar(f"analyze {subject}: announced {what}, the larger over the smaller", limit, _far("analysis", subject, tokens, field))
        for subject, tokens in ((NIAH, 256), (SMOLLM2, 512))
        for what, limit, field in (("time", 1.25, "cpu_seconds"), ("memory", 1.10, "megabytes"))
    ),
    *(
        Bar(
            f"{subject}'s shape, 16,384 tokens, all measures: memory of the process",
            24 * 1024,
            _megabytes("long", subject, 16384, PROCESS),
            "MB",
        )
        for subject in (SMOLLM2, OLMO2)
    ),
)
"""In the order of the page."""
