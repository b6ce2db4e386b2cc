"""Results that a measure cannot give for a layer, by the properties of the layer."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "nothing"
"""Result of a measure for a layer with a complete gap."""

BEYOND_ROTATION = (
    "have logits that depend on contents and positions other than by rotation (added logits that "
    "read contents, or a transform that reads positions)"
)
"""Reason of measures that turn or move a key: of layers whose `logits_by_content` is true."""


@dataclass(frozen=True)
class Gap:
    """The partial result of a measure for a layer, and the reason."""

    reason: str
    """Of layers, in words after "which": "assign no positions"."""
    what: str = NOTHING
    """Such as "no frequencies"; its numbers of them are NaN."""
