"""A sentence about a run: a number that passed its threshold or its null, and where its reader finds it confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Finding:
    """One sentence about a run, and where its reader finds it confirmed."""

    sentence: str
    """A whole sentence in plain English, with its numbers."""
    evidence: str
    """The variable, the threshold and the null behind it."""
    weight: float
    """How much it tells, from 0 to 1; findings are read in descending order."""
    group: str
    """The group of the run that holds the evidence."""
    layer: int | None = None
    head: int | None = None
    prompt: int | None = None
    token: int | None = None
    variable: str = ""
    """The variable of the group that the page colours heads by; empty: that of the group's first map."""

    @property
    def place(self) -> str:
        """Where to look: "L2 H0, prompt 3"; empty where the sentence is about the whole run."""
        head = f"L{self.layer}" + ("" if self.head is None else f" H{self.head}") if self.layer is not None else ""
        named = (
            head,
            *(f"{name} {value}" for name, value in (("prompt", self.prompt), ("token", self.token)) if value is not None),
        )
        return ", ".join(part for part in named if part)


def heads_named(heads: Sequence[tuple[int, int]], most: int = 4, per_layer: int = 0) -> str:
    """Heads as text: "L0 H0-H3", "L0 H1, L2 H0 and 7 more"; of layers with `per_layer` heads that have all of them "L1, L3-L5"."""
    by_layer = {layer: [head for _, head in some] for layer, some in groupby(sorted(heads), key=lambda each: each[0])}
    whole = [layer for layer, of_layer in by_layer.items() if len(of_layer) == per_layer]
    runs = [((some[0], 0), _run("L", some), per_layer * len(some)) for some in _consecutive(whole)]
    for layer in by_layer.keys() - set(whole):
        runs += [((layer, some[0]), f"L{layer} {_run('H', some)}", len(some)) for some in _consecutive(by_layer[layer])]
    runs.sort()
    rest = len(heads) - sum(count for _, _, count in runs[:most])
    return ", ".join(text for _, text, _ in runs[:most]) + (f" and {rest} more" if rest else "")


def _consecutive(numbers: Sequence[int]) -> list[list[int]]:
    return [[number for _, number in some] for _, some in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]


def _run(letter: str, numbers: Sequence[int]) -> str:
    return f"{letter}{numbers[0]}" + (f"-{letter}{numbers[-1]}" if len(numbers) > 1 else "")


def percent(share: float) -> str:
    """A share as whole percent."""
    return f"{100 * share:.0f} %"


def two_digits(value: float) -> str:
    """A number with two significant digits: "0.04", "1.3", "100"."""
    return f"{float(f'{value:.2g}'):g}"
