"""What a measure leaves out of a layer, by what the layer is."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "nothing"
"""What a measure gives of a layer where its gap is whole."""


@dataclass(frozen=True)
class Gap:
    """What a measure gives of a layer instead of all, and why."""

    reason: str
    """Of layers, in words after "which": "assign no positions"."""
    what: str = NOTHING
    """Such as "no frequencies"; its numbers of them are NaN."""
