"""A sentence about a run, with the place of its evidence.

It states a number that passed its threshold or its null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import xarray as xr

from repo_interp.plots.marks.arrays import ranked_heads


@dataclass(frozen=True)
class Finding:
    """One sentence about a run, and the place of its evidence."""

    sentence: str
    """A whole sentence in plain English, with its numbers."""
    evidence: str
    """The threshold and the null behind it, in words."""
    weight: float
    """Importance, from 0 to 1; findings are sorted in descending order."""
    group: str
    """The group of the run that holds the evidence."""
    layer: int | None = None
    head: int | None = None
    prompt: int | None = None
    token: int | None = None
    variable: str = ""
    """The variable of the group that the page colors heads by; empty: that of the group's first
    map.
    """
    looks_at: Literal["first", "previous", "copy", "after a copy", ""] = ""
    """The keys that the sentence is about: the first token, the token before, earlier copies of the
    token, tokens after these; empty: others. The page opens at the token that looks there most.
    """

    def __str__(self) -> str:
        return self.sentence + (f"  [{self.place}]" if self.place else "")

    @property
    def place(self) -> str:
        """Its place: "L2 H0, prompt 3"; empty if the sentence is about the whole run."""
        head = (
            f"L{self.layer}" + ("" if self.head is None else f" H{self.head}")
            if self.layer is not None
            else ""
        )
        named = (
            head,
            *(
                f"{name} {value}"
                for name, value in (("prompt", self.prompt), ("token", self.token))
                if value is not None
            ),
        )
        return ", ".join(part for part in named if part)


def heads_named(heads: Sequence[tuple[int, int]], most: int = 4, per_layer: int = 0) -> str:
    """Write heads as text: "L0 H0-H3", or "L0 H1, L2 H0 and 7 more".

    Args:
        heads: Labels (layer, head).
        most: Largest number of entries; neighboring heads of a layer are one entry.
        per_layer: Heads of a layer; if all are listed, the entry is "L3". 0: unknown.

    Returns:
        The text.
    """
    runs = []
    # Neighboring heads of a layer share the difference of number and rank.
    for _, some in groupby(
        enumerate(sorted(heads)), key=lambda pair: (pair[1][0], pair[1][1] - pair[0])
    ):
        run = [head for _, head in some]
        of_layer = (
            f" H{run[0][1]}" + (f"-H{run[-1][1]}" if len(run) > 1 else "")
            if len(run) != per_layer
            else ""
        )
        runs.append((f"L{run[0][0]}{of_layer}", len(run)))
    shown = runs[:most]
    rest = len(heads) - sum(count for _, count in shown)
    return ", ".join(text for text, _ in shown) + (f" and {rest} more" if rest else "")


def layers_named(layers: Sequence[int]) -> str:
    """Write layers as text: "L3-L5, L10".

    Args:
        layers: Numbers of layers, ascending.

    Returns:
        The text; neighboring layers are one entry.
    """
    # Neighboring layers share the difference of number and place in the list
    runs = [
        [layer for _, layer in some]
        for _, some in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(
        "-".join(f"L{end}" for end in dict.fromkeys((*run[:1], *run[-1:]))) for run in runs
    )


def over(values: xr.Dataset | xr.DataArray) -> str:
    """Say in words which texts numbers are means over.

    Args:
        values: Numbers [prompt, ...].

    Returns:
        "mean over 20 prompts", or "in one prompt".
    """
    count = values.sizes.get("prompt", 1)
    return "in one prompt" if count == 1 else f"mean over {count} prompts"


def percent(share: float) -> str:
    """Write a share as whole percent.

    Args:
        share: Share from 0 to 1.

    Returns:
        The text.
    """
    # Rounding to 0 % would mean none
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def runner_up(
    values: xr.DataArray,
    named: Collection[tuple[int, int]],
    written: Callable[[float], str] = percent,
) -> str:
    """Name the strongest head that a sentence does not name, for comparison.

    Args:
        values: Numbers [layer, head].
        named: Labels (layer, head) of the heads in the sentence.
        written: Text of a number.

    Returns:
        ", next L4 H1 (22 %)"; empty if there is no other head.
    """
    for layer, head in ranked_heads(values):
        if (layer, head) not in named:
            value = float(values.sel(layer=layer, head=head))
            return f", next L{layer} H{head} ({written(value)})"
    return ""
