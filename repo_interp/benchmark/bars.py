"""What is to be kept, as rules over the table: a quantity of one line, or of two lines of one model, beside its limit.

A bar whose lines were not measured says so; nothing is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

Costs = Callable[[int, str], Cost]
"""The cost on the CPU of a line of one model, by tokens (0: no prompt plays a part) and what was measured; of NaN where it was not."""
Quantity = Callable[[Costs], float]


@dataclass(frozen=True)
class Bar:
    """A quantity and its limit."""

    row: str
    subject: str
    what: str
    limit: float
    quantity: Quantity
    unit: str = "×"
    relation: str = "at most"

    def verdict(self, value: float) -> str:
        """Whether it is kept by `value`; NaN: that it was not measured."""
        if math.isnan(value):
            return "not measured"
        return "met" if (value <= self.limit if self.relation == "at most" else value >= self.limit) else "not met"


def judged(measured: Sequence[Measured]) -> list[tuple[Bar, float]]:
    """Every bar with its value; NaN where it was not measured."""
    known = {
        (one.part.row, one.part.subject, one.part.tokens, line.what): line.cost
        for one in measured
        if one.part.device == "cpu"
        for line in one.lines
    }
    return [
        (bar, bar.quantity(lambda tokens, what, bar=bar: known.get((bar.row, bar.subject, tokens, what), Cost()))) for bar in BARS
    ]


def _times(tokens: int, what: str, beside: str) -> Quantity:
    """CPU seconds of one line over those of another."""
    return lambda costs: costs(tokens, what).cpu_seconds / costs(tokens, beside).cpu_seconds


def _growth(shorter: int, longer: int, what: str, without: str = "") -> Quantity:
    """CPU seconds at the longer length over those at the shorter, of a line, less those of another where one is named."""

    def seconds(costs: Costs, tokens: int) -> float:
        return costs(tokens, what).cpu_seconds - (costs(tokens, without).cpu_seconds if without else 0.0)

    return lambda costs: seconds(costs, longer) / seconds(costs, shorter)


def _megabytes(tokens: int, what: str, beside: str = "") -> Quantity:
    """Megabytes of a line, over those of another where one is named."""
    return lambda costs: costs(tokens, what).megabytes / (costs(tokens, beside).megabytes if beside else 1.0)


def _far(tokens: int, field: str) -> Quantity:
    """How far what was announced is from what was measured: the larger over the smaller."""

    def far(costs: Costs) -> float:
        said, was = (getattr(costs(tokens, what), field) for what in (ANNOUNCED, ANALYSIS))
        return max(said / was, was / said)

    return far


def _beyond_textbook(costs: Costs) -> float:
    """CPU seconds of the textbook way over ours, of what takes sums over all pairs."""
    names = ("components", "three_axis")
    book, ours = (sum(costs(4096, what).cpu_seconds for what in some) for some in (map(textbook_of, names), names))
    return book / ours


BARS = (
    Bar("layer", OLMO2, "4,096 tokens: all measures beside the layer's forward pass", 0.08, _times(4096, ALL, FORWARD)),
    Bar("layer", OLMO2, "4,096 tokens: memory of all measures", 80, _megabytes(4096, ALL), "MB"),
    Bar("layer", OLMO2, "all measures, 4,096 tokens over 2,048", 2.5, _growth(2048, 4096, ALL)),
    Bar("layer", OLMO2, "all measures, 16,384 tokens over 8,192", 2.5, _growth(8192, 16384, ALL)),
    Bar("layer", OLMO2, "4,096 tokens: the textbook's components and fit over ours", 1000, _beyond_textbook, relation="at least"),
    Bar("model", SMOLLM2, "2,048 tokens: with all measures beside the forward pass", 2.25, _times(2048, WITH_ALL, FORWARD)),
    Bar("model", SMOLLM2, "all measures, 4,096 tokens over 2,048", 2.5, _growth(2048, 4096, WITH_ALL, FORWARD)),
    *(
        bar
        for tokens in (2048, 4096)
        for bar in (
            Bar(
                "model",
                OLMO2,
                f"{tokens:,} tokens: with all measures beside the forward pass",
                1.10,
                _times(tokens, WITH_ALL, FORWARD),
            ),
            Bar("model", OLMO2, f"{tokens:,} tokens: memory beyond the model", 300, _megabytes(tokens, WITH_ALL), "MB"),
        )
    ),
    *(
        Bar("loading", subject, "memory at the peak beside the weights", 1.15, _megabytes(0, LOAD, WEIGHTS))
        for subject in (SMOLLM2, OLMO2)
    ),
    *(Bar("inspect", subject, "beside importing its libraries", 1.5, _times(0, INSPECT, IMPORT)) for subject in (NIAH, SMOLLM2)),
    *(
        Bar("analysis", subject, f"announced {what} and what it was, the larger over the smaller", limit, _far(tokens, field))
        for subject, tokens in ((NIAH, 256), (SMOLLM2, 512), (OLMO2, 256))
        for what, limit, field in (("time", 1.25, "cpu_seconds"), ("memory", 1.10, "megabytes"))
    ),
    *(
        Bar("long", subject, "16,384 tokens: memory of the process", 24 * 1024, _megabytes(16384, PROCESS), "MB")
        for subject in (SMOLLM2, OLMO2)
    ),
)
"""In the order of the page."""
