"""`python -m benchmarks`: every measure on one layer, beside the textbook way and beside the layer's own forward pass.

One run, one machine, one table a length; ratios first, for they are what travels to other machines.
"""

from __future__ import annotations

import argparse
import math
import platform

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import textbook
from benchmarks.cost import Cost, cost
from benchmarks.layer import Layer
from repo_interp.measures.attention_mass import AttentionMass
from repo_interp.measures.components import Components
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.patterns import Patterns
from repo_interp.measures.positions import Positions
from repo_interp.measures.three_axis import ThreeAxis

ROWS = {
    "positions": (Positions(), None),
    "patterns": (Patterns(), None),
    "attention_mass": (AttentionMass(), textbook.attention_mass),
    "components": (Components(training_length=4096), textbook.components),
    "three_axis": (ThreeAxis(extras=()), textbook.three_axis),
    "fake_distance": (FakeDistance(axes="none"), textbook.fake_distance),
}
"""The measure and its textbook way, None where the measure is the textbook's."""

COLUMNS = ("measure", "CPU ×", "memory ×", "% forward", "s", "MB", "book s", "book MB", "made of it")
LEGEND = (
    "CPU ×, memory ×: the textbook way over ours; % forward: our CPU time over that of the layer's forward pass; s, MB: CPU seconds and "
    "peak memory beyond the inputs; book: the textbook way, which makes every map - of some heads or components, its time multiplied."
)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens")
    parser.add_argument("--measures", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="1 (the default) wastes no CPU time on waiting")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    console = Console(width=max(96, Console().width))
    with torch.inference_mode():
        for tokens in chosen.lengths:
            console.print(compare(tokens, chosen.measures, chosen.heads, chosen.d_head))
    machine = platform.processor() or platform.machine()
    console.print(f"{LEGEND} float32, {machine}, {chosen.threads} thread(s), torch {torch.__version__}.")


def compare(tokens: int, measures: list[str], heads: int, d_head: int) -> Table:
    """One row a measure, and one for all of them."""
    table = Table(title=f"n = {tokens}, {heads} heads, d_head {d_head}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in (COLUMNS[0], COLUMNS[-1]) else "right", no_wrap=True)
    layer = Layer(tokens, heads, d_head)
    forward = cost(layer.forward(), repeats=2)
    inputs, spans = layer.inputs(), layer.spans()
    exact, slow = [], []
    for name in measures:
        measure, way = ROWS[name]
        exact.append(cost(lambda measure=measure: measure.observe(inputs, spans), repeats=3))
        parts = [] if way is None else way(inputs, spans)
        costs = [cost(part.call) for part in parts]
        slow.append(
            Cost(
                sum(part.times * found.seconds for part, found in zip(parts, costs, strict=True)) if parts else math.nan,
                max((found.megabytes for found in costs), default=math.nan),
            )
        )
        said = ", ".join(part.what for part in parts) or "-"
        table.add_row(name, *_cells(exact[-1], slow[-1], forward), said)
    table.add_section()
    together = Cost(sum(found.seconds for found in exact), max(found.megabytes for found in exact))
    known = [found for found in slow if not math.isnan(found.seconds)]
    textbooks = Cost(sum(found.seconds for found in known), max((found.megabytes for found in known), default=math.nan))
    table.add_row("all", *_cells(together, textbooks, forward), "")
    table.add_row(
        "layer forward",
        "",
        "",
        "100.0",
        f"{forward.seconds:.3f}",
        f"{forward.megabytes:.0f}",
        "",
        "",
        "",
    )
    return table


def _cells(exact: Cost, slow: Cost, forward: Cost) -> list[str]:
    return [
        _number(slow.seconds / exact.seconds, "{:,.0f}"),
        _number(slow.megabytes / max(exact.megabytes, 1.0), "{:,.0f}"),
        _number(100 * exact.seconds / forward.seconds, "{:.1f}"),
        f"{exact.seconds:.3f}",
        _number(exact.megabytes, "{:.0f}"),
        _number(slow.seconds, "{:,.1f}"),
        _number(slow.megabytes, "{:,.0f}"),
    ]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


if __name__ == "__main__":
    main()
