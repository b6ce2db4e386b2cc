"""`python -m benchmarks`: every measure on one layer, beside the textbook way and beside the layer's own forward pass.

One run, one machine, one table per length; ratios first, for they are what travels to other machines.
"""

from __future__ import annotations

import argparse
import math
import platform
from dataclasses import replace

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import textbook
from benchmarks.cost import Cost, cost
from benchmarks.layer import Layer
from benchmarks.textbook import Part
from repo_interp.measures.attention_mass import AttentionMass
from repo_interp.measures.components import Components
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.patterns import Patterns
from repo_interp.measures.positions import Positions
from repo_interp.measures.statistics import share
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

COLUMNS = ("measure", "CPU ×", "MB ×", "% forward", "CPU s", "MB", "book s", "book MB")
LEGEND = (
    "CPU ×, MB ×: the textbook way over ours. % forward: our CPU time over that of the layer's forward pass. "
    "CPU s, MB: CPU seconds and peak memory beyond the inputs. book: the textbook way, which makes every map; its MB are of what was made."
)


def main() -> None:
    """Measure what was asked for and print one table per length."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens")
    parser.add_argument("--measures", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="1 (the default) wastes no CPU time on waiting")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    console = Console()
    with torch.inference_mode():
        for tokens in chosen.lengths:
            console.print(compare(tokens, chosen.measures, chosen.heads, chosen.d_head))
    machine = platform.processor() or platform.machine()
    console.print(f"{LEGEND} float32, {machine}, {chosen.threads} thread(s), torch {torch.__version__}.")


def compare(tokens: int, measures: list[str], heads: int, d_head: int) -> Table:
    """One row per measure, one for all of them, one for the layer's own forward pass."""
    layer = Layer(tokens, heads, d_head)
    forward = cost(layer.forward(), repeats=2)
    inputs, spans = layer.inputs(), layer.spans()
    rows, made = {}, []
    for name in measures:
        measure, way = ROWS[name]
        exact = cost(lambda measure=measure: measure.observe(replace(inputs), spans), repeats=3)
        parts = [] if way is None else way(inputs, spans)
        rows[name] = exact, _whole(parts)
        if parts:
            made.append(f"{name} {' and '.join(part.what for part in parts)}")
    known = [slow for _, slow in rows.values() if slow is not None]
    chosen = [ROWS[name][0] for name in measures]

    def all_of_them() -> None:
        """One pass over the heads for all measures, as an analysis does it; copies of the inputs remember nothing."""
        afresh = replace(inputs)
        share(chosen, afresh, spans)
        for measure in chosen:
            measure.observe(afresh, spans)

    rows["all"] = cost(all_of_them, repeats=3), _together(known) if known else None
    table = Table(
        title=f"n = {tokens}, {heads} heads, d_head {d_head}",
        padding=(0, 1, 0, 0),
        caption=f"Textbook made, its time multiplied: {'; '.join(made)}.",
        box=box.SIMPLE_HEAD,
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "measure" else "right", no_wrap=True)
    for name, (exact, slow) in rows.items():
        table.add_row(name, *_cells(exact, slow, forward))
    table.add_row("layer's forward", "", "", "100", f"{forward.seconds:.3f}", _number(forward.megabytes, "{:.0f}"), "", "")
    return table


def _whole(parts: list[Part]) -> Cost | None:
    """Cost of all that the parts are parts of; None where there are none."""
    costs = [cost(part.call) for part in parts]
    times = [part.times * part_cost.seconds for part, part_cost in zip(parts, costs, strict=True)]
    return Cost(sum(times), max(each.megabytes for each in costs)) if parts else None


def _together(costs: list[Cost]) -> Cost:
    """One after the other."""
    return Cost(sum(each.seconds for each in costs), max(each.megabytes for each in costs))


def _cells(exact: Cost, slow: Cost | None, forward: Cost) -> list[str]:
    ours = [
        _number(100 * exact.seconds / forward.seconds, "{:.1f}"),
        f"{exact.seconds:.3f}",
        _number(exact.megabytes, "{:.0f}"),
    ]
    if slow is None:
        return ["-", "-", *ours, "-", "-"]
    return [
        _number(slow.seconds / exact.seconds, "{:,.0f}"),
        _number(slow.megabytes / max(exact.megabytes, 1.0), "{:,.0f}"),
        *ours,
        _number(slow.seconds, "{:,.1f}"),
        _number(slow.megabytes, "{:,.0f}"),
    ]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


if __name__ == "__main__":
    main()
